#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace accelerate::comm {

/// Whether average() knows the type: fp64, fp32, bf16, fp16.
bool can_average(c10::ScalarType type);

/// output[i] = (inputs[0][i] + inputs[1][i] + …) / divisor, added in this order; half-precision types are summed in
/// fp32. One pass over memory. `output` may be one of the inputs. @param count  elements.
void average(c10::ScalarType type, void* output, const std::vector<const void*>& inputs, int64_t count, double divisor);

}  // namespace accelerate::comm
