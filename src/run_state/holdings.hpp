#pragma once

#include <memory>
#include <vector>

#include "accelerate/parallel/engine.hpp"
#include "accelerate/run_state/prepared_model.hpp"
#include "accelerate/run_state/state_dict.hpp"
#include "checkpoint/saved_state.hpp"

/// What a rank holds of the tensors of prepared models. Files are written and read in terms of this alone, whether an
/// engine cuts tensors into pieces or leaves them whole.
namespace accelerate::run_state {

struct HeldTensor : parallel::Holding {
  parallel::Engine* engine = nullptr;  ///< makes it whole; null: whole on all ranks
  bool of_no_model = false;            ///< of an optimizer's parameter only
};

/// Those in pieces, in the order in which they become whole, then the rest of the model's state.
std::vector<HeldTensor> holdings_of(const detail::PreparedModel& model);

/// The holding's piece, or `values` that lie in pieces as it does (a moment of Adam), as rectangles of the whole.
std::vector<checkpointing::StretchPart> boxes_of(const parallel::Holding& holding, const at::Tensor& values);
/// The same in a state dict, without copies. @param engine  to be told when the values are loaded, or null
distributed_checkpoint::ShardedTensor sharded(const parallel::Holding& holding, const at::Tensor& values,
                                              std::shared_ptr<parallel::Engine> engine = nullptr);
/// This rank's piece of a stored tensor of the holding's sizes. @throws CheckpointError when the file is damaged.
at::Tensor read_piece(const checkpointing::StoredTensor& stored, const parallel::Holding& holding);

}  // namespace accelerate::run_state
