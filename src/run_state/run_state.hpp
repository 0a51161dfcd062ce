#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/checkpoint.hpp"
#include "accelerate/data/prepared.hpp"
#include "accelerate/optim/accelerated_scheduler.hpp"
#include "accelerate/optim/grad_scaler.hpp"
#include "accelerate/optim/optimizer.hpp"
#include "accelerate/run_state/prepared_model.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "checkpoint/python_generators.hpp"
#include "run_state/state_files.hpp"

/// Prepared objects, and how they are saved and loaded.
namespace accelerate::run_state {

/// Something that each rank knows for itself, see own_states.hpp.
struct OwnState {
  std::string name;
  std::function<c10::IValue()> save;  ///< None: nothing
  /// Looks whether it fits, and returns what takes it up. @throws CheckpointError.
  std::function<std::function<void()>(const c10::IValue&)> stage;
};

/// All that one Accelerator has prepared, in the order of preparation, which is that of the files of a checkpoint.
struct RunState {
  std::vector<std::shared_ptr<detail::PreparedModel>> models = {};
  std::vector<AcceleratedOptimizer> optimizers = {};
  std::vector<AcceleratedScheduler> schedulers = {};
  std::set<size_t> engine_schedulers = {};  ///< those of them that the engine's settings have made
  std::vector<std::shared_ptr<data::PreparedStatus>> loaders = {};
  std::shared_ptr<optim::GradScaler> scaler = nullptr;
  std::vector<checkpointing::CustomObject> customs = {};
  std::list<OwnState> own_states = {};  ///< besides those of models' engines
  /// Of a run of Python that this one goes on from, so that Python can go on from it.
  std::optional<checkpointing::PythonGenerators> python_generators = {};
  int64_t step = 0;          ///< micro-steps since the last forced synchronisation
  int64_t steps_before = 0;  ///< of the optimizers, in the run that this one goes on from
  double num_items = 0;      ///< of the accumulation group, with GradientAverage::tokens
  /// The checkpoint whose loading failed in the middle, so that weights and states of optimizers are undefined; empty:
  /// none has.
  std::filesystem::path undefined = {};

  /// The engines of the models that have one.
  parallel::Engines engines() const;
  /// The prepared model with this module; null if there is none.
  std::shared_ptr<detail::PreparedModel> find(const ModelRef& model) const;
  /// Forgets all that prepare() made, but for the scaler and the users' own objects.
  void clear();
};

/// Gives optimizers the shards of parameters that models have by now, with the states that belong to them, in whatever
/// order both were prepared; their steps then tell the engine. Not collective.
/// @throws ConfigError for an optimizer of an unknown class that holds states of these parameters.
void give_pieces_to_optimizers(const RunState& run);

struct SaveOptions {
  StateForm form = StateForm::safetensors;  ///< of models and optimizers
  /// Written in the place of the models, all of which are whole on all ranks then; null: the models.
  const std::vector<std::map<std::string, at::Tensor>>* weights = nullptr;
  Writers writers = {};
  bool first_on_its_disk = false;  ///< of UnfinishedCheckpoint
  bool loaders = false;            ///< save where they stand
  int64_t num_steps = 1;           ///< of an accumulation group
  GradientAverage average = GradientAverage::steps;
  at::Device device = at::kCPU;
};
/// Writes everything into a fresh folder that exists on all machines. Collective. @throws CheckpointError,
/// ResourceError, on all ranks.
void save(const RunState& run, const std::filesystem::path& folder, const SaveOptions& options);

struct RunLoadOptions {
  std::vector<ModelRef> models = {};             ///< to be loaded, in the order of their files
  StateForm preferred = StateForm::safetensors;  ///< if a model or an optimizer is there in several
  bool loaders = false;
  bool strict = true;     ///< models must have all weights of their files, and the other way round
  int64_t num_steps = 1;  ///< of an accumulation group
  GradientAverage average = GradientAverage::steps;
  at::Device device = at::kCPU;
};
/// Runs `fill`, which reads a checkpoint into tensors that are there. Until it has succeeded the run is undefined.
/// @param operation  for messages: "load_state"  @throws CheckpointError that says what has become of the run
void load_in_place(RunState& run, std::string_view operation, const std::filesystem::path& folder,
                   const std::function<void()>& fill);
/// @throws CheckpointError for a run that is
void refuse_undefined(const RunState& run, std::string_view operation);

/// Files that load() could not do without and that are not there. Not collective.
std::vector<std::string> lacks(const RunState& run, const std::filesystem::path& folder, const RunLoadOptions& options);

/// Reads everything back into the same objects; weights and states of optimizers into the tensors that are there.
/// Collective.
/// @throws CheckpointError on all ranks, and leaves all as it was, if a file is missing or does not fit on any of them.
/// Bytes that are damaged or can't be read show when tensors are being filled: then these are undefined, and save()
/// refuses until a load has succeeded.
void load(RunState& run, const std::filesystem::path& folder, const RunLoadOptions& options);

}  // namespace accelerate::run_state
