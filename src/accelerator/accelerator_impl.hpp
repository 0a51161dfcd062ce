#pragma once

#include <list>

#include "accelerate/accelerator.hpp"
#include "accelerate/trackers/tracker.hpp"

namespace accelerate {

/// Where autocast is switched: of the meta device there is none, and tensors there are left as they are.
at::DeviceType computing_device(const at::Device& device);

struct Accelerator::Impl {
  explicit Impl(AcceleratorOptions given);

  AcceleratorOptions options;
  DistributedDataParallelKwargs ddp;
  GradScalerKwargs scaling;
  InitProcessGroupKwargs process_group;
  AutocastKwargs autocast;
  std::optional<ParallelismConfig> parallelism;        ///< as it applies to this job
  std::optional<FullyShardedDataParallelPlugin> fsdp;  ///< resolved
  std::optional<AcceleratorState> state;
  std::optional<GradientState> gradients;
  std::shared_ptr<optim::GradScaler> scaler;

  std::vector<std::shared_ptr<detail::PreparedModel>> models;
  std::vector<AcceleratedOptimizer> optimizers;
  std::vector<AcceleratedScheduler> schedulers;
  std::vector<LoaderEntry> loaders;
  std::vector<checkpointing::CustomObject> customs;
  std::list<StateHook> save_hooks, load_hooks;
  std::vector<std::unique_ptr<GeneralTracker>> trackers;

  int64_t step = 0;      ///< micro-steps since the last forced synchronisation
  double num_items = 0;  ///< of the accumulation group, with GradientAverage::tokens
  bool trigger = false;
  int exceptions_at_start = 0;
};

}  // namespace accelerate
