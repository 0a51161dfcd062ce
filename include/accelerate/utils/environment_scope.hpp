#pragma once

#include <map>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Puts all environment variables of the process back as they were, when it is destroyed: also those that were set or
/// unset meanwhile, by whomever. Scopes end in the reverse order of their beginning.
///
/// The environment belongs to the whole process and the C library guards it by nothing: no other thread may read or
/// write variables at the moments when a scope begins and ends.
class ACCELERATE_API EnvironmentScope {
 public:
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  friend ACCELERATE_API EnvironmentScope clear_environment();
  friend ACCELERATE_API EnvironmentScope patch_environment(const std::map<std::string, std::string>& variables);
  EnvironmentScope(bool clear, const std::map<std::string, std::string>& variables);
  std::map<std::string, std::string> before_;
};

/// Empties the environment until the scope ends: `const auto scope = clear_environment();`
[[nodiscard]] ACCELERATE_API EnvironmentScope clear_environment();
/// Sets variables until the scope ends. Names are taken as they are; the reference puts them in capitals.
/// @throws ConfigError, with nothing changed, for a name that is empty or has a '='.
[[nodiscard]] ACCELERATE_API EnvironmentScope patch_environment(const std::map<std::string, std::string>& variables);

}  // namespace accelerate
