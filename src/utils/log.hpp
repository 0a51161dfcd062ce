#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "accelerate/utils/log_sink.hpp"

/// All messages of the library go through here: levels by logger, one sink for all. Thread-safe.
namespace accelerate::logs {

/// @param logger  "" is the root. Names are dotted: "a.b" has a's level until it gets its own, and a the root's, which
///   is ACCELERATE_LOG_LEVEL, else WARNING. NOTSET takes a level back.
void set_level(const std::string& logger, LogLevel level);
bool enabled(std::string_view logger, LogLevel level);

/// For records' `rank`; nothing: RANK of the environment.
void set_rank(std::optional<int64_t> rank);

/// @throws ConfigError when ACCELERATE_LOG_LEVEL, ACCELERATE_LOG_FORMAT or ACCELERATE_LOG_RANK can't be understood,
/// which logging itself passes over.
void check_settings();

/// To the sink, whatever the levels are.
void emit(LogLevel level, std::string_view logger, std::string message) noexcept;

/// A warning of the library's own; which rank says it is decided by who calls.
/// @param logger  "accelerate." and the module's name
template <class... Args> void warn(std::string_view logger, fmt::format_string<Args...> text, Args&&... args) {
  if (enabled(logger, LogLevel::warning))
    emit(LogLevel::warning, logger, fmt::format(text, std::forward<Args>(args)...));
}

/// LibTorch's warnings on this thread come here, unless the program has a handler of its own for them.
void take_libtorch_warnings();

/// Waits until a reader at the other end of the default sink's pipe has taken what was written, a second at most: a
/// launcher that reads a pipe of each rank then knows the order.
void wait_for_reader();

/// Sets all as at the start of the process. For tests.
void reset();

}  // namespace accelerate::logs
