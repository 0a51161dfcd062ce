#pragma once

#include <accelerate/utils/log_sink.hpp>

#include <mutex>
#include <string>

namespace support {

/// The warnings of this process while f() runs, the library's and LibTorch's; one after the other.
template <class F> std::string warnings_of(F&& f) {
  std::mutex mutex;
  std::string text;
  auto before = accelerate::set_log_sink([&](const accelerate::LogRecord& record) {
    const std::lock_guard lock(mutex);
    if (record.level >= accelerate::LogLevel::warning) text += record.message + "\n";
  });
  f();
  accelerate::set_log_sink(std::move(before));
  return text;
}

}  // namespace support
