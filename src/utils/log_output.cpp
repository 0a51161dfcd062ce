#include "utils/log_output.hpp"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>

namespace accelerate::logs {
namespace {

/// A whole record by one write(2), where stdio would make several of a long one.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit StderrSink(const std::string& pattern)
      : base_sink(std::make_unique<spdlog::pattern_formatter>(pattern, spdlog::pattern_time_type::local)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t text;
    formatter_->format(message, text);
    const char* rest = text.data();
    for (const char* const end = rest + text.size(); rest < end;) {
      const ssize_t written = ::write(STDERR_FILENO, rest, static_cast<size_t>(end - rest));
      if (written > 0) rest += written;
      else if (errno != EINTR) return;  // nobody reads: training goes on
    }
  }
  void flush_() override {}
};

std::string utc(std::chrono::system_clock::time_point time) {
  const auto seconds = std::chrono::system_clock::to_time_t(time);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count() % 1'000'000;
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[40], fraction[16];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(fraction, sizeof(fraction), ".%06dZ", static_cast<int>(micros));
  return std::string(text) + fraction;
}

std::string line_of_json(const LogRecord& record) {
  return nlohmann::ordered_json{{"time", utc(record.time)},
                                {"level", to_string(record.level)},
                                {"logger", record.logger},
                                {"rank", record.rank},
                                {"message", record.message}}
      .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

void write_to_stderr(const LogRecord& record, OutputForm form) {
  static StderrSink lines("%v"), text("%m/%d/%Y %H:%M:%S - %v");
  std::string payload;
  if (form.json) {
    payload = line_of_json(record);
  } else {
    payload = std::string(to_string(record.level)) + " - " + record.logger + " - ";
    if (form.rank) payload += "[RANK " + std::to_string(record.rank) + "] ";
    payload += record.message;
  }
  (form.json ? lines : text).log({record.time, {}, record.logger, spdlog::level::info, payload});
}

}  // namespace accelerate::logs

namespace accelerate {

const char* to_string(LogLevel level) {
  switch (level) {
    case LogLevel::notset:
      return "NOTSET";
    case LogLevel::debug:
      return "DEBUG";
    case LogLevel::info:
      return "INFO";
    case LogLevel::warning:
      return "WARNING";
    case LogLevel::error:
      return "ERROR";
    case LogLevel::critical:
      return "CRITICAL";
  }
  return "?";
}

}  // namespace accelerate
