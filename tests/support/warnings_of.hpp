#pragma once

#include <accelerate/utils/log_sink.hpp>

#include <mutex>
#include <string>
#include <utility>

namespace support {

/// The warnings of this process in a scope, the library's and LibTorch's; a line each.
class Warnings {
 public:
  Warnings()
      : before_(accelerate::set_log_sink([this](const accelerate::LogRecord& record) {
          const std::lock_guard lock(mutex_);
          if (record.level >= accelerate::LogLevel::warning) text += record.message + "\n";
        })) {}
  ~Warnings() { accelerate::set_log_sink(std::move(before_)); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  std::string text;

 private:
  std::mutex mutex_;
  accelerate::LogSink before_;
};

/// The warnings while f() runs.
template <class F> std::string warnings_of(F&& f) {
  const Warnings warnings;
  f();
  return warnings.text;
}

}  // namespace support
