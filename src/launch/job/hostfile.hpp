#pragma once

#include <cstdint>
#include <map>
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

/// The same of a file. @throws ConfigError naming `flag`, too, when it can't be read.
std::vector<RemoteHost> read_hostfile(const std::string& flag, const std::string& file);

/// The filters' names where the user gave them.
struct FilterFlags {
  const char *include = "--include", *exclude = "--exclude";
};

/// Applies a filter in DeepSpeed's syntax, "NAME@NAME:0,2": machines, or some of their slots, to use and no others, or
/// to leave out. One of the two may be given. The remaining ones have the hostfile's order.
/// @throws ConfigError for names and slots that the hostfile lacks, or when nothing is left.
std::vector<RemoteHost> filter_hosts(const std::vector<RemoteHost>& hosts, const std::string& include,
                                     const std::string& exclude, const FilterFlags& flags = {});

/// The slots of all of them together.
int64_t all_slots(const std::vector<RemoteHost>& hosts);

/// Reads lines NAME=VALUE (empty lines and those that begin with # are passed over), as a .deepspeed_env has them.
/// Blanks around both are left out, and of two lines for a name the last counts.
/// @throws ConfigError naming the line.
std::map<std::string, std::string> parse_deepspeed_env(const std::string& text, const std::string& file);

}  // namespace accelerate::launcher
