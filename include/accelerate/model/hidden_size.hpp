#pragma once

#include <cstdint>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A module class that also derives from this says how wide it is, as `model.config.hidden_size` does in transformers:
/// sizes of buckets that a DeepSpeed configuration leaves open ("auto") follow from the widest one.
class ACCELERATE_API HasHiddenSize {
 public:
  virtual ~HasHiddenSize() = default;
  virtual int64_t hidden_size() const = 0;
};

}  // namespace accelerate
