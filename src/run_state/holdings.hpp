#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "accelerate/parallel/engine.hpp"
#include "accelerate/run_state/prepared_model.hpp"
#include "accelerate/run_state/state_dict.hpp"
#include "checkpoint/saved_state.hpp"

/// The tensors of prepared models as a rank holds them. Files are written and read in terms of this alone, whether an
/// engine cuts tensors into shards or leaves them whole.
namespace accelerate::run_state {

/// First the tensors in shards, in the order in which they become whole, then the rest of the model's state.
std::vector<parallel::Held> holdings_of(const detail::PreparedModel& model);

/// A tensor that all ranks have whole.
parallel::Held whole_on_all_ranks(std::vector<std::string> names, const at::Tensor& tensor);

/// `values`, which are of the slice that is held (it itself, a moment of Adam), as rectangles of the whole.
std::vector<checkpointing::SliceBox> boxes_of(const parallel::Held& holding, const at::Tensor& values);
/// The same in a state dict, without copies. @param engine  to be told when the values are loaded, or null
distributed_checkpoint::ShardedTensor sharded(const parallel::Held& holding, const at::Tensor& values,
                                              std::shared_ptr<parallel::Engine> engine = nullptr);
/// Whether bytes of what is held are there only while operators need them.
bool comes_and_goes(const at::Tensor& values);
/// For code that reads without operators: `values`, or a copy of such.
at::Tensor readable(const at::Tensor& values);
/// This rank's values of a stored tensor of the whole's sizes. @param dtype  unset: that of what it holds
/// @throws CheckpointError when the file is damaged.
at::Tensor read_piece(const checkpointing::StoredTensor& stored, const parallel::Held& holding,
                      std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace accelerate::run_state
