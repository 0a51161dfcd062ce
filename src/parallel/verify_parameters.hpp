#pragma once

#include <cstdint>

#include "accelerate/model/model_ref.hpp"

namespace accelerate::parallel {

/// Compares names, shapes, dtypes and requires_grad with rank 0's. Collective.
/// @throws ShapeError with the same text on every rank, naming the first difference and the rank that has it.
void verify_parameters(const NamedTensors& parameters);

/// Compares values with rank 0's, by a sum over the bits of each parameter: one pass over memory and one small message.
/// Where sums differ, the values do the talking: what roundings of unlike processors make of equal steps is left alone.
/// Collective. @param backwards  for the message: after how many of them
/// @throws ConfigError on all ranks, naming the first parameter that differs and a rank that has other values.
void verify_values(const NamedTensors& parameters, int64_t backwards);

}  // namespace accelerate::parallel
