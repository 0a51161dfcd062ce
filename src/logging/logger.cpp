#include "accelerate/logging.hpp"

#include <set>
#include <utility>

#include "accelerate/state.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {

void require_state() {
  if (!PartialState::initialized())
    raise<ConfigError>(
        "logging: no Accelerator and no PartialState has been constructed yet, from which a process knows its rank; "
        "construct one before the first call that logs (get_logger() may come earlier)");
}

/// @return false: it has been said.
bool is_new(const std::string& logger, std::string_view text) {
  static Mutex mutex;
  static std::set<std::pair<std::string, std::string>> said;
  const MutexLock lock(mutex);
  return said.emplace(logger, text).second;
}

}  // namespace

Logger get_logger(const std::string& name, const std::optional<std::string>& level) {
  logs::check_settings();
  const auto wanted = level ? level : environment::text("ACCELERATE_LOG_LEVEL");
  Logger logger(name);
  if (wanted) {
    logger.set_level(*wanted);
    logs::set_level("", log_level_from_string(*wanted));
  }
  return logger;
}

void Logger::log(LogLevel level, std::string_view text, const LogOptions& options) const {
  require_state();
  const PartialState state;
  const auto say = [&] {
    if (is_enabled_for(level)) logs::emit(level, name_, std::string(text));
  };
  if (!options.in_order) {
    if (!options.main_process_only || state.is_main_process()) say();
    return;
  }
  for (int64_t rank = 0; rank < state.num_processes(); ++rank) {
    if (rank == state.process_index()) {
      say();
      logs::wait_for_reader();
    }
    state.wait_for_everyone();
  }
}

void Logger::warning_once(std::string_view text, const LogOptions& options) const {
  require_state();
  if (is_new(name_, text)) warning(text, options);
}

void Logger::set_level(LogLevel level) const { logs::set_level(name_, level); }
void Logger::set_level(const std::string& level) const { set_level(log_level_from_string(level)); }
bool Logger::is_enabled_for(LogLevel level) const { return logs::enabled(name_, level); }
bool Logger::is_enabled_for(const std::string& level) const { return is_enabled_for(log_level_from_string(level)); }

}  // namespace accelerate
