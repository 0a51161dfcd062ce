#include "utils/log.hpp"

#include <c10/util/Exception.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <typeinfo>

#include "utils/environment.hpp"
#include "utils/log_output.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace logs {
namespace {

/// Nothing is destroyed at exit: other threads, and destructors of statics, may still have something to say.
struct LogSettings {
  Mutex mutex;
  std::map<std::string, LogLevel, std::less<>> levels ACCELERATE_GUARDED_BY(mutex);
  std::shared_ptr<const LogSink> sink ACCELERATE_GUARDED_BY(mutex);  ///< null: the default one
  std::atomic<int64_t> rank{-1};
};

LogSettings& settings() {
  static auto& only = *new LogSettings;
  return only;
}

std::optional<LogLevel> level_of_environment() {
  const auto text = environment::text("ACCELERATE_LOG_LEVEL");
  return text ? std::optional(log_level_from_string(*text)) : std::nullopt;
}

bool json_is_wanted() {
  const auto format = environment::text("ACCELERATE_LOG_FORMAT").value_or("text");
  if (format != "text" && format != "json")
    raise<ConfigError>("environment: ACCELERATE_LOG_FORMAT is '{}', expected text or json", format);
  return format == "json";
}

/// Logging must not fail for a wrong setting: PartialState and get_logger() have said that it is wrong.
template <class F> auto or_default(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const ConfigError&) {
    return {};
  }
}

int64_t own_rank() {
  const int64_t rank = settings().rank;
  if (rank >= 0) return rank;
  return or_default([] { return environment::integer({"RANK"}); }).value_or(0);
}

}  // namespace

void set_level(const std::string& logger, LogLevel level) {
  auto& all = settings();
  const MutexLock lock(all.mutex);
  if (level == LogLevel::notset) all.levels.erase(logger);
  else all.levels[logger] = level;
}

bool enabled(std::string_view logger, LogLevel level) {
  auto& all = settings();
  {
    const MutexLock lock(all.mutex);
    for (std::string_view name = logger;;) {
      if (const auto own = all.levels.find(name); own != all.levels.end()) return level >= own->second;
      if (name.empty()) break;
      const size_t dot = name.rfind('.');
      name = dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
    }
  }
  return level >= or_default(level_of_environment).value_or(LogLevel::warning);
}

void set_rank(std::optional<int64_t> rank) { settings().rank = rank.value_or(-1); }

void check_settings() {
  level_of_environment();
  json_is_wanted();
  environment::flag("ACCELERATE_LOG_RANK");
}

void emit(LogLevel level, std::string_view logger, std::string message) noexcept try {
  const LogRecord record{std::chrono::system_clock::now(), level, std::string(logger), std::move(message), own_rank()};
  std::shared_ptr<const LogSink> sink;
  {
    auto& all = settings();
    const MutexLock lock(all.mutex);
    sink = all.sink;
  }
  try {
    if (sink != nullptr) return (*sink)(record);
  } catch (...) {  // the program's own sink failed: not a reason to lose the record, nor to end the training
  }
  write_to_stderr(record,
                  {.json = or_default(json_is_wanted),
                   .rank = or_default([] { return environment::flag("ACCELERATE_LOG_RANK"); }).value_or(false)});
} catch (...) {  // no memory for it
}

void take_libtorch_warnings() {
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning& warning) override { warn("torch", "{}", warning.msg()); }
  };
  // A handler of the program's, or Python's, is of another type.
  static Handler handler;
  const auto& present = *c10::WarningUtils::get_warning_handler();
  if (typeid(present) == typeid(c10::WarningHandler)) c10::WarningUtils::set_warning_handler(&handler);
}

void wait_for_reader() {
  {
    auto& all = settings();
    const MutexLock lock(all.mutex);
    if (all.sink) return;
  }
  struct stat status {};
  if (::fstat(STDERR_FILENO, &status) != 0 || !S_ISFIFO(status.st_mode)) return;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (int waiting = 0;
       ::ioctl(STDERR_FILENO, FIONREAD, &waiting) == 0 && waiting > 0 && std::chrono::steady_clock::now() < deadline;)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void reset() {
  set_rank({});
  auto& all = settings();
  const MutexLock lock(all.mutex);
  all.levels.clear();
  all.sink.reset();
}

}  // namespace logs

LogLevel log_level_from_string(const std::string& text) {
  std::string name = text;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  if (name == "WARN") return LogLevel::warning;
  if (name == "FATAL") return LogLevel::critical;
  for (const auto level :
       {LogLevel::notset, LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error, LogLevel::critical})
    if (name == to_string(level)) return level;
  raise<ConfigError>(
      "logging: the level is '{}', expected DEBUG, INFO, WARNING, ERROR, CRITICAL or NOTSET; see ACCELERATE_LOG_LEVEL "
      "and get_logger()",
      text);
}

LogSink set_log_sink(LogSink sink) {
  auto& all = logs::settings();
  auto next = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  const MutexLock lock(all.mutex);
  all.sink.swap(next);
  return next ? *next : LogSink();
}

}  // namespace accelerate
