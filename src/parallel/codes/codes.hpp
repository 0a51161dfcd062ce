#pragma once

#include "accelerate/model/model_ref.hpp"

namespace accelerate::parallel {

/// Weights in few bits become the first rank's on all ranks that hold them (comm::kTokens), to the bit. They are
/// frozen, so that this is all that ranks ever tell each other of them. Where they are equal already, as those of one
/// checkpoint, only a number for each travels. Collective; after verify_parameters().
void agree_on_codes(const NamedTensors& parameters);

}  // namespace accelerate::parallel
