#pragma once

#include <c10/core/Device.h>

namespace accelerate {

/// How many items, of which the losses of an accumulation group are means, all ranks have together. Collective; a rank
/// without data in join_uneven_inputs takes part with none.
double items_of_all_ranks(double items, const at::Device& device);

}  // namespace accelerate
