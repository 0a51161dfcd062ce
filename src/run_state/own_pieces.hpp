#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>
#include <vector>

#include "checkpoint/archive.hpp"
#include "run_state/holdings.hpp"

/// Each rank's shards as they are, which make sense only to the same rank of as many, of a model that is cut in the
/// same way.
namespace accelerate::run_state {

/// A slice as files have it.
std::vector<int64_t> numbers_of(const parallel::Slice& slice);

c10::IValue own_pieces(const std::vector<parallel::Held>& holdings, const c10::IValue& state);

/// A file of them, opened.
class OwnShards {
 public:
  /// @throws CheckpointError when the file is another rank's, or a model's that is cut differently.
  OwnShards(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file);

  /// The `state` again; tensors are without values, on the meta device.
  const c10::IValue& state() const { return state_; }
  /// Where the values of one of those tensors are. Good without this object, too.
  checkpointing::StoredTensor stored(const at::Tensor& tensor) const { return archive_.stored(tensor); }
  /// The same value with its tensors of no dimension read: counts of steps.
  c10::IValue with_numbers(const c10::IValue& value) const;

 private:
  checkpointing::Archive archive_;
  c10::IValue state_;
};

}  // namespace accelerate::run_state
