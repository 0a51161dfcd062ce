#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "accelerate/codes/codes.hpp"
#include "residency/home.hpp"

namespace accelerate::residency {

/// A weight in few bits, and how products with it are made.
struct EncodedWeight {
  codes::Codes codes;
  /// Activations are converted to it, and results back. None: products are in the activations' dtype.
  std::optional<at::ScalarType> compute_dtype;
  /// int8_rowwise: from this magnitude on a column of activations is multiplied apart (LLM.int8()).
  double outlier_threshold = 0;
  /// Products with the decoded weight, even if there is a kernel for its codes that rounds activations.
  bool exact = false;
};

/// Codes in host memory (or in a mapped file) as the home of one member that fills its part: what fetches it decodes.
/// Most products never do, see encoded.hpp. The weight is frozen: nothing is stored.
std::unique_ptr<Home> encoded_home(std::shared_ptr<const EncodedWeight> weight);

}  // namespace accelerate::residency
