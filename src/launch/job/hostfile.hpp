#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::launcher {

/// A machine of a hostfile, after the filters.
struct RemoteHost {
  std::string name;
  std::vector<int64_t> slots;  ///< a process each; the numbers are those of its GPUs
  bool chosen_slots = false;   ///< a filter named some of them
};

/// Reads lines of "NAME slots=N" (empty lines and # comments are passed over), as DeepSpeed's hostfiles have them.
/// @throws ConfigError naming the line.
std::vector<RemoteHost> parse_hostfile(const std::string& text, const std::string& file);

/// Applies a filter in DeepSpeed's syntax, "NAME@NAME:0,2": machines, or some of their slots, to use and no others, or
/// to leave out. One of the two may be given.
/// @throws ConfigError for names and slots that the hostfile lacks, or when nothing is left.
std::vector<RemoteHost> filter_hosts(const std::vector<RemoteHost>& hosts, const std::string& include,
                                     const std::string& exclude);

}  // namespace accelerate::launcher
