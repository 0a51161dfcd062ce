#pragma once

/// Learning rate schedules over any torch::optim::Optimizer.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace c10 {
struct IValue;
}

namespace accelerate::optim {

/// Base of all schedules. Derive from it and implement `compute_lrs` to write your own; wrap the result in a
/// `Scheduler`.
///
/// Counting is PyTorch's: `last_epoch` is the index of the rate in force (0 after construction), `step_count` the
/// number of calls including the one that construction makes. Not thread-safe.
class ACCELERATE_API LRScheduler {
 public:
  /// @param optimizer  kept by reference; must outlive the schedule. Its groups' present rates become the base rates.
  explicit LRScheduler(torch::optim::Optimizer& optimizer);
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;
  virtual ~LRScheduler() = default;

  /// Moves on by one step and sets the rate of every group.
  /// @param metric  only for schedules that watch a metric (reduce_lr_on_plateau); others ignore it.
  virtual void step(std::optional<double> metric = std::nullopt);

  const std::vector<double>& get_last_lr() const { return last_lrs_; }  ///< one rate per group, as last set
  const std::vector<double>& base_lrs() const { return base_lrs_; }  ///< one rate per group, as found at construction
  int64_t last_epoch() const { return last_epoch_; }
  int64_t step_count() const { return step_count_; }
  /// Counts a step that did not happen: AcceleratedScheduler does so while gradients accumulate.
  void count_step() { ++step_count_; }
  /// Steps after which `step` is an error, if the schedule has such an end.
  virtual std::optional<int64_t> total_steps() const { return std::nullopt; }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// A dict with the keys of the Python scheduler's state_dict (last_epoch, _step_count, base_lrs, _last_lr, …).
  virtual c10::IValue state_dict() const;
  /// Takes over such a dict. As in Python, the optimizer's rates stay: they come with the optimizer's own state.
  /// @throws CheckpointError when keys are missing or the number of groups differs; nothing is changed then.
  virtual void load_state_dict(const c10::IValue& state);

  /// Begins anew at step 0, as if the groups had had the rates `initial` when it was made. For sequential_lr.
  /// @throws ConfigError where a schedule can't, because it steps with a metric.
  virtual void restart(const std::vector<double>& initial);
  /// Larger for those that were made later.
  int64_t made() const { return made_; }

 protected:
  /// Rates for last_epoch(), one per group. Called by `step` after counting.
  virtual std::vector<double> compute_lrs() = 0;
  /// Rates for step 0 from base_lrs_ alone, for schedules whose compute_lrs() goes on from the present rates.
  virtual std::vector<double> first_lrs() { return compute_lrs(); }
  std::vector<double> current_lrs() const;
  void set_lrs(const std::vector<double>& lrs);

  int64_t last_epoch_ = -1;
  int64_t step_count_ = 0;
  std::vector<double> base_lrs_;
  std::vector<double> last_lrs_;

 private:
  friend class Scheduler;
  /// Applies the rate of step 0.
  virtual void initial_step() { step(); }
  torch::optim::Optimizer& optimizer_;
  int64_t made_;
};

/// Cheap-to-copy handle on a schedule; copies share it.
class ACCELERATE_API Scheduler {
 public:
  /// Applies the rate of step 0 if that has not been done (a base class's constructor can't call what the derived class
  /// computes).
  explicit Scheduler(std::shared_ptr<LRScheduler> schedule);

  void step(std::optional<double> metric = std::nullopt) const { schedule_->step(metric); }
  const std::vector<double>& get_last_lr() const { return schedule_->get_last_lr(); }
  int64_t last_epoch() const { return schedule_->last_epoch(); }
  int64_t step_count() const { return schedule_->step_count(); }
  std::optional<int64_t> total_steps() const { return schedule_->total_steps(); }
  torch::optim::Optimizer& optimizer() const { return schedule_->optimizer(); }
  LRScheduler& schedule() const { return *schedule_; }
  c10::IValue state_dict() const;
  void load_state_dict(const c10::IValue& state) const;

 private:
  std::shared_ptr<LRScheduler> schedule_;
};

}  // namespace accelerate::optim
