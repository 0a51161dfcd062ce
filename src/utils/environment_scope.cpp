#include "accelerate/utils/environment_scope.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "utils/raise.hpp"

namespace accelerate {

EnvironmentScope::EnvironmentScope(bool clear, const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables)
    if (name.empty() || name.find('=') != std::string::npos)
      raise<ConfigError>("patch_environment: a variable is called '{}', expected a name without '='", name);
  for (char** entry = environ; entry && *entry; ++entry)
    if (const char* const equals = std::strchr(*entry, '='))
      before_.emplace(std::string(static_cast<const char*>(*entry), equals), equals + 1);
  if (clear) ::clearenv();
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
}

EnvironmentScope::~EnvironmentScope() {
  ::clearenv();
  for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
}

EnvironmentScope clear_environment() { return EnvironmentScope(true, {}); }

EnvironmentScope patch_environment(const std::map<std::string, std::string>& variables) {
  return EnvironmentScope(false, variables);
}

}  // namespace accelerate
