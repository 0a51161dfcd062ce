#include "accelerate/optim/grad_scaler.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <functional>
#include <utility>

#include "accelerate/comm.hpp"
#include "optim/ivalue_access.hpp"
#include "optim/scale_rule.hpp"
#include "optim/widen_gradient.hpp"
#include "residency/disk/by_turns.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

at::Tensor fp32_scalar(double value, const at::Device& device) {
  return at::full({}, value, at::TensorOptions().dtype(at::kFloat).device(device));
}

/// One call of a foreach operator takes tensors of one device and dtype.
using Alike = std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>>;

void add_to(Alike& all, const at::Tensor& tensor) {
  all[{tensor.device().str(), tensor.scalar_type()}].push_back(tensor);
}

void multiply_gradients(torch::optim::Optimizer& optimizer, const at::Tensor& factor) {
  at::NoGradGuard no_grad;
  Alike gradients;
  for (auto& group : optimizer.param_groups())
    for (auto& param : group.params())
      if (const auto& grad = param.grad(); grad.defined()) add_to(gradients, grad.is_sparse() ? grad._values() : grad);
  for (auto& [key, grads] : gradients)
    residency::by_turns(grads, /*changes=*/true,
                        [&](const auto& some, const auto&) { at::_foreach_mul_(some, factor.to(some[0].device())); });
}

/// A number for each of the optimizer's parameters, on the host; undefined where there are none to look at.
at::Tensor norms_of(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  Alike parameters;
  for (auto& group : optimizer.param_groups())
    for (auto& param : group.params())
      if (param.numel() > 0 && !param.is_meta() && param.is_floating_point()) add_to(parameters, param.detach());
  std::vector<at::Tensor> norms;
  for (auto& [key, params] : parameters)
    for (auto& norm : at::_foreach_norm(params)) norms.push_back(norm.to(at::kCPU, at::kDouble));
  return norms.empty() ? at::Tensor() : at::stack(norms);
}

bool has_gradients(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups())
    for (auto& param : group.params())
      if (const auto& grad = param.grad(); grad.defined() && (grad.is_sparse() || grad.count_nonzero().item<bool>()))
        return true;
  return false;
}

}  // namespace

GradScaler::GradScaler(const GradScalerKwargs& kwargs) : GradScaler(kwargs.enabled, make_scale_rule(kwargs)) {}

std::shared_ptr<ScaleRule> GradScaler::rule_of(const DynamicLossScale& rule) { return make_scale_rule(rule); }
std::shared_ptr<ScaleRule> GradScaler::rule_of(const FixedLossScale& rule) { return make_scale_rule(rule); }

const at::Tensor& GradScaler::scale_now() const { return rule_->tensor(); }

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!is_enabled()) return loss;
  if (!scale_now().defined()) rule_->begin(loss.device());
  begin_round();
  last_loss_ = loss.detach();
  return loss.mul(scale_now().to(loss.device()));
}

void GradScaler::begin_round() {
  if (pending_.defined()) change_scale([&] { rule_->update(std::exchange(pending_, {})); });
  for (auto& [key, state] : optimizers_) {
    if (!state.optimizer) continue;
    if (rule_->scales()) check_for_foreign_steps(state);
    // Gradients were unscaled, and clipped perhaps, and not stepped on: the new ones are added to them.
    if (state.stage == Stage::unscaled) {
      multiply_gradients(*state.optimizer, scale_now());
      state.stage = Stage::ready;
      state.found_inf.reset();
    }
    state.scaled = true;
  }
}

void GradScaler::change_scale(const std::function<void()>& change) {
  const at::Tensor before = scale_now().clone();
  change();
  for (auto& [key, state] : optimizers_)
    if (state.optimizer && state.scaled && state.stage == Stage::ready)
      multiply_gradients(*state.optimizer, scale_now() / before);
}

void GradScaler::check_for_foreign_steps(Watched& state) const {
  // One that has stepped here is known by its prepared handle. Looking each time would cost more than it may find.
  // A write or two are the program's own affair (weights that are loaded, an average that is tried), before the first
  // step as after it; one before each loss is not.
  constexpr int kLooks = 64, kMoves = 3;
  if (state.has_stepped || state.looks++ >= kLooks) return;
  const at::Tensor now = norms_of(*state.optimizer), before = std::exchange(state.norms, now);
  const bool moved = now.defined() && before.defined() && before.sizes() == now.sizes() &&
                     // a step moves all
                     !at::isclose(now, before, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true).any().item<bool>() &&
                     !has_gradients(*state.optimizer);
  // A step on gradients that are so much too large may leave nothing to look at again.
  const bool ruined =
      now.defined() && before.defined() && before.isfinite().all().item<bool>() && !now.isfinite().all().item<bool>();
  state.moves = moved ? state.moves + 1 : 0;
  if (state.moves < kMoves && !ruined) return;
  raise<ConfigError>(
      "GradScaler::scale: the parameters of a prepared optimizer change from one loss to the next, and it "
      "has not stepped, expected step() of the handle that prepare() returned. The optimizer from before prepare() "
      "was probably stepped itself (optimizer.step() where opt.step() is meant): it knows nothing of loss scaling, "
      "and takes gradients that are {} times too large.",
      rule_->value());
}

void GradScaler::watch(torch::optim::Optimizer& optimizer) {
  auto& state = optimizers_[&optimizer];
  state.optimizer = &optimizer;
  ++state.watchers;
}

void GradScaler::unwatch(torch::optim::Optimizer& optimizer) {
  const auto found = optimizers_.find(&optimizer);
  if (found != optimizers_.end() && --found->second.watchers == 0) optimizers_.erase(found);
}

void GradScaler::begin_step(Optimizers::iterator at) {
  if (!at->second.optimizer) {
    optimizers_.erase(at);
    return;
  }
  at->second.stage = Stage::ready;
  at->second.found_inf.reset();
  at->second.scaled = false;
}

void GradScaler::begin_steps() {
  for (auto at = optimizers_.begin(); at != optimizers_.end();) {
    const auto here = at++;
    // Watched ones that wait for their step keep their place.
    if (!here->second.optimizer || here->second.stage == Stage::stepped) begin_step(here);
  }
}

void GradScaler::require_scale(const char* operation) const {
  if (!scale_now().defined())
    raise<ConfigError>(
        "GradScaler::{}: no loss has been scaled yet, expected scale(loss) and backward() before; use "
        "accelerator.backward(loss), which scales, instead of loss.backward().",
        operation);
}

void GradScaler::check_and_unscale(torch::optim::Optimizer& optimizer, Watched& state, const at::Tensor& inverse_scale,
                                   bool allow_fp16, bool widens) {
  at::NoGradGuard no_grad;
  Alike gradients;
  for (auto& group : optimizer.param_groups()) {
    for (auto& param : group.params()) {
      auto& grad = param.mutable_grad();
      if (!grad.defined()) continue;
      if (widens) widen_gradient(param);
      if (grad.scalar_type() == at::kHalf && !allow_fp16)
        throw ConfigError(
            "GradScaler::unscale_: found an fp16 gradient, expected fp32: dividing it in fp16 would lose what scaling "
            "has saved. Keep the parameters in fp32 and let autocast choose the compute type.");
      // In fp16 the entries of a sparse gradient that share an index may overflow only when they are added.
      if (grad.is_sparse() && grad.scalar_type() == at::kHalf) grad = grad.coalesce();
      add_to(gradients, grad.is_sparse() ? grad._values() : grad);
    }
  }
  at::Tensor found_inf = fp32_scalar(0, scale_now().device());
  for (auto& [key, grads] : gradients) {
    if (grads[0].is_meta()) continue;
    at::Tensor found_here = fp32_scalar(0, grads[0].device());
    // Gradients of offloaded parameters are on the host, which must not read the scale before it is there.
    const at::Tensor factor = inverse_scale.to(grads[0].device());
    const bool changes = !factor.is_cpu() || factor.item<float>() != 1;  // else it only looks
    residency::by_turns(grads, changes, [&](const auto& some, const auto&) {
      at::_amp_foreach_non_finite_check_and_unscale_(some, found_here, factor);
      for (const at::Tensor& grad : some)
        if (changes) grad.unsafeGetTensorImpl()->bump_version();  // the kernel leaves that out
    });
    found_inf = at::maximum(found_inf, found_here.to(found_inf.device()));
  }
  // Were one rank to skip alone, the ranks' parameters would drift apart unnoticed.
  if (agreement_ && comm::world_size() > 1) found_inf = comm::agreed::all_reduce(found_inf, Reduction::max, 1.0);
  state.found_inf = found_inf;
  has_checked_ = true;
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
  const at::Tensor& scale = scale_now();
  const at::Tensor inverse = scale.is_mps() ? scale.reciprocal() : scale.to(at::kDouble).reciprocal().to(at::kFloat);
  check_and_unscale(optimizer, state, inverse, fp16_gradients_, widening_);
  state.stage = Stage::unscaled;
}

void GradScaler::clipped_by(torch::optim::Optimizer& optimizer, const at::Tensor& norm) {
  const auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end() || found->second.stage != Stage::unscaled) return;
  at::Tensor& found_inf = found->second.found_inf;
  found_inf = at::maximum(found_inf, norm.isfinite().logical_not().to(found_inf.options()));
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
      check_and_unscale(optimizer, state, fp32_scalar(1, scale_now().device()), /*allow_fp16=*/true, /*widens=*/false);
      grad_scale = scale_now();
    } else {
      unscale_(optimizer);
    }
  }
  const bool overflow = is_true(state.found_inf);
  if (!overflow) take(grad_scale);
  state.stage = Stage::stepped;
  state.has_stepped = true;
  return !overflow;
}

void GradScaler::update() {
  if (!is_enabled()) return;
  require_scale("update");
  at::Tensor found_inf = pending_;
  for (const auto& [key, state] : optimizers_)
    if (state.found_inf.defined())
      found_inf = found_inf.defined() ? at::maximum(found_inf, state.found_inf) : state.found_inf;
  if (!found_inf.defined())
    throw ConfigError(
        "GradScaler::update: no gradients were checked since the last update(), expected step(optimizer) before.");
  change_scale([&] { rule_->update(found_inf); });
  pending_.reset();
  begin_steps();
}

void GradScaler::update(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  require_scale("update");
  const auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end() || !found->second.found_inf.defined())
    throw ConfigError(
        "GradScaler::update: no gradients of this optimizer were checked since the last update(), expected "
        "step(optimizer) before.");
  // A failure when the scale changes is an error of this step, and not of the next loss.
  const at::Tensor& found_inf = found->second.found_inf;
  rule_->check(found_inf);
  pending_ = pending_.defined() ? at::maximum(pending_, found_inf) : found_inf;
  begin_step(found);
}

void GradScaler::update(double new_scale) {
  if (!is_enabled()) return;
  if (!(new_scale > 0 && std::isfinite(new_scale)))
    raise<ConfigError>("GradScaler::update: found scale {}, expected a positive number.", new_scale);
  pending_.reset();
  if (scale_now().defined()) change_scale([&] { rule_->set(new_scale); });
  else rule_->set(new_scale);
  begin_steps();
}

std::shared_ptr<const ScaleRule> GradScaler::coming() const {
  if (!pending_.defined()) return rule_;
  const auto next = rule_->clone();
  next->update(pending_);
  return next;
}

void GradScaler::forget(torch::optim::Optimizer& optimizer) {
  if (const auto found = optimizers_.find(&optimizer); found != optimizers_.end()) begin_step(found);
}

bool GradScaler::is_unscaled(const torch::optim::Optimizer& optimizer) const {
  const auto found = optimizers_.find(&optimizer);
  return found != optimizers_.end() && found->second.stage == Stage::unscaled;
}

bool GradScaler::last_loss_is_finite() const {
  return !last_loss_.defined() || last_loss_.isfinite().all().item<bool>();
}

double GradScaler::get_scale() const { return is_enabled() ? coming()->value() : 1.0; }
double GradScaler::get_growth_factor() const { return rule_->growth_factor(); }
double GradScaler::get_backoff_factor() const { return rule_->backoff_factor(); }
int64_t GradScaler::get_growth_interval() const { return rule_->growth_interval(); }
int64_t GradScaler::get_growth_tracker() const { return is_enabled() ? coming()->good_steps() : 0; }
std::optional<int64_t> GradScaler::get_hysteresis() const { return coming()->hysteresis(); }

c10::IValue GradScaler::state_dict() const {
  Dict state = make_dict();
  if (is_enabled()) coming()->save(state);
  return state;
}

void GradScaler::load_state_dict(const c10::IValue& state) {
  if (!is_enabled()) return;
  DictReader reader(state, "gradient scaler state");
  if (reader.size() == 0)
    reader.fail(
        "found an empty dict, expected the state of an enabled scaler; it was probably saved by a disabled one");
  rule_->load(reader);
  pending_.reset();
  for (auto& [key, watched] : optimizers_) watched.norms.reset();  // parameters were probably loaded, too
}

}  // namespace accelerate::optim
