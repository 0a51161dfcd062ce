#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace accelerate::profiler {

/// The action of a step.
enum class Action { none, warmup, record, record_and_save };

/// Which steps are recorded; torch.profiler.schedule.
struct Schedule {
  int64_t wait = 0, warmup = 0, active = 0;
  int64_t repeat = 0;  ///< cycles; 0: until the end
  int64_t skip_first = 0;
  int64_t skip_first_wait = 0;  ///< not 0: the first cycle has no wait

  Action at(int64_t step) const;
};

/// @throws ConfigError for keys that are missing or unknown, and numbers out of range.
Schedule parse_schedule(const std::map<std::string, int64_t>& option);

}  // namespace accelerate::profiler
