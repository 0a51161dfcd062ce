#pragma once

#include "accelerate/optim/steps_on_pieces.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// Says of an optimizer's class that each element of a parameter is changed by what is known of that element alone (its
/// value, its gradient, states of its own): a shard is all that it needs. A second base beside torch::optim::Optimizer.
/// torch::optim's Adam, AdamW, SGD, Adagrad and RMSprop are known to be such; a class derived from them is not.
class ACCELERATE_API ElementWise : public StepsOnShards {};

}  // namespace accelerate::optim
