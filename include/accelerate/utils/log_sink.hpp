#pragma once

/// The destination of log records, those of Loggers (accelerate/logging.hpp) and of the library itself.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Python's levels and their numbers.
enum class LogLevel { notset = 0, debug = 10, info = 20, warning = 30, error = 40, critical = 50 };
/// "WARNING"
ACCELERATE_API const char* to_string(LogLevel level);
/// Python's names in any case, also "warn" and "fatal". @throws ConfigError naming them.
ACCELERATE_API LogLevel log_level_from_string(const std::string& text);

struct LogRecord {
  std::chrono::system_clock::time_point time;
  LogLevel level;
  std::string logger;   ///< its name; the library's own begin with "accelerate.", LibTorch's warnings are of "torch"
  std::string message;  ///< UTF-8, possibly of several lines
  int64_t rank = 0;     ///< of this process in the job
};

/// Takes a record; called on the thread that logs, by several threads at a time. Its exceptions are dropped, and the
/// record goes to the default sink.
using LogSink = std::function<void(const LogRecord&)>;

/// All records of this process go to `sink` from now on, none to the default one; an empty function brings that back.
/// Any thread. @return the sink before, empty for the default one.
///
/// The default one writes a record by one write(2) to standard error, so that records of threads, and of processes that
/// share a pipe (up to PIPE_BUF, 4096 bytes) or a file, don't mix. ACCELERATE_LOG_FORMAT=json makes each a line of JSON
/// with `time` (ISO 8601, UTC), `level`, `logger`, `rank`, `message`; ACCELERATE_LOG_RANK=true puts "[RANK 1] " before
/// the message of the form for people.
ACCELERATE_API LogSink set_log_sink(LogSink sink);

}  // namespace accelerate
