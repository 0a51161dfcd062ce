#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <memory>

/// Code that plain steps of this library's optimizers share.
namespace accelerate::optim {

/// A tensor's values in fp32 (fp64 where it is), to compute with; the tensor itself where it has that type.
struct Wide {
  explicit Wide(const at::Tensor& place)
      : place(place.detach()), value(this->place.to(place.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)) {}
  /// Writes `value`, as it is by now, into `place`.
  void put() const {
    if (!value.is_same(place)) place.copy_(value);
  }
  at::Tensor place, value;
};

/// The optimizer's state of the parameter, made by `make` at first.
template <class State, class Make>
State& state_at(torch::optim::Optimizer& optimizer, const at::Tensor& parameter, const Make& make) {
  auto& held = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (!held) {
    auto state = std::make_unique<State>();
    make(*state);
    held = std::move(state);
  }
  return static_cast<State&>(*held);
}

struct AdamRule {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;               ///< weight decay; else it is added to gradients
  bool bias_correction = true;  ///< of moments
};
/// @param State  with step, exp_avg and exp_avg_sq, which may be more exact than the parameter
template <class State> void adam_step_on(const at::Tensor& parameter, State& state, const AdamRule& rule) {
  state.step(state.step() + 1);
  const auto step = static_cast<double>(state.step());
  const double correction1 = rule.bias_correction ? 1 - std::pow(rule.beta1, step) : 1;
  const double correction2 = rule.bias_correction ? std::sqrt(1 - std::pow(rule.beta2, step)) : 1;
  const Wide p(parameter), grad(parameter.grad()), m(state.exp_avg()), v(state.exp_avg_sq());
  const auto g = rule.decoupled ? grad.value : grad.value.add(p.value, rule.weight_decay);
  m.value.mul_(rule.beta1).add_(g, 1 - rule.beta1);
  v.value.mul_(rule.beta2).addcmul_(g, g, 1 - rule.beta2);
  if (rule.decoupled) p.value.mul_(1 - rule.lr * rule.weight_decay);
  p.value.addcdiv_(m.value, v.value.sqrt().div_(correction2).add_(rule.eps), -rule.lr / correction1);
  p.put(), m.put(), v.put();
}

}  // namespace accelerate::optim
