#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "accelerate/optim/optimizer.hpp"
#include "run_state/filling.hpp"
#include "run_state/holdings.hpp"
#include "run_state/own_pieces.hpp"
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

/// @param number         of the optimizer, by which ranks share out files that they would write alike
/// @param initial_rates  the rates that a schedule began with, of each group, which Python's schedules leave in the
///                       groups and its loaders of whole and sharded files look for; empty: nothing schedules it
/// Collective; throws what goes wrong on all ranks.
void save_optimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file,
                    const Writers& writers, size_t number, const std::vector<double>& initial_rates);

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

/// An optimizer's state that was found, whoever wrote it, and fits its parameters, with this rank's shards.
/// Nothing has changed yet, and of tensors next to nothing is read. Not collective.
class StagedOptimizer {
 public:
  /// @throws CheckpointError naming what is missing or has another size.
  StagedOptimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models, const StateFile& file);
  StagedOptimizer(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                  const checkpointing::StoredOptimizer& stored, std::string name);

  /// Options and counts; tensors that are there stay as they are until fill(). Those of a state in an optimizer's own
  /// layout are taken, too.
  /// @param in_place  false: fill() goes to new ones, since what is read may be of those that are there
  /// @return what gives all of it back  @throws CheckpointError, having changed nothing.
  std::function<void()> take(bool in_place = true);
  /// Reads into the optimizer's tensors. @throws CheckpointError, having filled some of them.
  void fill() const;

 private:
  struct Source {
    std::string what;
    checkpointing::StoredTensor stored;
    parallel::Held holding;
  };
  at::Tensor stand_in(Source source, at::IntArrayRef sizes);
  void note(const OwnShards& own, const c10::IValue& value, const std::string& where);

  AcceleratedOptimizer optimizer_;
  PreparedModels models_;
  c10::IValue state_;
  std::unordered_map<const at::TensorImpl*, Source> sources_;  ///< of the tensors in `state_`, which have no values
  Filling filling_;
};

}  // namespace accelerate::run_state
