#include "accelerator/receipts.hpp"

#include <ATen/DeviceAccelerator.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "data/receipts.hpp"
#include "optim/receipts.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/averaging/receipts.hpp"
#include "parallel/fsdp/receipts.hpp"
#include "parallel/sharding/counts.hpp"
#include "precision/receipts.hpp"
#include "run_state/counts.hpp"
#include "state/receipts.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"

namespace accelerate {

Receipts Accelerator::receipts() const {
  const Impl& self = *impl_;
  const auto& options = self.asked;
  const auto precision = state().mixed_precision();
  const auto* sharding = self.engine->sharding();
  const bool sharded = sharding != nullptr;
  Receipts all;
  const auto add = [&](std::vector<Receipt> table) {
    for (auto& receipt : table) all.entries.push_back(std::move(receipt));
  };
  const receipts::RunFacts run{
      .ranks = num_processes(), .models = static_cast<int64_t>(self.run.models.size()), .device = device()};
  FP8Training::Counts fp8;
  int64_t fp8_weights = 0;
  for (const auto& model : self.run.models) {
    if (!model->fp8) continue;
    const auto counts = model->fp8->counts();
    fp8.fp8_products += counts.fp8_products;
    fp8.high_products += counts.high_products;
    fp8.updates += counts.updates;
    fp8_weights += static_cast<int64_t>(model->fp8->weights().size());
  }
  auto ddp = self.ddp;
  if (self.fp8.backend == FP8BackendType::MSAMP) ddp.communication_hook = nullptr;  // the recipe's, not asked for

  const receipts::OwnFacts own{
      .run = run,
      .given = options,
      .accumulation = options.gradient_accumulation_plugin.value_or(GradientAccumulationPlugin{}),
      .accumulating = {.num_steps = self.gradients->num_steps(),
                       .adjust_scheduler = self.gradients->adjust_scheduler(),
                       .sync_with_dataloader = self.gradients->sync_with_dataloader(),
                       .sync_each_batch = self.gradients->sync_each_batch(),
                       .average = self.gradients->average()},
      .counts_micro_steps = self.counts_micro_steps(),
      .project = self.options.project_config,
      .precision = precision,
      .autocast = self.autocast.enabled,
      .compiling = *self.options.dynamo_plugin,
      .layout = self.parallelism,
      .accelerator = at::accelerator::deviceCount() > 0 ? at::getAccelerator() : std::nullopt,
      .machines = environment::integer({"GROUP_WORLD_SIZE"}).value_or(1),
      .schedulers = static_cast<int64_t>(self.run.schedulers.size()),
      .fp8_products = fp8.fp8_products,
      .main_process = is_main_process(),
      .sharded = sharded,
      .debug = state().debug()};

  using run_state::CheckpointCount;
  add(receipts::of_loading({.run = run,
                            .given = {.config = options.dataloader_config,
                                      .put_on_device = options.device_placement,
                                      .rng_types = options.rng_types},
                            .split_batches = options.split_batches,
                            .loading = self.options.dataloader_config,
                            .checkpoints = counts::read(CheckpointCount::checkpoints),
                            .loader_positions = counts::read(CheckpointCount::loader_positions)}));
  add(receipts::of_accumulation(own));
  add(receipts::of_projects(own));
  add(receipts::of_averaging({.run = run, .given = ddp, .sharded = sharded}));
  add(receipts::of_precision(own));
  add(receipts::of_autocast({.run = run, .given = self.autocast, .precision = precision, .sharded = sharded}));
  add(receipts::of_scaling({.run = run,
                            .given = self.scaling,
                            .precision = precision,
                            .loss_scale = self.run.scaler && self.run.scaler->is_enabled()
                                              ? std::optional(self.run.scaler->get_scale())
                                              : std::nullopt}));
  add(receipts::of_process_group({.run = run, .given = self.process_group, .backend = state().backend()}));
  add(receipts::of_schedules({.run = run,
                              .step_scheduler_with_optimizer = options.step_scheduler_with_optimizer,
                              .schedulers = own.schedulers}));
  add(receipts::of_launch(own));
  add(receipts::of_sharding({.run = run,
                             .given = options.fsdp_plugin.value_or(FullyShardedDataParallelPlugin{}),
                             .parallelism = options.parallelism_config.value_or(ParallelismConfig{}),
                             .sharding = sharding ? std::optional(*sharding) : std::nullopt,
                             .checkpoints = counts::read(CheckpointCount::checkpoints),
                             .whole_states = counts::read(CheckpointCount::whole_states),
                             .whole_optimizer_states = counts::read(CheckpointCount::whole_optimizer_states)}));
  add(receipts::of_fp8({.run = run,
                        .given = settings_of(given_fp8(options.kwargs_handlers)),
                        .chosen = self.fp8,
                        .precision = precision,
                        .counts = fp8,
                        .weights = fp8_weights,
                        .fsdp_version = sharding ? sharding->fsdp_version : std::nullopt,
                        .parts_as_fp8 = counts::read(parallel::ShardingCount::parts_as_fp8),
                        .bytes_saved = counts::read(parallel::AveragingCount::bytes_saved)}));
  add(self.engine->receipts());
  return all;
}

namespace {

/// ACCELERATE_RECEIPTS is true, or "strict", which is for the launcher.
bool receipts_wanted() {
  const auto text = environment::text("ACCELERATE_RECEIPTS");
  return text && (*text == "strict" || environment::flag("ACCELERATE_RECEIPTS").value_or(false));
}

/// Accelerators whose receipts have not been given; those of a program that calls exit() have no other end.
std::vector<const Accelerator*>& unfinished() {
  static std::vector<const Accelerator*> accelerators;
  return accelerators;
}

}  // namespace

void expect_receipts(const Accelerator& accelerator) {
  if (!receipts_wanted() || !accelerator.is_main_process()) return;
  static const bool at_exit = [] {
    unfinished();  // is there before, and so until after, what atexit() calls
    return std::atexit([] {
             if (!unfinished().empty()) give_receipts(*unfinished().back());
           }) == 0;
  }();
  static_cast<void>(at_exit);
  unfinished().push_back(&accelerator);
}

void give_receipts(const Accelerator& accelerator) noexcept {
  if (std::erase(unfinished(), &accelerator) == 0) return;
  try {
    const Receipts made = accelerator.receipts();
    if (const auto file = environment::text("ACCELERATE_RECEIPTS_FILE")) {
      std::ofstream(*file) << made.json();  // the launcher prints them when all ranks have ended
    } else {
      std::fputs(made.text().c_str(), stdout);
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    logs::warn("accelerate.accelerator", "receipts: {}", error.what());
  }
}

void forget_receipts(const Accelerator& accelerator) noexcept { std::erase(unfinished(), &accelerator); }

}  // namespace accelerate
