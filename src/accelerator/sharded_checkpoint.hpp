#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/optim/optimizer.hpp"
#include "accelerator/state_files.hpp"
#include "checkpoint/saved_state.hpp"

/// Models and optimizers of which each rank holds pieces: to files and back.
namespace accelerate {

using PreparedModels = std::vector<std::shared_ptr<detail::PreparedModel>>;

/// One tensor of a model as this rank holds it.
struct Holding {
  std::vector<std::string> names;                      ///< its own, and those of weights that are tied to it
  at::Tensor tensor;                                   ///< the module's
  parallel::FullyShardedDataParallel* fsdp = nullptr;  ///< null: whole on every rank
  at::Tensor piece;                                    ///< of a sharded one; 1-D
  int64_t begin = 0, part = 0;                         ///< see FullyShardedDataParallel::Piece

  bool sharded() const { return fsdp != nullptr; }
};

/// Sharded ones in the order in which they are gathered, then the rest.
std::vector<Holding> holdings_of(const detail::PreparedModel& model);

/// Writes a model in one of the forms full, sharded, local. Collective.
void save_sharded_model(const detail::PreparedModel& model, const StateFile& file);
/// Parameters are called by their names in the models. Collective.
void save_sharded_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file);

/// A model's weights, read and found to fit, not yet in their place. Holds as many bytes as this rank's part of the
/// model.
class StagedModel {
 public:
  /// @throws CheckpointError listing every missing, unexpected and misshapen tensor.
  StagedModel(const detail::PreparedModel& model, const StateFile& file);
  void apply() const;  ///< collective for sharded models

 private:
  parallel::FullyShardedDataParallel* fsdp_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

/// The state for optimizer.load_state_dict(), with this rank's pieces, whoever wrote it. @throws CheckpointError naming
/// what is missing or has another size.
c10::IValue read_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file);

}  // namespace accelerate
