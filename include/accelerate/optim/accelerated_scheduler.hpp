#pragma once

/// A schedule that follows its optimizers.

#include "accelerate/optim/optimizer.hpp"

namespace accelerate {

namespace optim {
class Scheduler;  // accelerate/optim/scheduler.hpp
}

/// Cheap-to-copy handle; copies share it. Steps only when the optimizers did, and `num_processes` times, because a
/// schedule is written for the batches of one process (not with split_batches, where a batch is the global one).
/// Source: features table 1.5; tests.md section 3.
class ACCELERATE_API AcceleratedScheduler {
 public:
  /// @param optimizers           prepared optimizers whose skipped steps hold the schedule back.
  /// @param step_with_optimizer  false: every `step` moves the schedule by one, whatever the optimizers do.
  /// @param split_batches        true: one step per optimizer step, however many processes there are.
  AcceleratedScheduler(optim::Scheduler scheduler, std::vector<AcceleratedOptimizer> optimizers,
                       bool step_with_optimizer = true, bool split_batches = false);

  /// While accumulating nothing moves, but the step is counted if GradientState::adjust_scheduler(). A schedule with
  /// total_steps never goes past them.
  /// @param metric  for schedules that watch one (reduce_lr_on_plateau). It is one observation, so it moves the
  /// schedule by one step, not by num_processes. Each rank may have its own (the loss of its batches): the schedule
  /// sees their mean, NaN where one is NaN, and all ranks keep the same rate. With a metric collective: all pass one.
  void step(std::optional<double> metric = std::nullopt) const;

  const std::vector<double>& get_last_lr() const;
  int64_t last_epoch() const;
  int64_t step_count() const;
  const optim::Scheduler& scheduler() const;
  /// From here on these hold it back, of which some may have been prepared after it.
  void follow(std::vector<AcceleratedOptimizer> optimizers) const;
  torch::optim::Optimizer& optimizer() const;  ///< that the schedule drives
  c10::IValue state_dict() const;
  void load_state_dict(const c10::IValue& state) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace accelerate
