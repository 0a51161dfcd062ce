#include "accelerate/optim/accelerated_scheduler.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>

#include "accelerate/comm.hpp"
#include "accelerate/optim/scheduler.hpp"
#include "accelerate/state.hpp"
#include "comm/mesh.hpp"
#include "optim/counts.hpp"

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

namespace {

/// The mean over ranks: one number for all, down to its last bit, or their rates would drift apart. Collective.
double agreed(double metric) {
  if (comm::world_size() == 1) return metric;
  const at::Tensor all = comm::all_gather(at::full({1}, metric, at::TensorOptions().dtype(at::kDouble)));
  const double* values = all.const_data_ptr<double>();
  // If ranks agree already, their number stays as it is: a sum and a quotient would round it.
  if (std::all_of(values, values + all.numel(), [&](double value) { return value == *values; })) return *values;
  return std::accumulate(values, values + all.numel(), 0.0) / static_cast<double>(all.numel());
}

}  // namespace

void AcceleratedScheduler::follow(std::vector<AcceleratedOptimizer> optimizers) const {
  impl_->optimizers = std::move(optimizers);
}

void AcceleratedScheduler::step(std::optional<double> metric) const {
  const Impl& self = *impl_;
  const auto step_once = [&] {
    if (metric) metric = agreed(*metric);
    self.scheduler.step(metric);
    counts::add(optim::OptimCount::schedule_steps);
  };
  if (!self.step_with_optimizer) {
    counts::add(optim::OptimCount::schedule_steps_alone);
    return step_once();
  }
  if (!self.gradients.sync_gradients()) {
    if (self.gradients.adjust_scheduler()) {
      self.scheduler.schedule().count_step();
      counts::add(optim::OptimCount::schedule_counts);
    }
    return;
  }
  if (std::any_of(self.optimizers.begin(), self.optimizers.end(),
                  [](const auto& optimizer) { return optimizer.step_was_skipped(); }))
    return;
  // A metric says how good the model is, however many ranks found out: one observation.
  if (metric.has_value()) return step_once();
  if (self.split_batches) return step_once();
  const PartialState joined;  // before the mesh is asked
  // One step for each of the batches that were read at a time.
  const int64_t num_processes = comm::mesh().size(comm::kSamples);
  for (int64_t i = 0; i < num_processes; ++i) {
    const auto total = self.scheduler.total_steps();
    if (!total || self.scheduler.step_count() <= *total) step_once();
  }
}

const optim::Scheduler& AcceleratedScheduler::scheduler() const { return impl_->scheduler; }
const std::vector<double>& AcceleratedScheduler::get_last_lr() const { return scheduler().get_last_lr(); }
int64_t AcceleratedScheduler::last_epoch() const { return scheduler().last_epoch(); }
int64_t AcceleratedScheduler::step_count() const { return scheduler().step_count(); }
torch::optim::Optimizer& AcceleratedScheduler::optimizer() const { return scheduler().optimizer(); }
c10::IValue AcceleratedScheduler::state_dict() const { return impl_->scheduler.state_dict(); }
void AcceleratedScheduler::load_state_dict(const c10::IValue& state) const { impl_->scheduler.load_state_dict(state); }

}  // namespace accelerate
