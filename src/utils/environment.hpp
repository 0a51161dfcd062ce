#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

/// Reading environment variables with checks.
namespace accelerate::environment {

/// The value, or nothing when unset or empty.
std::optional<std::string> text(const char* name);
/// The first of `names` that is set, as a whole number. @throws ConfigError when it is something else.
std::optional<int64_t> integer(std::initializer_list<const char*> names);
/// A number with or without fraction. @throws ConfigError when it is something else, infinite or none.
std::optional<double> number(const char* name);
/// y, yes, t, true, on, 1 against n, no, f, false, off, 0 in any case. @throws ConfigError.
std::optional<bool> flag(const char* name);

}  // namespace accelerate::environment
