#pragma once

/// Results of all ranks without the samples that were repeated to fill the last batch.

#include <cstdint>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate {

/// Gathers and, on the last batch of the loader being iterated, drops the samples that were repeated to fill it. Lists
/// of things that are not tensors go as objects; `use_gather_object` sends tensors in lists so, too. Collective.
/// @throws what gather and gather_object throw.
template <class T> T gather_for_metrics(const T& data, bool use_gather_object = false) {
  const GradientState gradients;
  const int64_t keep = gradients.end_of_dataloader() ? gradients.remainder() : 0;
  if constexpr (nested::detail::is_instance<T, std::vector>) {
    if (use_gather_object || !nested::all_tensors<T>) {
      T all = gather_object(data);
      if (keep > 0 && static_cast<int64_t>(all.size()) > keep) all.resize(static_cast<size_t>(keep));
      return all;
    }
  } else {
    static_assert(nested::all_tensors<T>, "gather_for_metrics takes nested tensors, or a std::vector of anything");
  }
  const T all = gather(data);
  return keep > 0 ? slice_tensors(all, 0, keep) : all;
}

}  // namespace accelerate
