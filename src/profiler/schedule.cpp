#include "profiler/schedule.hpp"

#include <array>
#include <utility>

#include "utils/raise.hpp"

namespace accelerate::profiler {

Action Schedule::at(int64_t step) const {
  if (step < skip_first) return Action::none;
  step -= skip_first;
  if (skip_first_wait != 0) step += wait;
  const int64_t cycle = wait + warmup + active;
  if (repeat > 0 && step >= repeat * cycle) return Action::none;
  const int64_t place = step % cycle;
  if (place < wait) return Action::none;
  if (place < wait + warmup) return Action::warmup;
  return place < cycle - 1 ? Action::record : Action::record_and_save;
}

Schedule parse_schedule(const std::map<std::string, int64_t>& option) {
  Schedule schedule;
  const std::array<std::pair<const char*, int64_t*>, 6> fields = {{{"wait", &schedule.wait},
                                                                   {"warmup", &schedule.warmup},
                                                                   {"active", &schedule.active},
                                                                   {"repeat", &schedule.repeat},
                                                                   {"skip_first", &schedule.skip_first},
                                                                   {"skip_first_wait", &schedule.skip_first_wait}}};
  for (const auto& [name, value] : option) {
    bool known = false;
    for (const auto& [key, field] : fields)
      if (name == key) *field = value, known = true;
    if (!known)
      raise<ConfigError>(
          "ProfileKwargs: schedule_option has '{}', expected wait, warmup, active, repeat, skip_first or "
          "skip_first_wait",
          name);
    if (value < 0) raise<ConfigError>("ProfileKwargs: schedule_option has {} = {}, expected at least 0", name, value);
  }
  for (const char* name : {"wait", "warmup", "active"})
    if (!option.contains(name))
      raise<ConfigError>("ProfileKwargs: schedule_option lacks '{}', expected wait, warmup and active", name);
  if (schedule.active == 0)
    throw ConfigError("ProfileKwargs: schedule_option has active = 0, expected at least one step that is recorded");
  return schedule;
}

}  // namespace accelerate::profiler
