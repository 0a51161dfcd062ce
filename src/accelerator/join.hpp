#pragma once

#include <c10/core/Device.h>

namespace accelerate {

/// How many items, of which the losses of an accumulation group are means, all ranks have together. Collective; a rank
/// without data in join_uneven_inputs takes part with none.
double items_of_all_ranks(double items, const at::Device& device);

/// All in the group take what the optimizer of its rank `source` has learned (momentum, say). Collective, blocks.
/// @return on all of them, whether they did: classes without state_dict() can't.
bool share_state(const AcceleratedOptimizer& optimizer, comm::Group& group, int64_t source);

}  // namespace accelerate
