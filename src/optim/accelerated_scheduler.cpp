#include "accelerate/optim/accelerated_scheduler.hpp"

#include <ATen/core/ivalue.h>

#include <algorithm>

#include "accelerate/state.hpp"
#include "utils/counts.hpp"

namespace accelerate {

struct AcceleratedScheduler::Impl {
  optim::Scheduler scheduler;
  std::vector<AcceleratedOptimizer> optimizers;
  bool step_with_optimizer;
  bool split_batches;
  GradientState gradients{};
};

AcceleratedScheduler::AcceleratedScheduler(optim::Scheduler scheduler, std::vector<AcceleratedOptimizer> optimizers,
                                           bool step_with_optimizer, bool split_batches)
    : impl_(std::make_shared<Impl>(
          Impl{std::move(scheduler), std::move(optimizers), step_with_optimizer, split_batches})) {}

void AcceleratedScheduler::step(std::optional<double> metric) const {
  const Impl& self = *impl_;
  using counts::Count;
  const auto step_once = [&] {
    self.scheduler.step(metric);
    counts::add(Count::schedule_steps);
  };
  if (!self.step_with_optimizer) {
    counts::add(Count::schedule_steps_alone);
    return step_once();
  }
  if (!self.gradients.sync_gradients()) {
    if (self.gradients.adjust_scheduler()) {
      self.scheduler.schedule().count_step();
      counts::add(Count::schedule_counts);
    }
    return;
  }
  if (std::any_of(self.optimizers.begin(), self.optimizers.end(),
                  [](const auto& optimizer) { return optimizer.step_was_skipped(); }))
    return;
  if (self.split_batches) return step_once();
  const int64_t num_processes = PartialState().num_processes();
  for (int64_t i = 0; i < num_processes; ++i) {
    const auto total = self.scheduler.total_steps();
    if (!total || self.scheduler.step_count() <= *total) step_once();
  }
}

const optim::Scheduler& AcceleratedScheduler::scheduler() const { return impl_->scheduler; }
c10::IValue AcceleratedScheduler::state_dict() const { return impl_->scheduler.state_dict(); }
void AcceleratedScheduler::load_state_dict(const c10::IValue& state) const { impl_->scheduler.load_state_dict(state); }

}  // namespace accelerate
