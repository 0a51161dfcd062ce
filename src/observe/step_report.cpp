#include "observe/step_report.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>

#include "accelerate/utils/monitor.hpp"
#include "observe/step_file.hpp"
#include "observe/trace.hpp"
#include "utils/run_counts.hpp"

namespace accelerate {
namespace {

/// The file of kStepFileVariable, or the one beside it, of so many records, or null. A file that is gone or not one of
/// ours costs the view a column, and must not cost the training.
template <class Record> Record* mapped(const char* beside, size_t count) {
  const char* path = std::getenv(kStepFileVariable);
  if (!path || !*path) return nullptr;
  const int fd = ::open((std::string(path) + beside).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return nullptr;
  const size_t bytes = sizeof(Record) * count;
  struct stat status {};
  void* address = MAP_FAILED;
  if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == static_cast<off_t>(bytes))
    address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return address == MAP_FAILED ? nullptr : static_cast<Record*>(address);
}

StepRecord* record() {
  static auto* const file = mapped<StepRecord>("", 1);
  return file;
}

LoggedRecord* logged() {
  static auto* const file = mapped<LoggedRecord>(kLoggedFile, kMostLogged);
  return file;
}

/// The figures that this process has given so far. Locked for the few stores of a step, by the thread that reports it.
struct Figures {
  std::mutex mutex;
  double flops_forward = 0, flops_backward = 0;  ///< of a token
  int64_t counted_tokens = 0;                    ///< those whose operations are in `flops`
  double flops = 0;
};

Figures& figures() {
  static auto* const all = new Figures;  // threads of the program may outlive static objects
  return *all;
}

std::atomic<bool> program_steps{false}, program_tokens{false}, program_flops{false};
std::atomic<int64_t> tokens_of_program{0};
std::atomic<double> flops_of_program{0};

template <class T> void store(T& place, T value) { std::atomic_ref(place).store(value, std::memory_order_relaxed); }

/// The caller holds the mutex.
void write(StepRecord& record, Figures& known, uint64_t steps) {
  const int64_t tokens = program_tokens.load(std::memory_order_relaxed)
                             ? tokens_of_program.load(std::memory_order_relaxed)
                             : counts::read(RunCount::items);
  const double per_token = known.flops_forward + (counts::read(RunCount::backwards) > 0 ? known.flops_backward : 0);
  known.flops += per_token * static_cast<double>(std::max<int64_t>(tokens - known.counted_tokens, 0));
  known.counted_tokens = tokens;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  store(record.tokens, static_cast<uint64_t>(tokens));
  store(record.flops,
        program_flops.load(std::memory_order_relaxed) ? flops_of_program.load(std::memory_order_relaxed) : known.flops);
  store(record.comm_wait_ns, static_cast<uint64_t>(counts::read(RunCount::comm_wait_ns)));
  store(record.data_wait_ns, static_cast<uint64_t>(counts::read(RunCount::data_wait_ns)));
  store(record.at_ns, static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec));
  std::atomic_ref(record.steps).store(steps, std::memory_order_release);
}

}  // namespace

void report_step(int64_t steps) {
  program_steps.store(true, std::memory_order_relaxed);
  trace::step_done(steps, nullptr);
  StepRecord* const file = record();
  if (!file) return;
  const std::lock_guard lock(figures().mutex);
  write(*file, figures(), static_cast<uint64_t>(steps));
}

void report_tokens(int64_t tokens) {
  tokens_of_program.fetch_add(tokens, std::memory_order_relaxed);
  program_tokens.store(true, std::memory_order_relaxed);
}

void report_flops(double flops) {
  flops_of_program.fetch_add(flops, std::memory_order_relaxed);
  program_flops.store(true, std::memory_order_relaxed);
}

void report_optimizer_step(int64_t steps, const void* optimizer) {
  if (program_steps.load(std::memory_order_relaxed)) return;
  trace::step_done(steps, optimizer);
  StepRecord* const file = record();
  if (!file) return;
  const std::lock_guard lock(figures().mutex);
  if (const auto done = static_cast<uint64_t>(steps);
      done > std::atomic_ref(file->steps).load(std::memory_order_relaxed))
    write(*file, figures(), done);
}

bool is_monitored() { return record() != nullptr; }

void report_logged(std::string_view name, double value) {
  LoggedRecord* const all = logged();
  name = name.substr(0, std::min(name.find('\0'), sizeof(LoggedRecord::name)));
  if (!all || name.empty()) return;
  const std::lock_guard lock(figures().mutex);
  for (size_t i = 0; i < kMostLogged; ++i) {
    auto& place = all[i];
    if (place.count == 0) name.copy(place.name, sizeof(place.name));
    if (std::string_view(place.name, ::strnlen(place.name, sizeof(place.name))) != name) continue;
    store(place.value, value);
    std::atomic_ref(place.count).fetch_add(1, std::memory_order_release);
    return;
  }
}

void count_flops_per_token(double forward, double backward) {
  const std::lock_guard lock(figures().mutex);
  figures().flops_forward += forward;
  figures().flops_backward += backward;
}

void forget_flops_per_token() {
  const std::lock_guard lock(figures().mutex);
  figures().flops_forward = figures().flops_backward = 0;
}

}  // namespace accelerate
