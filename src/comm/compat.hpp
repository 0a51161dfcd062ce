#pragma once

/// Where LibTorch 2.11 and later differ.

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace accelerate::comm::compat {

inline c10::intrusive_ptr<c10d::Work> all_gather_single(c10d::ProcessGroup& group, at::Tensor& output,
                                                        at::Tensor& input) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
  return group.all_gather_single(output, input);
#else
  return group._allgather_base(output, input);
#endif
}

inline c10::intrusive_ptr<c10d::Work> reduce_scatter_single(c10d::ProcessGroup& group, at::Tensor& output,
                                                            at::Tensor& input) {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
  return group.reduce_scatter_single(output, input);
#else
  return group._reduce_scatter_base(output, input);
#endif
}

/// Equal pieces to and from everyone.
inline c10::intrusive_ptr<c10d::Work> all_to_all_single(c10d::ProcessGroup& group, at::Tensor& output,
                                                        at::Tensor& input) {
  std::vector<int64_t> output_splits, input_splits;
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
  return group.all_to_all_single(output, input, output_splits, input_splits);
#else
  return group.alltoall_base(output, input, output_splits, input_splits);
#endif
}

}  // namespace accelerate::comm::compat
