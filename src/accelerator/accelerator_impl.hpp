#pragma once

#include <list>

#include "accelerate/accelerator.hpp"
#include "parallel/engines.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/run_state.hpp"
#include "trackers/tracker_set.hpp"

namespace accelerate {

/// Where autocast is switched: of the meta device there is none, and tensors there are left as they are.
at::DeviceType computing_device(const at::Device& device);

struct Accelerator::Impl {
  explicit Impl(AcceleratorOptions given);

  const AcceleratorOptions asked;  ///< as the program gave them
  AcceleratorOptions options;
  DistributedDataParallelKwargs ddp;
  GradScalerKwargs scaling;
  InitProcessGroupKwargs process_group;
  AutocastKwargs autocast;
  ProfileKwargs profiling;
  std::unique_ptr<parallel::ChosenEngine> engine;
  std::optional<ParallelismConfig> parallelism;  ///< as it applies to this job
  std::optional<AcceleratorState> state;
  std::optional<GradientState> gradients;

  data::PrepareDataLoaderOptions loader_options;
  run_state::RunState run;  ///< all that was prepared
  struct OneSaveHook {
    SaveStateHook call;
    bool wants_weights;
  };
  std::list<OneSaveHook> save_hooks;
  std::list<LoadStateHook> load_hooks;
  TrackerSet trackers;

  /// The one rank that writes what all have, or with save_on_each_node one on each machine.
  bool writes_for_all() const {
    return state->is_main_process() || (options.project_config.save_on_each_node && state->is_local_main_process());
  }

  /// How many models and optimizers were there when it was last looked whether they belong together.
  std::pair<size_t, size_t> checked = {0, 0};
  bool checked_loaders = false;  ///< whether an unprepared one was spoken of

  /// Calls the save hooks. @return what they want to be written instead of the models' weights, if any of them cares
  std::optional<ModelWeights> weights_by_hooks(const std::filesystem::path& folder, run_state::StateForm form);
  run_state::LoadOptions load_options() const;
  run_state::Lacks lacks() const;

  bool trigger = false;
  int exceptions_at_start = 0;
};

}  // namespace accelerate
