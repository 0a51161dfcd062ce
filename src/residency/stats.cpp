#include "accelerate/residency.hpp"
#include "residency/counters.hpp"
#include "utils/environment.hpp"

namespace accelerate::residency {

Counters& counters() {
  static Counters instance;
  return instance;
}

std::atomic<bool>& paranoid_flag() {
  static std::atomic<bool> flag{environment::flag("ACCELERATE_RESIDENCY_PARANOID").value_or(false)};
  return flag;
}

Stats stats() {
  const Counters& c = counters();
  return {.faults = c.faults,
          .prefetch_hits = c.prefetch_hits,
          .evictions = c.evictions,
          .bytes_fetched = c.bytes_fetched,
          .bytes_stored = c.bytes_stored,
          .resident_bytes = c.resident_bytes,
          .peak_resident_bytes = c.peak_resident_bytes,
          .products_on_codes = c.products_on_codes,
          .decodes = c.decodes};
}

void reset_stats() {
  Counters& c = counters();
  for (auto* counter :
       {&c.faults, &c.prefetch_hits, &c.evictions, &c.bytes_fetched, &c.bytes_stored, &c.products_on_codes, &c.decodes})
    *counter = 0;
  c.peak_resident_bytes = c.resident_bytes.load();
}

void set_paranoid(bool paranoid) { paranoid_flag() = paranoid; }

}  // namespace accelerate::residency
