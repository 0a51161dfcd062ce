#pragma once

/// DeepSpeed's schedules, by its names and with its defaults (version 0.19.8). Rates are DeepSpeed's to the last bits
/// of a double.
///
/// They count applied optimizer steps: making one sets the first rate, and after each step that changed the parameters
/// `step()` is called once, whatever the number of processes (AcceleratedScheduler with split_batches). state_dict() is
/// DeepSpeed's {"last_batch_iteration": n}, where n is last_epoch() - 1; either side reads the other's. All take the
/// optimizer by reference, which must outlive the schedule. @throws ConfigError for options out of range, and a
/// warmup_type that is neither "log" nor "linear" (DeepSpeed takes any for "log").

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/optim/scheduler.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// One number for all parameter groups, or a list with one for each.
class PerGroup {
 public:
  PerGroup(double value) : values_{value} {}
  PerGroup(std::vector<double> values) : values_(std::move(values)), is_list_(true) {}
  PerGroup(std::initializer_list<double> values) : PerGroup(std::vector<double>(values)) {}

  bool is_list() const { return is_list_; }
  const std::vector<double>& values() const { return values_; }

 private:
  std::vector<double> values_;
  bool is_list_ = false;
};

struct WarmupLROptions {
  PerGroup warmup_min_lr = 0.0;
  std::optional<PerGroup> warmup_max_lr = std::nullopt;  ///< unset: each group's own rate
  int64_t warmup_num_steps = 1000;                       ///< 1 counts as 2
  /// How the rate rises: "log" or "linear".
  std::string warmup_type = "log";
  /// n of a state: the schedule goes on there, and leaves the rates as they are until its next step.
  int64_t last_batch_iteration = -1;
  /// Empty: 0.19.8. An older version of DeepSpeed acts as it did: before 0.19.4 an unset warmup_max_lr is the first
  /// group's rate for all, before 0.19.6 warmup_num_steps below 1 counts as 2.
  std::string as_of_version = {};
};
/// From warmup_min_lr to warmup_max_lr, and stays there.
ACCELERATE_API Scheduler warmup_lr(torch::optim::Optimizer& optimizer, const WarmupLROptions& options = {});

struct WarmupDecayLROptions {
  std::optional<int64_t> total_num_steps = std::nullopt;  ///< needed
  PerGroup warmup_min_lr = 0.0;
  PerGroup warmup_max_lr = 0.001;
  int64_t warmup_num_steps = 1000;
  std::string warmup_type = "log";
  int64_t last_batch_iteration = -1;
  std::string as_of_version = {};  ///< before 0.19.6 warmup_num_steps below 1 counts as 2
};
/// As warmup_lr, then straight back to warmup_min_lr at total_num_steps.
ACCELERATE_API Scheduler warmup_decay_lr(torch::optim::Optimizer& optimizer, const WarmupDecayLROptions& options);

struct WarmupCosineLROptions {
  std::optional<int64_t> total_num_steps = std::nullopt;  ///< needed
  double warmup_min_ratio = 0.0;
  int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 0.0001;
  std::string warmup_type = "log";
  int64_t last_batch_iteration = -1;
  /// Before 0.19.4 the cosine rises again past total_num_steps, before 0.19.6 warmup_num_steps below 1 counts as 2.
  std::string as_of_version = {};
};
/// The group's own rate times a ratio: from warmup_min_ratio to 1, then by half a cosine to cos_min_ratio. The first
/// step is taken with a rate of 0.
ACCELERATE_API Scheduler warmup_cosine_lr(torch::optim::Optimizer& optimizer, const WarmupCosineLROptions& options);

struct DeepSpeedOneCycleOptions {
  PerGroup cycle_min_lr;
  PerGroup cycle_max_lr;
  double decay_lr_rate = 0;
  double cycle_first_step_size = 2000;                          ///< steps up
  std::optional<double> cycle_second_step_size = std::nullopt;  ///< steps down; unset: as many
  /// Stairs in place of a slope; 0: a slope.
  int64_t cycle_first_stair_count = 0;
  std::optional<int64_t> cycle_second_stair_count = std::nullopt;  ///< unset: as in the first half
  double decay_step_size = 0;                                      ///< steps between decays after the cycle; 0: none
  /// Move beta1 against the rate, and set beta2 to 0.99. Without effect, and a warning, for optimizers without betas.
  bool cycle_momentum = true;
  PerGroup cycle_min_mom = 0.8;
  PerGroup cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
  int64_t last_batch_iteration = -1;
  /// Before 0.19.4 stairs have no effect, before 0.19.6 lists are refused.
  std::string as_of_version = {};
};
/// DeepSpeed's OneCycle: up to cycle_max_lr, down to cycle_min_lr, then divided by 1 + decay_lr_rate per
/// decay_step_size steps. Until its first step beta1 is cycle_min_mom. (one_cycle() is PyTorch's.)
ACCELERATE_API Scheduler deepspeed_one_cycle(torch::optim::Optimizer& optimizer,
                                             const DeepSpeedOneCycleOptions& options);

struct LRRangeTestOptions {
  PerGroup lr_range_test_min_lr = 1e-3;
  int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;
  int64_t last_batch_iteration = -1;
};
/// The rate grows by step_rate times min_lr per step_size steps, without end, or does so at once there (staircase).
ACCELERATE_API Scheduler lr_range_test(torch::optim::Optimizer& optimizer, const LRRangeTestOptions& options = {});

}  // namespace accelerate::optim
