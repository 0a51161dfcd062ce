#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "accelerator/accelerator_impl.hpp"
#include "parallel/gradients.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Gradients of a synchronising step are about to be looked at.
void settle(const parallel::Engines& engines, bool synchronising) {
  for (const auto& engine : engines)
    if (synchronising) engine->settle_gradients();
}

void unscale(const run_state::RunState& run, const AcceleratedOptimizer& optimizer) {
  if (run.scaler && !run.scaler->is_unscaled(optimizer.optimizer())) run.scaler->unscale_(optimizer.optimizer());
}

bool holds_any(const AcceleratedOptimizer& optimizer, const std::unordered_set<const at::TensorImpl*>& tensors) {
  const auto& groups = optimizer.param_groups();
  return std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [&](const at::Tensor& parameter) { return tensors.contains(parameter.unsafeGetTensorImpl()); });
  });
}

/// Visits optimizers of all Accelerators of the process: one may clip what another trains. Optimizers of other
/// parameters have gradients of their own, of another loss perhaps, that wait for their own step.
void each_scaled(const std::vector<at::Tensor>& parameters, const parallel::Engines& engines,
                 const std::function<void(run_state::RunState&, const AcceleratedOptimizer&)>& visit) {
  const auto runs = live_runs();
  if (std::none_of(runs.begin(), runs.end(), [](const auto* run) { return run->scaler && run->scaler->is_enabled(); }))
    return;
  const auto stepped = parallel::stepped_for(engines, parameters);
  for (auto* run : runs)
    for (const auto& optimizer : run->optimizers)
      if (run->scaler && holds_any(optimizer, stepped)) visit(*run, optimizer);
}

parallel::Gradients ready_to_clip(const std::vector<at::Tensor>& parameters, const parallel::Engines& engines,
                                  bool synchronising) {
  settle(engines, synchronising);
  each_scaled(parameters, engines, unscale);
  return parallel::gradients_of(engines, parameters);
}

at::Tensor norm_clipped_to(double max_norm, const std::vector<at::Tensor>& parameters, double norm_type,
                           bool synchronising, const at::Device& device) {
  const auto engines = live_engines();
  const auto gradients = ready_to_clip(parameters, engines, synchronising);
  at::NoGradGuard no_grad;
  const at::Tensor total = parallel::norm_of(gradients, engines, norm_type, device);
  // No branch on the value: the host need not wait for the device. 1e-6 as in PyTorch.
  gradients.scale((max_norm / (total + 1e-6)).clamp_max(1.0));
  each_scaled(parameters, engines,
              [&](auto& run, const auto& optimizer) { run.scaler->clipped_by(optimizer.optimizer(), total); });
  return total;
}

/// The factor by which all gradients of these parameters are too large until they are unscaled. Nothing where the
/// factors differ, or where a step of another optimizer may have decided on a scale that these gradients have not been
/// multiplied by.
std::optional<double> common_scale(const std::vector<at::Tensor>& parameters, const parallel::Engines& engines) {
  std::optional<double> common;
  bool known = true;
  each_scaled(parameters, engines, [&](auto& run, const auto& optimizer) {
    const double scale = run.scaler->is_unscaled(optimizer.optimizer()) ? 1 : run.scaler->get_scale();
    known = known && run.optimizers.size() == 1 && common.value_or(scale) == scale;
    common = scale;
  });
  return known ? std::optional(common.value_or(1)) : std::nullopt;
}

/// The norm of the gradients as the step will see them; they themselves stay as they are where they can.
at::Tensor norm_of_unscaled(const std::vector<at::Tensor>& parameters, double norm_type, bool synchronising,
                            const at::Device& device) {
  const auto engines = live_engines();
  settle(engines, synchronising);
  const auto scale = common_scale(parameters, engines);
  if (!scale) each_scaled(parameters, engines, unscale);
  const at::NoGradGuard no_grad;
  return parallel::norm_of(parallel::gradients_of(engines, parameters), engines, norm_type, device) / scale.value_or(1);
}

}  // namespace

void Accelerator::unscale_gradients() { unscale_gradients(impl_->run.optimizers); }

void Accelerator::unscale_gradients(const AcceleratedOptimizer& optimizer) {
  unscale_gradients(std::vector<AcceleratedOptimizer>{optimizer});
}

void Accelerator::unscale_gradients(const std::vector<AcceleratedOptimizer>& optimizers) {
  settle(impl_->run.engines(), sync_gradients());
  for (const auto& optimizer : optimizers) unscale(impl_->run, optimizer);
}

at::Tensor Accelerator::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(max_norm >= 0)) raise<ConfigError>("clip_grad_norm_: max_norm is {}, expected 0 or more", max_norm);
  const auto own = impl_->rules ? impl_->rules->max_norm : std::nullopt;
  if (own && *own != max_norm && !std::exchange(impl_->spoke_of_own_norm, true))
    logs::warn(
        "accelerate.accelerator",
        "clip_grad_norm_: max_norm is {}, but the configuration's gradient_clipping is {}{}, and that holds, as in "
        "the reference: this call only tells the norm. Write the one that you want into the configuration.",
        max_norm, *own, *own == 0 ? " (off)" : "");
  return own ? norm_of_unscaled(parameters, norm_type, sync_gradients(), device())
             : norm_clipped_to(max_norm, parameters, norm_type, sync_gradients(), device());
}

void Accelerator::Impl::clip_before_steps(const AcceleratedOptimizer& optimizer) {
  const auto own = rules ? rules->max_norm : std::nullopt;
  if (!own) return;
  const auto divisor = [this, alive = std::weak_ptr(alive), &stepped = optimizer.optimizer(), limit = *own] {
    const at::Tensor one = at::ones({}, at::TensorOptions().dtype(at::kFloat).device(state->device()));
    if (alive.expired() || (limit == 0 && wrapped.empty())) return one;
    std::vector<at::Tensor> parameters;
    for (const auto& group : stepped.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    const at::Tensor total = global_norm(parameters);
    if (!wrapped.empty() && !total.is_meta()) norms[&stepped] = total.item<double>();
    if (limit == 0) return one;
    const auto& scaler = run.scaler;
    if (!scaler || !scaler->is_enabled() || total.is_meta() || std::isfinite(total.item<double>()))
      return ((total + 1e-6) / limit).clamp_min(1);
    // Squares may overflow where no gradient does: that skips the step, too.
    norm_clipped_to(limit, parameters, /*norm_type=*/2, /*synchronising=*/true, state->device());
    return one;
  };
  optimizer.set_step_hooks(&rules, {.before = nullptr, .after = nullptr, .divisor = divisor});
}

at::Tensor Accelerator::Impl::global_norm(const std::vector<at::Tensor>& parameters) const {
  return norm_of_unscaled(parameters, /*norm_type=*/2, /*synchronising=*/true, state->device());
}

void Accelerator::clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  if (!(clip_value >= 0)) raise<ConfigError>("clip_grad_value_: clip_value is {}, expected 0 or more", clip_value);
  const auto gradients = ready_to_clip(parameters, live_engines(), sync_gradients());
  at::NoGradGuard no_grad;
  for (const auto* some : {&gradients.whole, &gradients.pieces})
    for (const at::Tensor& gradient : *some)
      if (gradient.is_complex())
        throw ConfigError(
            "clip_grad_value_: found a complex gradient, expected real ones: complex numbers have no order. Clip by "
            "clip_grad_norm_, or pass the other parameters only");
  gradients.change([&](const auto& some) {
    for (const at::Tensor& gradient : some) gradient.clamp_(-clip_value, clip_value);
  });
}

}  // namespace accelerate
