#pragma once

#include <optional>

#include "accelerate/codes/kernels.hpp"

namespace accelerate::codes::kernels {

/// For the registry: as codes::linear; undefined where decoding is faster, or nothing here computes with x.
at::Tensor try_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias);

}  // namespace accelerate::codes::kernels
