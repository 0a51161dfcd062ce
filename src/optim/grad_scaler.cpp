#include "accelerate/optim/grad_scaler.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <utility>

#include "accelerate/comm.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

at::Tensor fp32_scalar(double value, const at::Device& device) {
  return at::full({}, value, at::TensorOptions().dtype(at::kFloat).device(device));
}

}  // namespace

GradScaler::GradScaler(const GradScalerKwargs& kwargs) : kwargs_(kwargs) {
  if (!kwargs.enabled) return;
  const auto check = [](bool ok, const char* name, double value, const char* expected) {
    if (!ok) raise<ConfigError>("GradScaler: found {} {}, expected {}.", name, value, expected);
  };
  check(kwargs.init_scale > 0 && std::isfinite(kwargs.init_scale), "init_scale", kwargs.init_scale,
        "a positive number");
  check(kwargs.growth_factor > 1 && std::isfinite(kwargs.growth_factor), "growth_factor", kwargs.growth_factor,
        "more than 1");
  check(kwargs.backoff_factor > 0 && kwargs.backoff_factor < 1, "backoff_factor", kwargs.backoff_factor,
        "a number between 0 and 1");
  check(kwargs.growth_interval > 0, "growth_interval", static_cast<double>(kwargs.growth_interval), "at least 1");
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!is_enabled()) return loss;
  if (!scale_.defined()) {
    scale_ = fp32_scalar(kwargs_.init_scale, loss.device());
    growth_tracker_ = at::full({}, initial_growth_tracker_, at::TensorOptions().dtype(at::kInt).device(loss.device()));
  }
  last_loss_ = loss.detach();
  return loss.mul(scale_.to(loss.device()));
}

void GradScaler::require_scale(const char* operation) const {
  if (!scale_.defined())
    raise<ConfigError>(
        "GradScaler::{}: no loss has been scaled yet, expected scale(loss) and backward() before; use "
        "accelerator.backward(loss), which scales, instead of loss.backward().",
        operation);
}

void GradScaler::check_and_unscale(torch::optim::Optimizer& optimizer, PerOptimizer& state,
                                   const at::Tensor& inverse_scale, bool allow_fp16) {
  at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> by_device_and_dtype;
  for (auto& group : optimizer.param_groups()) {
    for (auto& param : group.params()) {
      auto& grad = param.mutable_grad();
      if (!grad.defined()) continue;
      if (grad.scalar_type() == at::kHalf && !allow_fp16)
        throw ConfigError(
            "GradScaler::unscale_: found an fp16 gradient, expected fp32: dividing it in fp16 would lose what scaling "
            "has saved. Keep the parameters in fp32 and let autocast choose the compute type.");
      // In fp16 the entries of a sparse gradient that share an index may overflow only when they are added.
      if (grad.is_sparse() && grad.scalar_type() == at::kHalf) grad = grad.coalesce();
      const at::Tensor values = grad.is_sparse() ? grad._values() : grad;
      by_device_and_dtype[{values.device().str(), values.scalar_type()}].push_back(values);
    }
  }
  at::Tensor found_inf = fp32_scalar(0, scale_.device());
  for (auto& [key, grads] : by_device_and_dtype) {
    at::Tensor found_here = fp32_scalar(0, grads[0].device());
    // Gradients of offloaded parameters are on the host, which must not read the scale before it is there.
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_here, inverse_scale.to(grads[0].device()));
    for (const at::Tensor& grad : grads) grad.unsafeGetTensorImpl()->bump_version();  // the kernel leaves that out
    found_inf = at::maximum(found_inf, found_here.to(found_inf.device()));
  }
  // Were one rank to skip alone, the ranks' parameters would drift apart unnoticed.
  if (comm::world_size() > 1) found_inf = comm::agreed::all_reduce(found_inf, Reduction::max, 1.0);
  state.found_inf = found_inf;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  require_scale("unscale_");
  auto& state = optimizers_[&optimizer];
  if (state.stage == Stage::unscaled)
    throw ConfigError(
        "GradScaler::unscale_: called twice for this optimizer since the last update(), expected once; gradients would "
        "be divided twice. Clip once per step, when gradients are complete.");
  if (state.stage == Stage::stepped)
    throw ConfigError(
        "GradScaler::unscale_: called after step(), expected before it; call update() to end the step first.");
  // The reciprocal in double, because that of a large fp32 scale may be rounded; MPS has no double.
  const at::Tensor inverse = scale_.is_mps() ? scale_.reciprocal() : scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  check_and_unscale(optimizer, state, inverse, /*allow_fp16=*/false);
  state.stage = Stage::unscaled;
}

bool GradScaler::step(torch::optim::Optimizer& optimizer, const StepFunction& fused_step) {
  const auto take = [&](const std::optional<at::Tensor>& grad_scale) {
    if (fused_step) fused_step(grad_scale);
    else optimizer.step();
  };
  if (!is_enabled()) {
    take(std::nullopt);
    return true;
  }
  require_scale("step");
  auto& state = optimizers_[&optimizer];
  if (state.stage == Stage::stepped)
    throw ConfigError(
        "GradScaler::step: called twice for this optimizer since the last update(), expected once; call update() after "
        "it.");
  std::optional<at::Tensor> grad_scale;
  if (state.stage == Stage::ready) {
    if (fused_step) {
      // Only looks for inf and NaN: the kernel divides.
      check_and_unscale(optimizer, state, fp32_scalar(1, scale_.device()), /*allow_fp16=*/true);
      grad_scale = scale_;
    } else {
      unscale_(optimizer);
    }
  }
  const bool overflow = state.found_inf.item<float>() != 0;
  if (!overflow) take(grad_scale);
  state.stage = Stage::stepped;
  return !overflow;
}

void GradScaler::apply(const at::Tensor& found_inf) {
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf, kwargs_.growth_factor, kwargs_.backoff_factor,
                         kwargs_.growth_interval);
}

void GradScaler::update() {
  if (!is_enabled()) return;
  require_scale("update");
  at::Tensor found_inf;
  for (const auto& [optimizer, state] : optimizers_)
    if (state.found_inf.defined())
      found_inf = found_inf.defined() ? at::maximum(found_inf, state.found_inf) : state.found_inf;
  if (!found_inf.defined())
    throw ConfigError(
        "GradScaler::update: no gradients were checked since the last update(), expected step(optimizer) before.");
  apply(found_inf);
  optimizers_.clear();
}

void GradScaler::update(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  require_scale("update");
  const auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end() || !found->second.found_inf.defined())
    throw ConfigError(
        "GradScaler::update: no gradients of this optimizer were checked since the last update(), expected "
        "step(optimizer) before.");
  apply(found->second.found_inf);
  optimizers_.erase(found);
}

void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  if (!(new_scale > 0 && std::isfinite(new_scale)))
    raise<ConfigError>("GradScaler::update: found scale {}, expected a positive number.", new_scale);
  if (scale_.defined()) scale_.fill_(new_scale);
  else kwargs_.init_scale = new_scale;
  optimizers_.clear();
}

void GradScaler::forget(torch::optim::Optimizer& optimizer) { optimizers_.erase(&optimizer); }

bool GradScaler::last_loss_is_finite() const {
  return !last_loss_.defined() || last_loss_.isfinite().all().item<bool>();
}

double GradScaler::get_scale() const {
  if (!is_enabled()) return 1.0;
  return scale_.defined() ? scale_.item<double>() : kwargs_.init_scale;
}

int64_t GradScaler::get_growth_tracker() const {
  if (!is_enabled()) return 0;
  return growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : initial_growth_tracker_;
}

c10::IValue GradScaler::state_dict() const {
  Dict state = make_dict();
  if (is_enabled()) {
    state.insert("scale", get_scale());
    state.insert("growth_factor", kwargs_.growth_factor);
    state.insert("backoff_factor", kwargs_.backoff_factor);
    state.insert("growth_interval", kwargs_.growth_interval);
    state.insert("_growth_tracker", get_growth_tracker());
  }
  return state;
}

void GradScaler::load_state_dict(const c10::IValue& state) {
  if (!is_enabled()) return;
  DictReader reader(state, "gradient scaler state");
  if (reader.size() == 0)
    reader.fail(
        "found an empty dict, expected the state of an enabled scaler; it was probably saved by a disabled one");
  GradScalerKwargs kwargs = kwargs_;
  kwargs.init_scale = reader.number("scale");
  kwargs.growth_factor = reader.number("growth_factor");
  kwargs.backoff_factor = reader.number("backoff_factor");
  kwargs.growth_interval = reader.integer("growth_interval");
  const int64_t growth_tracker = reader.integer("_growth_tracker");
  try {
    GradScaler{kwargs};
  } catch (const ConfigError& error) {
    reader.fail("found a value out of range ({})", error.what());
  }
  if (growth_tracker < 0) reader.fail("found _growth_tracker {}, expected 0 or more", growth_tracker);
  kwargs_ = kwargs;
  initial_growth_tracker_ = growth_tracker;
  if (scale_.defined()) {
    scale_.fill_(kwargs.init_scale);
    growth_tracker_.fill_(growth_tracker);
  }
}

}  // namespace accelerate::optim
