#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string_view>

namespace accelerate::parallel::pipeline {

/// A meta tensor with the sizes, strides and dtype of another one; a number stays a number for the rules of dtypes.
at::Tensor sizes_of(const at::Tensor& tensor);

/// Results whose strides are others on the meta device than on a real one, where a view would be possible here and not
/// there.
/// @param arguments  with meta tensors only
std::optional<at::Tensor> sizes_only_result(std::string_view name, c10::ArrayRef<c10::IValue> arguments);

}  // namespace accelerate::parallel::pipeline
