#pragma once

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A module class that also derives from this is a layer that stays in one piece, as transformers' `_no_split_modules`
/// lists them: a unit of sharding where transformer_based_wrap names no classes.
///
///     struct BlockImpl : torch::nn::Module, accelerate::NoSplit { … };
class ACCELERATE_API NoSplit {
 public:
  virtual ~NoSplit() = default;
};

}  // namespace accelerate
