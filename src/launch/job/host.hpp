#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace accelerate::launcher {

/// The facts about the launcher's machine that it needs; a value, so that tests can invent one.
struct Host {
  int64_t physical_cores = 1;  ///< hyper-threads counted once, limited to those that this process may use
  std::map<std::string, std::string> environment;  ///< the caller's
  int64_t accelerators = 0;                        ///< GPUs and the like that this process may use
  const char* device_type = "cuda";                ///< their kind (utils/device_types.hpp)
  bool peer_access_is_broken = false;              ///< between GPUs, though their driver claims it
  std::filesystem::path folder;  ///< of the program that runs, as it was called: links are not followed
  static Host current();

  /// The variable's text; nothing if it is unset or empty.
  std::optional<std::string> variable(const std::string& name) const;
  /// The variable as a number; nothing if it is unset or not one.
  std::optional<int64_t> number(const std::string& name) const;
  /// The first executable called `name` in the caller's PATH, or an empty path.
  std::filesystem::path find_in_path(const std::string& name) const;
};

/// Whether it is a file that this user may execute.
bool is_executable(const std::filesystem::path& path);

}  // namespace accelerate::launcher
