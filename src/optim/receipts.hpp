#pragma once

#include <optional>
#include <vector>

#include "accelerate/state.hpp"
#include "observe/receipt_rows.hpp"

namespace accelerate::receipts {

struct ScalingFacts {
  RunFacts run = {};
  GradScalerKwargs given = {};
  PrecisionType precision = PrecisionType::NO;
  std::optional<double> loss_scale = {};  ///< now; nothing: no loss was scaled
};
std::vector<Receipt> of_scaling(const ScalingFacts& facts);

struct SchedulesFacts {
  RunFacts run = {};
  bool step_scheduler_with_optimizer = true;
  int64_t schedulers = 0;
};
std::vector<Receipt> of_schedules(const SchedulesFacts& facts);

/// The effects of step_in_backward and step_at_once, where they are on.
Deed of_steps_ahead();
Deed of_steps_at_once();

}  // namespace accelerate::receipts
