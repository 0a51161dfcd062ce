#include "utils/environment.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace accelerate::environment {

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

std::optional<int64_t> integer(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto value = text(name);
    if (!value) continue;
    int64_t number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    if (error != std::errc() || end != value->data() + value->size())
      raise<ConfigError>("environment: {} is '{}', expected a whole number; unset it or let `accelerate launch` set it",
                         name, *value);
    return number;
  }
  return std::nullopt;
}

std::optional<double> number(const char* name) {
  const auto value = text(name);
  if (!value) return std::nullopt;
  double result = 0;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), result);
  if (error != std::errc() || end != value->data() + value->size() || !std::isfinite(result))
    raise<ConfigError>(
        "environment: {} is '{}', expected a number such as 0.5; unset it or let `accelerate launch` set it", name,
        *value);
  return result;
}

std::optional<bool> flag(const char* name) {
  auto value = text(name);
  if (!value) return std::nullopt;
  std::transform(value->begin(), value->end(), value->begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* yes : {"y", "yes", "t", "true", "on", "1"})
    if (*value == yes) return true;
  for (const char* no : {"n", "no", "f", "false", "off", "0"})
    if (*value == no) return false;
  raise<ConfigError>("environment: {} is '{}', expected true or false", name, *value);
}

}  // namespace accelerate::environment
