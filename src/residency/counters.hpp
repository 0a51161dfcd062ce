#pragma once

#include <atomic>
#include <cstdint>

#include "utils/counts.hpp"

namespace accelerate::residency {

/// Further events of units; see utils/counts.hpp.
enum class ResidencyCount {
  units_recomputed,
  inputs_offloaded,  ///< from which units are recomputed
  fetches_most,      ///< under way at a time
  // Past the system's cache, of tensors that lie on a disk; both together, as far as by io_uring.
  disk_bytes_read,
  disk_bytes_written,
  disk_bytes_by_ring,
  disk_shares,         ///< of transfers, a thread's each
  disk_requests,       ///< they were cut into
  disk_submissions,    ///< by which the ring was told of them
  disk_requests_most,  ///< on their way at a time, of one thread
  number_of_counts
};

/// Counts of the whole process; stats() reads them.
struct Counters {
  std::atomic<int64_t> touches{0}, faults{0}, prefetch_hits{0}, evictions{0}, bytes_fetched{0}, bytes_stored{0},
      resident_bytes{0}, peak_resident_bytes{0}, products_on_codes{0}, decodes{0};

  void add_resident(int64_t bytes) {
    const int64_t now = resident_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t peak = peak_resident_bytes.load(std::memory_order_relaxed);
    while (now > peak && !peak_resident_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
};

Counters& counters();

/// See set_paranoid().
std::atomic<bool>& paranoid_flag();

}  // namespace accelerate::residency
