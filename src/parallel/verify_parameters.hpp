#pragma once

#include "accelerate/model/model_ref.hpp"

namespace accelerate::parallel {

/// Compares names, shapes, dtypes and requires_grad with the first rank's of those that train one model on other tokens
/// (comm::kTokens). Collective over them.
/// @throws ShapeError with the same text on every rank, naming the first difference and the rank that has it.
void verify_parameters(const NamedTensors& parameters);

}  // namespace accelerate::parallel
