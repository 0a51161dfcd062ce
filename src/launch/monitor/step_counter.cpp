#include "launch/monitor/step_counter.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "input/plain_text.hpp"
#include "launch/system/process.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {

namespace {

void make(const std::filesystem::path& file, size_t bytes) {
  ::unlink(file.c_str());  // a rank of an earlier attempt may still have the old one mapped
  Fd fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const std::string nothing(bytes, '\0');
  // Written, not only made longer: a store into a mapped hole could fail later, when the disk is full, and would kill
  // the rank.
  if (!fd || ::write(fd.get(), nothing.data(), bytes) != static_cast<ssize_t>(bytes))
    raise<LaunchError>("--monitor: the file {} can't be written: {}", file.string(), std::strerror(errno));
}

}  // namespace

StepCounter::StepCounter(std::filesystem::path file) : file_(std::move(file)) {
  make(file_, sizeof(StepRecord));
  make(file_.string() + kLoggedFile, kMostLogged * sizeof(LoggedRecord));
}

void StepCounter::look_at_logged() {
  std::array<LoggedRecord, kMostLogged> all{};
  Fd fd(::open((file_.string() + kLoggedFile).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd || ::pread(fd.get(), all.data(), sizeof(all), 0) != sizeof(all)) return;
  logged_.clear();
  for (const auto& one : all)
    if (one.count > 0) logged_.emplace_back(plain_text({one.name, ::strnlen(one.name, sizeof(one.name))}), one.value);
}

void StepCounter::look() {
  look_at_logged();
  Fd fd(::open(file_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO in its place would keep us waiting
  StepRecord record{};
  if (fd && ::pread(fd.get(), &record, sizeof(record), 0) == sizeof(record)) add(record);
}

void StepCounter::add(const StepRecord& record) {
  if (record.steps == 0) return;
  if (!seen_.empty() && record.steps < seen_.back().steps) seen_.clear();  // it began to count anew
  if (!seen_.empty() && record.steps == seen_.back().steps) return;
  seen_.push_back(record);
  constexpr uint64_t kWindow = 10'000'000'000;
  while (seen_.size() > 2 && seen_[1].at_ns + kWindow < record.at_ns) seen_.pop_front();
}

std::optional<int64_t> StepCounter::steps() const {
  if (seen_.empty()) return std::nullopt;
  return static_cast<int64_t>(std::min<uint64_t>(seen_.back().steps, INT64_MAX));
}

std::optional<double> StepCounter::per_second(uint64_t now_ns) const {
  if (seen_.size() < 2 || seen_.back().at_ns <= seen_.front().at_ns) return std::nullopt;
  const auto& first = seen_.front();
  const auto& last = seen_.back();
  const double rate =
      static_cast<double>(last.steps - first.steps) * 1e9 / static_cast<double>(last.at_ns - first.at_ns);
  const double idle = now_ns > last.at_ns ? static_cast<double>(now_ns - last.at_ns) / 1e9 : 0;
  return idle * rate > 2 ? 1 / idle
                         : rate;  // twice as long as a step takes: it can't be faster than one step in that time
}

std::optional<int64_t> StepCounter::tokens() const {
  if (seen_.empty() || seen_.back().tokens == 0) return std::nullopt;
  return static_cast<int64_t>(std::min<uint64_t>(seen_.back().tokens, INT64_MAX));
}

/// So much for each step, at the rate of the steps.
std::optional<double> StepCounter::over_window(double first, double last, uint64_t now_ns) const {
  const auto steps = per_second(now_ns);
  if (!steps || !(last > 0) || !(first >= 0) || !(last >= first)) return std::nullopt;
  const double rate = *steps * ((last - first) / static_cast<double>(seen_.back().steps - seen_.front().steps));
  return std::isfinite(rate) ? std::optional(rate) : std::nullopt;
}

std::optional<double> StepCounter::tokens_per_second(uint64_t now_ns) const {
  if (seen_.size() < 2) return std::nullopt;
  return over_window(static_cast<double>(seen_.front().tokens), static_cast<double>(seen_.back().tokens), now_ns);
}

std::optional<double> StepCounter::flops_per_second(uint64_t now_ns) const {
  if (seen_.size() < 2) return std::nullopt;
  return over_window(seen_.front().flops, seen_.back().flops, now_ns);
}

std::optional<double> StepCounter::share(uint64_t first_ns, uint64_t last_ns) const {
  if (seen_.back().at_ns <= seen_.front().at_ns || last_ns == 0 || last_ns < first_ns) return std::nullopt;
  return std::min(
      static_cast<double>(last_ns - first_ns) / static_cast<double>(seen_.back().at_ns - seen_.front().at_ns), 1.0);
}

std::optional<double> StepCounter::comm_share() const {
  if (seen_.size() < 2) return std::nullopt;
  return share(seen_.front().comm_wait_ns, seen_.back().comm_wait_ns);
}

std::optional<double> StepCounter::data_share() const {
  if (seen_.size() < 2) return std::nullopt;
  return share(seen_.front().data_wait_ns, seen_.back().data_wait_ns);
}

}  // namespace accelerate::launcher
