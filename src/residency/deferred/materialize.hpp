#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "accelerate/model/model_ref.hpp"

namespace accelerate::residency {

/// Calls `take` for each deferred parameter and buffer of the model, one after the other in the order of their
/// initialisers, with its value: plain, real, on `device`, of the parameter's sizes and strides, and freed afterwards
/// unless `take` keeps it. So memory holds one parameter and what its initialisers read, besides what is kept. The
/// parameter itself stays deferred; `take` may give it another storage (a Member). Afterwards generators are as after
/// materialize(). On the meta device values have sizes only: no initialiser runs, and generators stay as they are.
/// Every rank that does this has the same values; nothing communicates. @throws what `take` throws; parameters that it
/// has not seen can be asked for again.
void materialize_each(
    const ModelRef& model, const at::Device& device,
    const std::function<void(const std::string& name, const at::Tensor& parameter, at::Tensor value)>& take);

}  // namespace accelerate::residency
