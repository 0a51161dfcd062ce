#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>

/// What plain steps of this library's optimizers share.
namespace accelerate::optim {

/// A tensor's values in fp32 (fp64 where it is), to compute with; the tensor itself where it has that type.
struct Wide {
  explicit Wide(const at::Tensor& place)
      : place(place.detach()), value(this->place.to(place.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)) {}
  /// What `value` has become.
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

}  // namespace accelerate::optim
