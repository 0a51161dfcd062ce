#pragma once

#include <ATen/core/Tensor.h>

#include "residency/home.hpp"
#include "residency/member.hpp"

namespace accelerate::optim {

/// A gradient of less precision than its parameter takes the parameter's dtype: that of the masters, where the
/// parameter is their image.
inline void widen_gradient(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  const auto* member = residency::Member::of(parameter);
  const auto kept = member ? member->home().keeps() : std::nullopt;
  const auto type = kept.value_or(parameter.scalar_type());
  if (gradient.scalar_type() != type && c10::promoteTypes(gradient.scalar_type(), type) == type)
    gradient = gradient.to(type);
}

}  // namespace accelerate::optim
