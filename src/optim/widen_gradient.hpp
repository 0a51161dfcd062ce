#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate::optim {

/// A gradient of less precision than its parameter takes the parameter's dtype.
inline void widen_gradient(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (gradient.scalar_type() != parameter.scalar_type() &&
      c10::promoteTypes(gradient.scalar_type(), parameter.scalar_type()) == parameter.scalar_type())
    gradient = gradient.to(parameter.scalar_type());
}

}  // namespace accelerate::optim
