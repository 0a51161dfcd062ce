#include "parallel/recompute/recompute.hpp"

#include <c10/core/GradMode.h>

#include "residency/member.hpp"
#include "residency/residency.hpp"

namespace accelerate::parallel {

Recompute::Recompute(const std::vector<Held>& given, const residency::UnitCheckpointOptions& options) {
  for (const Held& held : given)
    if (const auto* member = residency::Member::of(held.tensor)) {
      checkpoints_ = std::make_unique<residency::UnitCheckpoints>(member->unit().owner(), options);
      return;
    }
}

void Recompute::before_forward() {
  if (checkpoints_ && c10::GradMode::is_enabled()) checkpoints_->begin();
}

void Recompute::leave_forward() noexcept {
  if (checkpoints_) checkpoints_->end();
}

}  // namespace accelerate::parallel
