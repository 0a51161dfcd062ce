#include "accelerator/receipts.hpp"

#include <ATen/DeviceAccelerator.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/residency.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "utils/environment.hpp"
#include "utils/json.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace receipts {
namespace {

/// Where the launcher has the variables' values from: {"FSDP_OFFLOAD_PARAMS": "flag --fsdp_offload_params"}. Without
/// it a variable is the user's own.
std::string source_of(const char* variable) {
  if (const auto sources = environment::text("ACCELERATE_RECEIPTS_SOURCES")) {
    const auto known = parse_json<nlohmann::json>(*sources);
    if (known.is_object() && known.contains(variable) && known[variable].is_string()) return known[variable];
  }
  return fmt::format("variable {}", variable);
}

Receipt make_one(const Row& row, const Facts& facts) {
  auto [by_call, value] = row.asked(facts);
  Receipt receipt{.setting = row.setting, .value = std::move(value), .source = "default", .expected = row.expected};
  const auto text = row.variable ? environment::text(row.variable) : std::nullopt;
  if (by_call) receipt.source = "call";
  if (text && (!by_call || row.variable_wins))
    if (auto source = source_of(row.variable); source != "default") receipt.source = std::move(source);
  if (text && receipt.source != "call") receipt.value = *text;
  auto [state, effect] = row.did(facts);
  receipt.state = state;
  receipt.effect = std::move(effect);
  return receipt;
}

}  // namespace

Receipts make(const Facts& facts) {
  Receipts receipts;
  for (const auto& rows : {rows_of_loading(), rows_of_training(), rows_of_sharding(), rows_of_fp8()})
    for (const auto& row : rows) receipts.entries.push_back(make_one(row, facts));
  return receipts;
}

namespace {

/// Those that the program gave.
void take_recipes(Facts& facts, const std::vector<KwargsHandler>& handlers) {
  for (const auto& handler : handlers) {
    if (const auto* ao = std::get_if<AORecipeKwargs>(&handler)) facts.ao = *ao;
    if (const auto* te = std::get_if<TERecipeKwargs>(&handler)) facts.te = *te;
    if (const auto* msamp = std::get_if<MSAMPRecipeKwargs>(&handler)) facts.msamp = *msamp;
    if (const auto* all = std::get_if<FP8RecipeKwargs>(&handler)) {
      facts.msamp.opt_level = all->opt_level;
      facts.te = {.use_autocast_during_eval = all->use_autocast_during_eval,
                  .margin = all->margin,
                  .interval = all->interval,
                  .fp8_format = all->fp8_format,
                  .amax_history_len = all->amax_history_len,
                  .amax_compute_algo = all->amax_compute_algo,
                  .override_linear_precision = all->override_linear_precision,
                  .use_mxfp8_block_scaling = all->use_mxfp8_block_scaling};
    }
  }
}

}  // namespace
}  // namespace receipts

Receipts Accelerator::receipts() const {
  const Impl& self = *impl_;
  receipts::Facts facts;
  facts.given = self.asked;
  facts.ddp = self.ddp;
  if (self.fp8.backend == FP8BackendType::MSAMP) facts.ddp.communication_hook = nullptr;  // the recipe's, not asked for
  facts.scaling = self.scaling;
  facts.process_group = self.process_group;
  facts.autocast = self.autocast;
  facts.accumulation = self.asked.gradient_accumulation_plugin.value_or(GradientAccumulationPlugin{});
  facts.fsdp = self.asked.fsdp_plugin.value_or(FullyShardedDataParallelPlugin{});
  facts.precision_policy = facts.fsdp.mixed_precision_policy.value_or(MixedPrecision{});
  facts.cpu_offload = facts.fsdp.cpu_offload.value_or(CPUOffload());
  facts.state_dict_config = facts.fsdp.state_dict_config.value_or(StateDictConfig{});
  facts.optim_state_dict_config = facts.fsdp.optim_state_dict_config.value_or(StateDictConfig{});
  facts.parallelism = self.asked.parallelism_config.value_or(ParallelismConfig{});
  receipts::take_recipes(facts, self.asked.kwargs_handlers);
  facts.fp8 = self.fp8;
  for (const auto& model : self.run.models) {
    if (!model->fp8) continue;
    const auto counts = model->fp8->counts();
    facts.fp8_counts.fp8_products += counts.fp8_products;
    facts.fp8_counts.high_products += counts.high_products;
    facts.fp8_counts.updates += counts.updates;
    facts.fp8_weights += static_cast<int64_t>(model->fp8->weights().size());
  }
  facts.loading = self.options.dataloader_config;
  facts.accumulating = {.num_steps = self.gradients->num_steps(),
                        .adjust_scheduler = self.gradients->adjust_scheduler(),
                        .sync_with_dataloader = self.gradients->sync_with_dataloader(),
                        .sync_each_batch = self.gradients->sync_each_batch(),
                        .average = self.gradients->average()};
  facts.project = self.options.project_config;
  facts.compiling = *self.options.dynamo_plugin;
  if (const auto* plugin = self.engine->sharding()) facts.sharding = *plugin;
  facts.layout = self.parallelism;
  facts.ranks = num_processes();
  facts.machines = environment::integer({"GROUP_WORLD_SIZE"}).value_or(1);
  facts.models = static_cast<int64_t>(self.run.models.size());
  facts.optimizers = static_cast<int64_t>(self.run.optimizers.size());
  facts.schedulers = static_cast<int64_t>(self.run.schedulers.size());
  facts.device = device();
  if (at::accelerator::deviceCount() > 0) facts.accelerator = at::getAccelerator();
  facts.precision = state().mixed_precision();
  if (self.run.scaler && self.run.scaler->is_enabled()) facts.loss_scale = self.run.scaler->get_scale();
  facts.backend = state().backend();
  facts.debug = state().debug();
  facts.main_process = is_main_process();
  const auto moved = residency::stats();
  facts.fetches = moved.faults + moved.prefetch_hits;
  facts.fetches_ahead = moved.prefetch_hits;
  facts.evictions = moved.evictions;
  auto all = receipts::make(facts);
  for (auto& receipt : self.engine->receipts()) all.entries.push_back(std::move(receipt));
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

void Accelerator::expect_receipts() const {
  if (!receipts_wanted() || !is_main_process()) return;
  static const bool at_exit = [] {
    unfinished();  // is there before, and so until after, what atexit() calls
    return std::atexit([] {
             if (!unfinished().empty()) unfinished().back()->give_receipts();
           }) == 0;
  }();
  static_cast<void>(at_exit);
  unfinished().push_back(this);
}

void Accelerator::give_receipts() const noexcept {
  if (std::erase(unfinished(), this) == 0) return;
  try {
    const Receipts made = receipts();
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

void Accelerator::forget_receipts() const noexcept { std::erase(unfinished(), this); }

}  // namespace accelerate
