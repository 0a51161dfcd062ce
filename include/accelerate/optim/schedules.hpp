#pragma once

/// The schedules of PyTorch and transformers. All take the optimizer by reference (it must outlive the schedule) and
/// set the rate of step 0 at once. Rates are the Python ones to the last bits of a double. Where a factor is named, the
/// rate is the group's rate at construction times the factor.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/optim/scheduler.hpp"
#include "accelerate/utils/export.hpp"

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace accelerate::optim {

/// Step (last_epoch) -> factor.
using LambdaFactor = std::function<double(int64_t step)>;

/// One function for all groups. Functions are not part of state_dict.
ACCELERATE_API Scheduler lambda_lr(torch::optim::Optimizer& optimizer, const LambdaFactor& factor);
/// One function per group. @throws ConfigError when their number is not the number of groups.
ACCELERATE_API Scheduler lambda_lr(torch::optim::Optimizer& optimizer, std::vector<LambdaFactor> factors);

ACCELERATE_API Scheduler constant_schedule(torch::optim::Optimizer& optimizer);
/// 0 -> 1 over `warmup_steps`, then 1.
ACCELERATE_API Scheduler constant_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps);
/// 0 -> 1 over `warmup_steps`, then 1 -> 0 at `total_steps`, then 0.
ACCELERATE_API Scheduler linear_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                                     int64_t total_steps);
/// Warm-up, then `num_cycles` waves of a cosine; 0.5 is one fall from 1 to 0.
ACCELERATE_API Scheduler cosine_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                                     int64_t total_steps, double num_cycles = 0.5);
/// Warm-up, then `num_cycles` falls from 1 to 0, each starting at 1 again.
ACCELERATE_API Scheduler cosine_with_hard_restarts_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                                                        int64_t warmup_steps, int64_t total_steps,
                                                                        int64_t num_cycles = 1);

struct PolynomialDecayOptions {
  double lr_end = 1e-7;  ///< rate (not factor) at the end and afterwards
  double power = 1.0;
};
/// Warm-up, then (remaining share)^power from the optimizer's default rate down to lr_end. @throws ConfigError unless
/// lr_end is smaller than that rate.
ACCELERATE_API Scheduler polynomial_decay_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                                               int64_t total_steps,
                                                               const PolynomialDecayOptions& options = {});
/// Warm-up, then 1 / sqrt((step + timescale - warmup_steps) / timescale). `timescale` unset: warmup_steps, or 10,000
/// without warm-up.
ACCELERATE_API Scheduler inverse_sqrt_schedule(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                               std::optional<int64_t> timescale = std::nullopt);

enum class AnnealStrategy { cos, linear };

struct OneCycleOptions {
  std::vector<double> max_lr;  ///< one for all groups, or one per group
  /// Either this …
  std::optional<int64_t> total_steps;
  /// … or both of these.
  std::optional<int64_t> epochs;
  std::optional<int64_t> steps_per_epoch;
  double pct_start = 0.3;  ///< share of the steps during which the rate rises
  AnnealStrategy anneal_strategy = AnnealStrategy::cos;
  /// Move the momentum (SGD, RMSprop) or beta1 (Adam, AdamW) against the rate.
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25.0;       ///< first rate = max_lr / div_factor
  double final_div_factor = 1e4;  ///< last rate = first rate / final_div_factor
  bool three_phase = false;       ///< fall back to the first rate symmetrically, then to the last one
};
/// The one-cycle policy (arXiv:1708.07120). Stepping more than total_steps times is a ConfigError. @throws ConfigError
/// on contradictory options.
ACCELERATE_API Scheduler one_cycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options);

/// Times gamma at each step. Source of these and the following: PyTorch's documentation of torch.optim.lr_scheduler.
ACCELERATE_API Scheduler exponential_lr(torch::optim::Optimizer& optimizer, double gamma);
/// Times gamma at each milestone (a step; one that is named twice counts twice).
ACCELERATE_API Scheduler multi_step_lr(torch::optim::Optimizer& optimizer, const std::vector<int64_t>& milestones,
                                       double gamma = 0.1);

struct LinearOptions {
  double start_factor = 1.0 / 3;  ///< in (0, 1]
  double end_factor = 1.0;        ///< in [0, 1]
  int64_t total_iters = 5;        ///< steps from the one to the other; then it stays
};
/// start_factor -> end_factor over total_iters steps. @throws ConfigError for factors out of range.
ACCELERATE_API Scheduler linear_lr(torch::optim::Optimizer& optimizer, const LinearOptions& options = {});

/// A cosine from the group's rate to eta_min (a rate) in T_max steps, and back in the next T_max, and so on
/// (arXiv:1608.03983, without restarts). @throws ConfigError for T_max below 1.
ACCELERATE_API Scheduler cosine_annealing_lr(torch::optim::Optimizer& optimizer, int64_t T_max, double eta_min = 0);

struct WarmRestartsOptions {
  int64_t T_0 = 1;     ///< steps of the first period
  int64_t T_mult = 1;  ///< each period is so many times as long as the one before
  double eta_min = 0;  ///< rate at the end of a period
};
/// A cosine from the group's rate to eta_min in each period (arXiv:1608.03983). @throws ConfigError for numbers
/// below 1.
ACCELERATE_API Scheduler cosine_annealing_warm_restarts(torch::optim::Optimizer& optimizer,
                                                        const WarmRestartsOptions& options);

/// How the height of a cycle changes: not; half as high each time; times gamma at each step.
enum class CyclicMode { triangular, triangular2, exp_range };
/// The argument of scale_fn: the number of the cycle, from 1, or that of the step, from 0.
enum class ScaleMode { cycle, iterations };

struct CyclicOptions {
  std::vector<double> base_lr;  ///< lower end; one for all groups, or one per group
  std::vector<double> max_lr;   ///< upper end, likewise
  int64_t step_size_up = 2000;
  std::optional<int64_t> step_size_down;  ///< unset: as step_size_up
  CyclicMode mode = CyclicMode::triangular;
  double gamma = 1.0;  ///< of exp_range
  /// Height by number, instead of `mode`. Not part of state_dict.
  std::function<double(double)> scale_fn;
  ScaleMode scale_mode = ScaleMode::cycle;  ///< of scale_fn
  /// Move the momentum (SGD, RMSprop) or beta1 (Adam, AdamW) against the rate.
  bool cycle_momentum = true;
  std::vector<double> base_momentum = {0.8};
  std::vector<double> max_momentum = {0.9};
};
/// Up and down between two rates (arXiv:1506.01186). @throws ConfigError when numbers of values or steps are wrong, or
/// the optimizer has no momentum to move.
ACCELERATE_API Scheduler cyclic_lr(torch::optim::Optimizer& optimizer, const CyclicOptions& options);

/// One schedule after the other: from step milestones[i] on the i-th after the first, which begins at its step 0 there.
/// All are made for this optimizer, before; each takes for the groups' own rates what they were when the first of them
/// was made.
/// @throws ConfigError unless milestones grow and are one less than schedules, for schedules of another optimizer, and
/// for those that step with a metric.
ACCELERATE_API Scheduler sequential_lr(torch::optim::Optimizer& optimizer, std::vector<Scheduler> schedulers,
                                       std::vector<int64_t> milestones);

struct ReduceLROnPlateauOptions {
  bool maximize = false;               ///< the metric is to grow (mode "max")
  double factor = 0.1;                 ///< in (0, 1): the rate is multiplied by it
  int64_t patience = 10;               ///< steps without improvement that are tolerated
  double threshold = 1e-4;             ///< smallest change that counts as improvement
  bool absolute_threshold = false;     ///< `threshold` is a difference, not a share
  int64_t cooldown = 0;                ///< steps to wait after a reduction
  std::vector<double> min_lr = {0.0};  ///< one for all groups, or one per group
  double eps = 1e-8;                   ///< smaller reductions are not applied
};
/// Reduces the rate when the metric given to `step(metric)` stops improving. In double precision and with Python's
/// state_dict, unlike LibTorch's own.
ACCELERATE_API Scheduler reduce_lr_on_plateau(torch::optim::Optimizer& optimizer,
                                              const ReduceLROnPlateauOptions& options = {});

/// LibTorch's schedulers (torch::optim::StepLR, your own subclasses) behind the common interface. LibTorch's do nothing
/// at construction and so lag one step behind Python's; a fresh one is stepped once here, which gives Python's rates.
/// `optimizer` is the one that the scheduler was made for.
ACCELERATE_API Scheduler from_torch(torch::optim::Optimizer& optimizer,
                                    std::shared_ptr<torch::optim::LRScheduler> scheduler);
/// As above by reference: `scheduler` must outlive the handle.
ACCELERATE_API Scheduler from_torch(torch::optim::Optimizer& optimizer, torch::optim::LRScheduler& scheduler);
/// `step` needs a metric. LibTorch hides this class's state, so state_dict() throws ConfigError: use
/// reduce_lr_on_plateau where checkpoints are written.
ACCELERATE_API Scheduler from_torch(torch::optim::Optimizer& optimizer,
                                    std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler);
ACCELERATE_API Scheduler from_torch(torch::optim::Optimizer& optimizer,
                                    torch::optim::ReduceLROnPlateauScheduler& scheduler);

}  // namespace accelerate::optim
