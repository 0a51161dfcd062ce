#pragma once

#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// Says of an optimizer's class that each element of a parameter is changed by what is known of that element alone (its
/// value, its gradient, states of its own): a second base beside torch::optim::Optimizer. With sharded models such an
/// optimizer steps on this rank's pieces and has states of these only; any other steps on whole parameters, on all
/// ranks alike, since norms, products and searches over pieces would be others. torch::optim's Adam, AdamW, SGD,
/// Adagrad and RMSprop are known to; a class derived from them is not.
class ACCELERATE_API ElementWise {
 public:
  virtual ~ElementWise() = default;
};

}  // namespace accelerate::optim
