#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <unordered_set>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/optim/scheduler.hpp"
#include "accelerate/optim/step_hooks.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "accelerator/file_monitors.hpp"
#include "accelerator/run_observation.hpp"
#include "accelerator/save_on_signal.hpp"
#include "parallel/engines.hpp"
#include "precision/chosen_fp8.hpp"
#include "profiler/run_profile.hpp"
#include "run_state/behind_training.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/run_state.hpp"
#include "trackers/tracker_set.hpp"

namespace accelerate {

/// The device type for which autocast is switched: the meta device has none, and leaves tensors as they are.
at::DeviceType computing_device(const at::Device& device);

/// The settings of torch.compile in the options, or else in the environment. @throws ConfigError if it is to compile,
/// which it can't here, or if dynamo_backend and dynamo_plugin are both given.
TorchDynamoPlugin without_compiler(const AcceleratorOptions& options);

/// The recipe of fp8 among them. @throws ConfigError for several
GivenFP8 given_fp8(const std::vector<KwargsHandler>& handlers);

/// The objects that all living Accelerators of the process have prepared, in the order in which these were made: one
/// may clip, step or prepare again what another one trains.
std::vector<run_state::RunState*> live_runs();
/// The engines of their models, each once.
parallel::Engines live_engines();
/// The one that trains a model by a DeepSpeed configuration, and the model there. @throws ConfigError where none does
struct TrainingRun {
  run_state::RunState* run;
  Accelerator* accelerator;
  std::shared_ptr<detail::PreparedModel> model;
};
TrainingRun deepspeed_run_of(const detail::PreparedModel& model, const char* operation);

/// A weight in few bits can't be trained: a user who trains all else, without an adapter, believes that it is.
/// @throws ConfigError naming the first such weight
void refuse_training_around_codes(const run_state::RunState& run);

/// With ACCELERATE_RECEIPTS the main process prints its receipts, once: when its training ends, or where that is never
/// called, with the Accelerator or the process.
void expect_receipts(const Accelerator& accelerator);
void give_receipts(const Accelerator& accelerator) noexcept;
void forget_receipts(const Accelerator& accelerator) noexcept;

/// Among live_runs() while it lives.
class LiveRun {
 public:
  explicit LiveRun(run_state::RunState& run);
  void belongs_to(Accelerator& accelerator);
  LiveRun(const LiveRun&) = delete;
  LiveRun& operator=(const LiveRun&) = delete;
  ~LiveRun();

 private:
  run_state::RunState& run_;
};

struct Accelerator::Impl {
  explicit Impl(AcceleratorOptions given);

  const AcceleratorOptions asked;  ///< as the program gave them
  AcceleratorOptions options;
  DistributedDataParallelKwargs ddp;
  GradScalerKwargs scaling;
  InitProcessGroupKwargs process_group;
  AutocastKwargs autocast;
  ProfileKwargs profiling;
  ChosenFP8 fp8;
  std::optional<ProfileProcess::Clock> clock;         ///< known where a profile was asked for from the start
  std::unique_ptr<profiler::RunProfile> run_profile;  ///< null: nobody asked
  std::unique_ptr<parallel::ChosenEngine> engine;
  bool counts_micro_steps() const { return !rules || rules->counts_micro_steps; }
  std::optional<parallel::RunRules> rules;  ///< of the engine's settings; unset: it leaves them to the program
  bool spoke_of_own_norm = false;
  /// For DeepSpeedEngineWrapper, as soon as somebody has one.
  struct WrappedEngine {
    bool group_ended = false;  ///< and its step has not come yet
    int64_t steps_before = 0;  ///< of the model's optimizers
  };
  std::map<std::weak_ptr<const detail::PreparedModel>, WrappedEngine, std::owner_less<>> wrapped;
  std::map<const torch::optim::Optimizer*, double> norms;  ///< of the latest steps of these models' optimizers
  bool autocasts() const { return !rules || rules->autocasts; }
  /// The optimizers that prepare() has made in the place of stand-ins.
  std::vector<std::pair<std::weak_ptr<char>, AcceleratedOptimizer>> made;
  std::optional<ParallelismConfig> parallelism;  ///< as it applies to this job
  std::optional<AcceleratorState> state;
  std::optional<GradientState> gradients;

  data::PrepareDataLoaderOptions loader_options;
  run_state::RunState run;  ///< all that was prepared
  LiveRun live{run};
  struct OneSaveHook {
    SaveStateHook call;
    bool wants_weights;
  };
  std::list<OneSaveHook> save_hooks;
  std::list<LoadStateHook> load_hooks;
  TrackerSet trackers;
  FileMonitors monitors;
  RunObservation observation{run, monitors, this};
  std::unique_ptr<SaveOnSignal> on_signal;  ///< null: signals do what they do

  /// The one rank that writes what all have, or with save_on_each_node one on each machine.
  bool writes_for_all() const {
    return state->is_main_process() || (options.project_config.save_on_each_node && state->is_local_main_process());
  }

  /// The numbers of models and optimizers at the last look whether they belong together.
  std::pair<size_t, size_t> checked = {0, 0};
  bool checked_loaders = false;  ///< whether an unprepared one was spoken of
  /// The tensors that all ranks were found to train together at the last look.
  std::unordered_set<const at::TensorImpl*> trained;
  bool gradients_are_scaled_for_nobody = false;  ///< in fp16: no prepared optimizer would unscale them
  int64_t nobody_unscales = 0;                   ///< synchronising backwards since then

  /// Calls the save hooks. @return what they want to be written instead of the models' weights, if any of them cares
  std::optional<ModelWeights> weights_by_hooks(const std::filesystem::path& folder, run_state::StateForm form);
  run_state::RunLoadOptions load_options() const;
  run_state::Lacks lacks() const;
  /// A checkpoint that is written while training goes on.
  std::unique_ptr<run_state::BehindTraining> behind;
  std::filesystem::path behind_folder;
  /// Removes older automatic checkpoints above the limit, where this rank writes.
  void prune_beside(const std::filesystem::path& newest) const;

  /// @param asked  whether all ranks know that there will be a profile. Collective then.
  void prepare_profile(bool asked);
  /// The fp8 state of a model, made before its engine takes the model over; null without fp8. The engine learns which
  /// tensors are to travel so.
  std::shared_ptr<FP8Training> make_fp8(const ModelRef& model);
  /// How this Accelerator's forwards of a model compute, whose engine is known.
  void set_autocast(detail::PreparedModel& core) const;
  ProfileProcess process() const;
  /// Tensors that this rank holds of prepared models, gradients of theirs, and states of prepared optimizers; undefined
  /// ones too. @param f  gets the kind, the tensor, and whether it is one of many in its storage
  void for_each_held(const std::function<void(ProfileStorage::Kind, const at::Tensor&, bool is_piece)>& f) const;
  std::vector<ProfileStorage> storages() const;
  /// This rank's place on an axis of parallelism_config.
  int64_t coordinate(const char* dim_name) const;
  void run_backward(const at::Tensor& loss, double weight, const BackwardOptions& how);
  void run_backward_now(const at::Tensor& scaled, const BackwardOptions& how);
  /// Whether models, optimizers and loaders of the run belong together. @throws ConfigError
  void check_belonging();
  /// The steps of this optimizer clip, as the engine's rules say.
  void clip_before_steps(const AcceleratedOptimizer& optimizer);
  /// The 2-norm of unscaled gradients.
  at::Tensor global_norm(const std::vector<at::Tensor>& parameters) const;
  /// Records the numbers of its steps that the settings ask for.
  void record_steps(const AcceleratedOptimizer& optimizer);
  /// With ProjectConfiguration::save_on_signal.
  void observe_signals(Accelerator& accelerator);
  /// Observes the run from now on, as the settings ask.
  void observe();

  bool trigger = false;
  int exceptions_at_start = 0;
  std::shared_ptr<void> alive = std::make_shared<char>();  ///< the last member: profiles may live longer
};

}  // namespace accelerate
