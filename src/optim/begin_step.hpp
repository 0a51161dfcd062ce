#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <string>

#include "utils/raise.hpp"

namespace accelerate::optim {

/// The beginning of step() of this library's optimizers: runs the closure, if there is one, and returns its loss.
/// @throws ConfigError for a sparse gradient
inline at::Tensor begin_step(const torch::optim::Optimizer& optimizer, const std::string& name,
                             const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    const c10::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params())
      if (parameter.grad().defined() && parameter.grad().layout() != at::kStrided)
        raise<ConfigError>(
            "{}::step: found a sparse gradient of a parameter {}, expected dense ones; make the embedding with "
            "sparse(false)",
            name, parameter.sizes());
  return loss;
}

}  // namespace accelerate::optim
