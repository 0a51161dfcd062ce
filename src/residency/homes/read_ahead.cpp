#include "residency/homes/read_ahead.hpp"

#include <c10/util/thread_name.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>

namespace accelerate::residency {
namespace {

constexpr int64_t kRequest = 8 << 20;  ///< bytes
constexpr size_t kUnderway = 4;        ///< requests that the disk has at a time

void run(const std::stop_token& stop, const std::vector<MappedBytes>& all) {
  c10::setThreadName("acc_ahead");
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  std::deque<std::pair<void*, size_t>> underway;
  const auto finish_first = [&] {
#ifdef MADV_POPULATE_READ
    // Waits for the disk and fills in the page table, so that the computation meets no fault. Older systems don't know
    // it: there the faults remain.
    static_cast<void>(::madvise(underway.front().first, underway.front().second, MADV_POPULATE_READ));
#endif
    underway.pop_front();
  };
  for (const auto& [data, bytes] : all) {
    const auto end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes);
    for (auto begin = reinterpret_cast<uintptr_t>(data) / page * page; begin < end; begin += kRequest) {
      if (stop.stop_requested()) return;
      auto* const address =
          reinterpret_cast<void*>(begin);  // NOLINT(performance-no-int-to-ptr): the page that the bytes begin in
      const size_t length = std::min<uintptr_t>(kRequest, end - begin);
      static_cast<void>(::madvise(address, length, MADV_WILLNEED));
      underway.emplace_back(address, length);
      if (underway.size() >= kUnderway) finish_first();
    }
  }
  while (!underway.empty() && !stop.stop_requested()) finish_first();
}

}  // namespace

ReadAhead::ReadAhead(std::vector<MappedBytes> bytes, std::shared_ptr<const void> keep_alive)
    : thread_([bytes = std::move(bytes), keep_alive = std::move(keep_alive)](const std::stop_token& stop) {
        run(stop, bytes);
      }) {}

}  // namespace accelerate::residency
