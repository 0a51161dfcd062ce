#pragma once

#include <filesystem>
#include <functional>

#include "run_state/state_dict.hpp"

namespace accelerate::run_state {

struct DistributedLoadOptions {
  bool allow_partial = false;  ///< what the checkpoint does not have stays as it is
};

/// Reads a distributed checkpoint into the values of `state`: tensors in place, by part; everything else is replaced.
/// Collective. @throws CheckpointError on all ranks, naming every value that is missing or does not fit, having changed
/// nothing; where the disk fails while elements are read, some have changed.
void load_distributed(StateDict& state, const std::filesystem::path& folder, const DistributedLoadOptions& options);

/// Rank 0's dict of whole tensors for everybody, one tensor at a time. Collective.
/// @param take  what this rank keeps of a value under the path
StateDict broadcast_state(const StateDict& state, const at::Device& device,
                          const std::function<Value(const formats::DcpPath& path, const at::Tensor& whole)>& take);

}  // namespace accelerate::run_state
