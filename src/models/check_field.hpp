#pragma once

#include <sstream>
#include <string>

#include "accelerate/error.hpp"

namespace accelerate::models {

/// For validate() of configurations. @throws ConfigError unless `holds`.
template <class Value>
void check_field(bool holds, const char* config, const char* field, const Value& found, const std::string& expected) {
  if (holds) return;
  std::ostringstream text;
  text << config << ": " << field << " is " << found << ", expected " << expected << ".";
  throw ConfigError(text.str());
}

}  // namespace accelerate::models
