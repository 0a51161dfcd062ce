#pragma once

#include "accelerate/model/model_ref.hpp"

namespace accelerate::parallel {

/// Compares names, shapes, dtypes and requires_grad with rank 0's. Collective.
/// @throws ShapeError with the same text on every rank, naming the first difference and the rank that has it.
void verify_parameters(const NamedTensors& parameters);

}  // namespace accelerate::parallel
