#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// Averages tensors over the group's ranks, in few messages; half precision is summed in fp32. Collective: as many
/// tensors of the same sizes and dtypes on all ranks. Blocks.
void average_in_place(comm::Group& group, const std::vector<at::Tensor>& tensors);

}  // namespace accelerate::parallel
