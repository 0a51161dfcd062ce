#include "accelerate/utils/clear_environment.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace accelerate {
namespace {

std::map<std::string, std::string> all_variables() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry && *entry; ++entry)
    if (const char* const equals = std::strchr(*entry, '='))
      variables.emplace(std::string(static_cast<const char*>(*entry), equals), equals + 1);
  return variables;
}

}  // namespace

ClearedEnvironment::ClearedEnvironment() : before_(all_variables()) { ::clearenv(); }

ClearedEnvironment::~ClearedEnvironment() {
  ::clearenv();
  for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace accelerate
