#pragma once

/// Results of all ranks without the samples that were repeated to fill the last batch.

#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/state.hpp"

namespace accelerate {

namespace detail {
/// The rows of all ranks' tensors, of which each may have as many as it likes; a number counts as a row.
template <class T> T gather_rows(const T& data) {
  const T rows = nested::map_tensors(data, [](const at::Tensor& t) { return t.dim() == 0 ? t.unsqueeze(0) : t; });
  return accelerate::concatenate(gather_object(std::vector<T>{rows}));
}
}  // namespace detail

/// Gathers and drops the samples that were repeated to fill the batch of the loader being iterated: its last one, and
/// of streams that ranks read each for themselves any that some had less for than others. A number stays a number.
/// Lists of things that are not tensors go as objects. With `use_gather_object` everything does, so that ranks may have
/// different numbers of rows: a list becomes the lists of all ranks, one after the other (tensors in it may differ in
/// all sizes); of anything else the tensors' rows follow each other, and their other sizes must be equal. Collective.
/// @throws what gather and gather_object throw; ShapeError, on all ranks, for rows that can't follow each other.
template <class T> T gather_for_metrics(const T& data, bool use_gather_object = false) {
  const GradientState gradients;
  const int64_t keep = gradients.own_rows();
  if constexpr (nested::detail::is_instance<T, std::vector>) {
    if (use_gather_object || !nested::all_tensors<T>) {
      T all = gather_object(data);
      if (keep > 0 && static_cast<int64_t>(all.size()) > keep) all.resize(static_cast<size_t>(keep));
      return all;
    }
  } else {
    static_assert(nested::all_tensors<T>, "gather_for_metrics takes nested tensors, or a std::vector of anything");
  }
  const T all = use_gather_object ? detail::gather_rows(data) : gather(data);
  if (keep <= 0) return all;
  return nested::map_tensors(all, [&](const at::Tensor& t) { return t.dim() == 0 ? t : ops::slice(t, 0, keep); });
}

}  // namespace accelerate
