#pragma once

/// Loss scaling for fp16 training.

#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"

namespace c10 {
struct IValue;
}

namespace accelerate::optim {

class ScaleRule;

/// DeepSpeed's rule, with its defaults: the scale is halved when as many steps overflowed as `hysteresis` says, and
/// doubled after good ones. The first good step after an overflow does not count.
struct DynamicLossScale {
  double initial_scale = 65536;         ///< 2 to the power of initial_scale_power
  int64_t window = 1000;                ///< good steps until the scale is doubled
  int64_t hysteresis = 2;               ///< overflows until it is halved; as many again when it has grown
  bool consecutive_hysteresis = false;  ///< as many again after each good step
  double min_scale = 1;                 ///< an overflow at this scale is an error
};
/// A scale that stays, with steps skipped where gradients overflow. 1: they are only looked at.
struct FixedLossScale {
  double scale = 1;
};

/// Scales the loss up so that small fp16 gradients don't vanish, and skips steps whose gradients overflowed.
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);      // only to clip or look at gradients
///     scaler.step(optimizer);
///     scaler.update();
///
/// Works on any device. All ranks agree: whether a gradient overflowed is reduced (maximum) over all ranks, so
/// `unscale_` (or the first `step` without it) is *collective* with several processes: every rank calls it for the same
/// optimizers in the same order, also a rank that has no gradients. Source: torch.amp.GradScaler. Not thread-safe.
class ACCELERATE_API GradScaler {
 public:
  /// @throws ConfigError unless growth_factor > 1, backoff_factor < 1 (both finite and positive), init_scale > 0 and
  /// growth_interval > 0.
  explicit GradScaler(const GradScalerKwargs& kwargs = {});
  /// By another rule than PyTorch's. @throws ConfigError unless min_scale > 0, initial_scale is no smaller, and window
  /// and hysteresis are at least 1.
  template <std::same_as<DynamicLossScale> Rule>
  explicit GradScaler(const Rule& rule) : GradScaler(true, rule_of(rule)) {}
  /// @throws ConfigError unless the scale is a positive number.
  template <std::same_as<FixedLossScale> Rule>
  explicit GradScaler(const Rule& rule) : GradScaler(true, rule_of(rule)) {}

  /// `loss` times the scale; `loss` itself when disabled. The first call decides on which device the scale lives.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the optimizer's gradients by the scale, once per step, and notes whether any is inf or NaN.
  /// @throws ConfigError when called twice for a step or after `step`, before `scale`, or for fp16 gradients (keep the
  /// parameters in fp32) unless set_fp16_gradients() allows them.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// A function that takes the step in place of optimizer.step(). It divides the gradients by `grad_scale` first (a
  /// fused kernel does so in the same pass).
  using StepFunction = std::function<void(const std::optional<at::Tensor>& grad_scale)>;
  /// Steps unless a gradient on any rank is inf or NaN. Unscales first if that has not been done.
  /// @param fused_step  if given, receives the gradients still scaled, unless unscale_ was called.
  /// @return whether the optimizer stepped.
  bool step(torch::optim::Optimizer& optimizer, const StepFunction& fused_step = nullptr);

  /// Shrinks the scale after an overflow, grows it after growth_interval good steps, and begins a new step for all
  /// optimizers.
  /// @throws ConfigError for an overflow at the smallest scale of DynamicLossScale; nothing is changed then, on any
  /// rank. So does the following.
  void update();
  /// The same for one optimizer: others that have been unscaled but not stepped keep their place. (The Python class
  /// forgets them: with two optimizers, clipping and one update per optimizer, the second one's gradients are divided
  /// twice.) The scale changes at the next scale(), once for all optimizers that were updated until then, so that
  /// others still divide by what their gradients were multiplied with; get_scale() and state_dict() tell the new one.
  void update(torch::optim::Optimizer& optimizer);
  /// Sets the scale and begins a new step for all optimizers.
  void update(double new_scale);
  /// Begins a new step for `optimizer` without changing the scale: its gradients were thrown away.
  void forget(torch::optim::Optimizer& optimizer);

  /// From now until unwatch() gradients of the optimizer are kept in step with the scale: those that wait for their
  /// step while it changes are multiplied by as much, and those that were unscaled and not stepped are scaled again
  /// before others are added. The optimizer lives as long. AcceleratedOptimizer calls both. May be called repeatedly.
  void watch(torch::optim::Optimizer& optimizer);
  void unwatch(torch::optim::Optimizer& optimizer);
  /// The optimizer's gradients, which unscale_() has divided, were clipped by this norm (a scalar, equal on all ranks)
  /// together with others: where it is inf or NaN they are zeros or NaN now, and the step is skipped.
  void clipped_by(torch::optim::Optimizer& optimizer, const at::Tensor& norm);
  /// Gradients of the optimizer are divided already, and wait for their step.
  bool is_unscaled(const torch::optim::Optimizer& optimizer) const;
  /// Any gradients were unscaled or stepped on here.
  bool has_checked() const { return has_checked_; }
  /// Off: ranks don't ask each other whether a gradient overflowed, because those of all ranks are the same, and some
  /// rank may have no step to take.
  void set_agreement(bool on) { agreement_ = on; }
  /// On: gradients may be fp16, and are divided in fp16, for who has made masters of them or means to step on them as
  /// they are.
  void set_fp16_gradients(bool on) { fp16_gradients_ = on; }
  /// On: gradients of less precision than their parameters take the parameters' dtype before they are divided.
  void set_widening(bool on) { widening_ = on; }

  /// The loss that was scaled last, on this rank, is a number. Waits for the device; true when disabled.
  bool last_loss_is_finite() const;
  double get_scale() const;  ///< 1 when disabled. Waits for the device.
  double get_growth_factor() const;
  double get_backoff_factor() const;
  int64_t get_growth_interval() const;
  /// Good steps since the scale last changed; of DynamicLossScale since the last overflow.
  int64_t get_growth_tracker() const;
  /// Overflows until the scale is halved; unset where the rule is not DynamicLossScale.
  std::optional<int64_t> get_hysteresis() const;
  bool is_enabled() const { return enabled_; }

  /// Dict with scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; empty when disabled. Of
  /// DynamicLossScale what DeepSpeed's scaler has, by its names: dynamic, cur_scale, cur_iter, last_overflow_iter,
  /// cur_hysteresis, scale_window, delayed_shift (hysteresis), consecutive_hysteresis, min_scale, scale_factor; of
  /// FixedLossScale dynamic and cur_scale.
  c10::IValue state_dict() const;
  /// @throws CheckpointError when a key is missing or out of range, or the state is of another rule; nothing is changed
  /// then.
  void load_state_dict(const c10::IValue& state);

 private:
  enum class Stage { ready, unscaled, stepped };
  struct Watched {
    Stage stage = Stage::ready;
    at::Tensor found_inf;                          ///< 0 or 1, already agreed over the ranks
    torch::optim::Optimizer* optimizer = nullptr;  ///< null: nobody promised that it lives
    int watchers = 0;
    int looks = 0;             ///< at its parameters
    int moves = 0;             ///< that have found all of them changed, one look after the other
    bool scaled = false;       ///< a loss was scaled since its last step
    bool has_stepped = false;  ///< ever
    at::Tensor norms;          ///< of its parameters when a loss was scaled last, until it has stepped
  };
  using Optimizers = std::map<const torch::optim::Optimizer*, Watched>;
  void require_scale(const char* operation) const;
  void begin_round();
  void change_scale(const std::function<void()>& change);
  void check_for_foreign_steps(Watched& state) const;
  void begin_step(Optimizers::iterator at);
  void begin_steps();
  void check_and_unscale(torch::optim::Optimizer& optimizer, Watched& state, const at::Tensor& inverse_scale,
                         bool allow_fp16, bool widens);
  static std::shared_ptr<ScaleRule> rule_of(const DynamicLossScale& rule);
  static std::shared_ptr<ScaleRule> rule_of(const FixedLossScale& rule);
  GradScaler(bool enabled, std::shared_ptr<ScaleRule> rule) : enabled_(enabled), rule_(std::move(rule)) {}
  /// fp32 scalar; undefined until the first scale().
  const at::Tensor& scale_now() const;
  /// The rule as the next loss will find it.
  std::shared_ptr<const ScaleRule> coming() const;

  bool enabled_;
  std::shared_ptr<ScaleRule> rule_;
  at::Tensor pending_;    ///< whether gradients overflowed, of optimizers updated since the last scale()
  at::Tensor last_loss_;  ///< without its graph
  bool agreement_ = true, fp16_gradients_ = false, widening_ = false, has_checked_ = false;
  Optimizers optimizers_;
};

}  // namespace accelerate::optim
