#pragma once

/// Distributed checkpoints of your own dict: nested dicts and lists of tensors, of tensors that lie in shards on all
/// ranks, and of plain data. Each rank writes and reads what it holds; no rank holds the whole. A folder that was saved
/// by some ranks is read by any other number, and by torch.distributed.checkpoint; and the other way around.
///
///     namespace dcp = accelerate::distributed_checkpoint;
///     auto [model_state, optimizer_state] = dcp::get_state_dict(m, opt);
///     dcp::StateDict state{{"model", model_state}, {"optimizer", optimizer_state}, {"step", step}};
///     dcp::save(state, "checkpoint");
///     dcp::load(state, "checkpoint");  // on a model and an optimizer of the same kind
///     dcp::set_state_dict(m, opt, state.at("model").as<dcp::StateDict>(), state.at("optimizer").as<dcp::StateDict>());
///     step = state.at("step").to<int64_t>();
///
/// All functions are collective and blocking: all ranks call them, in the same order; what goes wrong on one is thrown
/// on all. Names and meaning are those of torch.distributed.checkpoint and its state_dict (torch 2.13); the format is
/// docs/formats/dcp.md. Reference: the FSDP chapter's checkpoints.

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_like.hpp"
#include "accelerate/optim/optimizer.hpp"
#include "accelerate/run_state/prepared_model.hpp"
#include "accelerate/run_state/state_dict.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::distributed_checkpoint {

// ---- files

/// Writes the dict. Sharded tensors are saved by those who hold their parts, everything else by the first rank that has
/// it: values that ranks have in common must be the same on them, and a rank may have values of its own. Names in the
/// file are the keys and indices that lead to a value, joined by dots; empty dicts leave nothing behind.
/// @param folder  (checkpoint_id) appears whole or not at all, by one rename when all is on the disk. In one that holds
/// files already, an older checkpoint stays until the new one is complete, and other files stay. On several machines it
/// is on a disk that all of them see.
/// @throws ConfigError for values that no file can hold and for two values of one name; CheckpointError naming the
/// value of which ranks have tensors of different sizes or dtypes, and for parts that overlap or leave gaps;
/// ResourceError.
ACCELERATE_API void save(const StateDict& state, const std::filesystem::path& folder);

struct LoadOptions {
  bool allow_partial_load = false;  ///< values that the checkpoint does not have stay as they are
};

/// Reads into the dict: tensors in place, converted to their dtype and device, each rank its parts; everything else is
/// replaced by the file's. All else in the file is left there. Parameters of a model that came from
/// get_model_state_dict() without cpu_offload have the new values then, on all ranks.
/// @throws CheckpointError, with every value that is missing or has another size or kind (name, found, expected), also
/// for damaged files: then nothing has changed. If the disk fails while elements are read, some have.
ACCELERATE_API void load(StateDict& state, const std::filesystem::path& folder, const LoadOptions& options = {});

// ---- models and optimizers

/// The form of state dicts of models and optimizers.
struct StateDictOptions {
  /// Whole tensors, on all ranks. Off: what each rank holds.
  bool full_state_dict = false;
  /// Tensors on the host: what does not lie there is copied. With full_state_dict rank 0 gets the state, and the others
  /// an empty dict.
  bool cpu_offload = false;
  /// Parameters that are not trained are left out; setting a state does not ask for them.
  bool ignore_frozen_params = false;
  /// Setting: names that are missing, or that the model does not have, and trained parameters without state in the
  /// optimizer's are errors. Off: they are let be.
  bool strict = true;
  /// Setting: the dict that counts is rank 0's, of whole tensors; the others' are not looked at. Tensors are sent one
  /// by one. Only with full_state_dict.
  bool broadcast_from_rank0 = false;
  /// Optimizers: one dict without nesting, {"state.<parameter>.exp_avg": …, "param_groups.<parameter>.lr": …}. Setting
  /// knows both forms.
  bool flatten_optimizer_state_dict = false;
};

/// Names that strict = false has let be.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys, unexpected_keys;
};

/// A model that prepare() has returned, or any other model, which is taken to be whole on every rank.
class ACCELERATE_API AnyModel {
 public:
  template <class Model>
  requires ModelLike<Model> || WrappedModel<Model> AnyModel(const Model& model) {
    if constexpr (requires { model.core(); }) core_ = model.core();
    else core_ = whole(model);
  }
  const std::shared_ptr<detail::PreparedModel>& core() const { return core_; }

 private:
  static std::shared_ptr<detail::PreparedModel> whole(const ModelRef& model);
  std::shared_ptr<detail::PreparedModel> core_;
};

/// One optimizer of a model, or several.
class Optimizers {
 public:
  Optimizers(const AcceleratedOptimizer& optimizer) : all_{optimizer} {}
  Optimizers(std::vector<AcceleratedOptimizer> optimizers) : all_(std::move(optimizers)) {}
  const std::vector<AcceleratedOptimizer>& all() const { return all_; }

 private:
  std::vector<AcceleratedOptimizer> all_;
};

/// Parameters and buffers by their names in the module, tied weights under each of theirs. Tensors are the model's own,
/// not copies, where nothing is gathered or offloaded.
/// @throws ConfigError for a sharded model's module instead of what prepare() returned.
ACCELERATE_API StateDict get_model_state_dict(const AnyModel& model, const StateDictOptions& options = {});
/// {"state": {parameter: {kind: tensor}}, "param_groups": [{option: value, …, "params": [parameters]}]} by the names of
/// the parameters. Trained parameters for which the optimizer holds nothing yet appear with what it begins with, so
/// that there is something to load into; the optimizer itself is not changed.
/// @throws ConfigError for optimizers of parameters that are not the model's, and of other classes than SGD, Adam,
/// AdamW, Adagrad and RMSprop.
ACCELERATE_API StateDict get_optimizer_state_dict(const AnyModel& model, const Optimizers& optimizers,
                                                  const StateDictOptions& options = {});
/// Both: {model's, optimizers'}.
ACCELERATE_API std::pair<StateDict, StateDict> get_state_dict(const AnyModel& model, const Optimizers& optimizers,
                                                              const StateDictOptions& options = {});

/// Takes over such dicts, whole or this rank's parts, wherever they come from. Optimizers copy. Between an optimizer's
/// step and the next backward.
/// @throws CheckpointError listing what is missing, unexpected or has another size, ConfigError; nothing has changed
/// then, in the model nor in the optimizers.
ACCELERATE_API IncompatibleKeys set_model_state_dict(const AnyModel& model, const StateDict& model_state_dict,
                                                     const StateDictOptions& options = {});
ACCELERATE_API void set_optimizer_state_dict(const AnyModel& model, const Optimizers& optimizers,
                                             const StateDict& optim_state_dict, const StateDictOptions& options = {});
ACCELERATE_API IncompatibleKeys set_state_dict(const AnyModel& model, const Optimizers& optimizers,
                                               const StateDict& model_state_dict, const StateDict& optim_state_dict,
                                               const StateDictOptions& options = {});

}  // namespace accelerate::distributed_checkpoint
