#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "accelerate/residency/deferred.hpp"
#include "residency/replaced.hpp"

namespace accelerate::bigmodel {

/// tensor.set_data(value), also from and to the meta device, which LibTorch's does not allow. The tensor keeps its
/// identity, and its adapter.
inline void replace_values(const at::Tensor& tensor, const at::Tensor& value) {
  if (value.is_meta() || (tensor.is_meta() && !is_deferred(tensor)))
    tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
  else tensor.set_data(value);
  residency::say_replaced(tensor);
}

}  // namespace accelerate::bigmodel
