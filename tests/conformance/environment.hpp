#pragma once

#include <cstdlib>
#include <optional>

#include "runner.hpp"

namespace conformance {

/// Sets variables for a scope. The runner's own environment has none of them.
class Environment {
 public:
  explicit Environment(const json& variables) : variables_(variables) {
    for (const auto& [name, value] : variables_.items()) setenv(name.c_str(), value.get<std::string>().c_str(), 1);
  }
  ~Environment() {
    for (const auto& [name, value] : variables_.items()) unsetenv(name.c_str());
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const json& variables_;
};

template <class T> json or_null(const std::optional<T>& value) { return value ? json(*value) : json(); }

/// The result of f, or null for one of our errors.
inline json outcome(const std::function<json()>& f) {
  json found;
  return throws_error([&] { found = f(); }) ? json() : found;
}

}  // namespace conformance
