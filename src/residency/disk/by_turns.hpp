#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace accelerate::residency {

/// Calls `use` with some of the tensors after the other, each once, and with their numbers in the list. Those that lie
/// on a DiskMemory are in memory meanwhile, so that they come by few large requests and not page by page; those that
/// don't come in the first call, all at once.
/// @param changes  what has come is written back; false: it is not, and `use` must leave values as they are
/// @throws ResourceError when a disk fails, having lost nothing
void by_turns(const std::vector<at::Tensor>& tensors, bool changes,
              const std::function<void(const std::vector<at::Tensor>& some, const std::vector<size_t>& numbers)>& use);

}  // namespace accelerate::residency
