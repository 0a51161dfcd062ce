#pragma once

/// Logging for programs of several processes. Source: the reference's accelerate.logging; features table 1.11.

#include <optional>
#include <string>
#include <string_view>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/log_sink.hpp"

namespace accelerate {

struct LogOptions {
  /// Only the main process (rank 0) says it. Not looked at with in_order.
  bool main_process_only = true;
  /// All processes say it, one after the other in the order of their ranks, also at the end of `accelerate launch`.
  /// Collective: every rank calls it, also one whose level leaves it silent; blocks until all have spoken.
  bool in_order = false;
};

/// A named logger. Copies are the same logger; names are dotted, and "a.b" has the level of "a" until it gets its own.
///
/// Nothing is collective but in_order. Any thread (in_order: the one that calls collectives). Each call that logs
/// @throws ConfigError as long as no Accelerator or PartialState has been constructed, from which a process knows its
/// rank; with in_order, CommError when a peer fails meanwhile.
class ACCELERATE_API Logger {
 public:
  void log(LogLevel level, std::string_view text, const LogOptions& options = {}) const;
  void debug(std::string_view text, const LogOptions& options = {}) const { log(LogLevel::debug, text, options); }
  void info(std::string_view text, const LogOptions& options = {}) const { log(LogLevel::info, text, options); }
  void warning(std::string_view text, const LogOptions& options = {}) const { log(LogLevel::warning, text, options); }
  void error(std::string_view text, const LogOptions& options = {}) const { log(LogLevel::error, text, options); }
  void critical(std::string_view text, const LogOptions& options = {}) const { log(LogLevel::critical, text, options); }
  /// warning(), but nothing where a logger of this name has had this text before in this process.
  void warning_once(std::string_view text, const LogOptions& options = {}) const;

  /// From which level on records are said, in this process: Python's names. "NOTSET" takes this logger's own away.
  /// @throws ConfigError for another name.
  void set_level(const std::string& level) const;
  void set_level(LogLevel level) const;
  bool is_enabled_for(LogLevel level) const;
  /// @throws ConfigError for what is no level's name.
  bool is_enabled_for(const std::string& level) const;
  const std::string& name() const { return name_; }

 private:
  friend ACCELERATE_API Logger get_logger(const std::string& name, const std::optional<std::string>& level);
  explicit Logger(std::string name) : name_(std::move(name)) {}
  std::string name_;
};

/// @param level  Python's names in any case; unset: ACCELERATE_LOG_LEVEL. Given by either, it becomes this logger's
///   level and, as in the reference, that of all loggers without one of their own, the library's among them. Without
///   any, WARNING.
/// @throws ConfigError for what is no level's name. Needs no Accelerator yet.
ACCELERATE_API Logger get_logger(const std::string& name, const std::optional<std::string>& level = {});

}  // namespace accelerate
