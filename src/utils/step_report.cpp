#include "utils/step_report.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <ctime>

#include "accelerate/utils/monitor.hpp"
#include "utils/step_file.hpp"

namespace accelerate {
namespace {

/// The file of kStepFileVariable, or null. A file that is gone or not one of ours costs the view a column, and must not
/// cost the training.
StepRecord* mapped_record() {
  const char* path = std::getenv(kStepFileVariable);
  if (!path || !*path) return nullptr;
  const int fd = ::open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return nullptr;
  struct stat status {};
  void* address = MAP_FAILED;
  if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == sizeof(StepRecord))
    address = ::mmap(nullptr, sizeof(StepRecord), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return address == MAP_FAILED ? nullptr : static_cast<StepRecord*>(address);
}

StepRecord* record() {
  static StepRecord* const mapped = mapped_record();
  return mapped;
}

std::atomic<bool> program_reports{false};

void write(StepRecord& record, uint64_t steps) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  std::atomic_ref(record.at_ns)
      .store(static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec),
             std::memory_order_relaxed);
  std::atomic_ref(record.steps).store(steps, std::memory_order_release);
}

}  // namespace

void report_step(int64_t steps) {
  StepRecord* const file = record();
  if (!file) return;
  program_reports.store(true, std::memory_order_relaxed);
  write(*file, static_cast<uint64_t>(steps));
}

void report_optimizer_step(int64_t steps) {
  StepRecord* const file = record();
  if (!file || program_reports.load(std::memory_order_relaxed)) return;
  if (const auto done = static_cast<uint64_t>(steps);
      done > std::atomic_ref(file->steps).load(std::memory_order_relaxed))
    write(*file, done);
}

}  // namespace accelerate
