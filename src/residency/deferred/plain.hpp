#pragma once

#include "residency/own_operators.hpp"

namespace accelerate::residency::deferred {

/// For our own tensors: no recording, no autograd, no autocast, whatever the user's code has switched on around them.
/// Members of a residency still fault in.
struct Plain {
  OwnOperators own{TorchLayers::no_gradients, OwnLinks::homes};
};

}  // namespace accelerate::residency::deferred
