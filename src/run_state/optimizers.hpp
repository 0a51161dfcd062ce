#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "accelerate/optim/optimizer.hpp"
#include "run_state/holdings.hpp"
#include "run_state/state_dict.hpp"
#include "run_state/state_files.hpp"

/// States of prepared optimizers, to files and back. In all forms but that of plain training, which counts parameters,
/// they are called by their names in the models.
namespace accelerate::run_state {

using PreparedModels = std::vector<std::shared_ptr<detail::PreparedModel>>;

/// Trained parameters for which the optimizer holds nothing yet.
enum class Untouched {
  left_out,
  at_start,  ///< with what it would begin with: zeros
};

/// Collective; throws what goes wrong on all ranks.
void save_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file,
                    const Writers& writers);

/// {"state": {name: {kind: tensor}}, "param_groups": […]} with whole tensors that are copies, for whom `config` says;
/// an empty dict elsewhere. An optimizer without shards gives it to all. Collective.
c10::IValue whole_state(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                        const StateDictConfig& config, Untouched untouched = Untouched::left_out);

/// The same with what this rank holds, without copies. Collective.
StateDict distributed_state(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                            Untouched untouched = Untouched::left_out);

/// An optimizer's parameters as the models hold them, by group. @throws ConfigError for one of none of them.
std::vector<std::vector<parallel::Held>> parameters_by_group(const AcceleratedOptimizer& optimizer,
                                                             const PreparedModels& models);

/// The state for optimizer.load_state_dict(), with this rank's shards, whoever wrote it. Not collective. @throws
/// CheckpointError naming what is missing or has another size.
c10::IValue read_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file);
c10::IValue read_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                           const checkpointing::StoredOptimizer& stored);

}  // namespace accelerate::run_state
