/// Receipts of what the facade itself decides: accumulation, precision, projects.
//
// settings: AcceleratorOptions by field
// settings: GradientAccumulationPlugin as gradient_accumulation_plugin.
// settings: ProjectConfiguration as project_config.
// settings: SaveStateOptions as save_state.
// without: save_state.safe_serialization: files show it
// without: dataloader_config: its fields have entries
// without: project_config: its fields have entries
// without: gradient_accumulation_plugin: its fields have entries
// without: fsdp_plugin: its fields have entries
// without: kwargs_handlers: its fields have entries
// without: parallelism_config: its fields have entries
// without: layer_plugins: each has entries of its own, in its layer's folder
// without: dynamo_backend: anything but its default is refused
// without: dynamo_plugin: what compiles is refused; entries launch.dynamo_*
// without: deepspeed_plugin: each key of the configuration has an entry, by the layer
// without: deepspeed_plugins: likewise
// without: megatron_lm_plugin: anything but its default is refused

#include "accelerator/receipts.hpp"

#include "accelerator/counts.hpp"
#include "optim/counts.hpp"
#include "parallel/sharding/counts.hpp"
#include "precision/counts.hpp"
#include "run_state/counts.hpp"
#include "snapshot/counts.hpp"
#include "trackers/tracker_set.hpp"
#include "utils/run_counts.hpp"

namespace accelerate {

static std::string text_of(const TrackerChoice& value) { return value.name(); }
static std::string text_of(GradientAverage value) { return value == GradientAverage::steps ? "steps" : "tokens"; }

namespace receipts {
namespace {

using optim::OptimCount;
using parallel::ShardingCount;
using run_state::CheckpointCount;
using snapshot::SnapshotCount;
using Accumulation = GradientAccumulationPlugin;
using Project = ProjectConfiguration;

// ---- accumulation

constexpr const char* kAccumulate = "where the loop calls accumulate()";

Deed num_steps(const OwnFacts& f) {
  const int64_t steps = f.accumulating.num_steps, micro = read(TrainingCount::micro_steps);
  if (!f.counts_micro_steps) {
    if (read(RunCount::backwards) == 0) return not_due("nothing was trained");
    const int64_t taken = read(OptimCount::optimizer_steps) + read(OptimCount::steps_skipped);
    const auto text = fmt::format("losses of {} were divided by {}; the program decided when to step, {}",
                                  counted(read(RunCount::backwards), "backward", "backwards"), steps,
                                  counted(taken, "time", "times"));
    return steps == 1 ? off("{}", text) : acted("{}", text);
  }
  if (steps == 1) return off("off: each step is an optimizer's");
  if (read(RunCount::backwards) == 0) return not_due("nothing was trained");
  if (micro == 0)
    return nothing("accumulate() was never called, so each of {} was an optimizer's, with a loss divided by {}",
                   counted(read(RunCount::backwards), "step", "steps"), steps);
  return acted("{} in groups of {}: gradients were synchronised in {} of them",
               counted(micro, "micro-step", "micro-steps"), steps, read(TrainingCount::synchronised_steps));
}

std::optional<Deed> no_accumulation(const OwnFacts& f) {
  if (!f.counts_micro_steps)
    return nothing("the program decides when to step (managed_gradient_accumulation is false): there are no groups");
  if (f.accumulating.num_steps == 1) return nothing("there is no accumulation: num_steps is 1");
  if (read(TrainingCount::micro_steps) == 0)
    return read(RunCount::backwards) ? nothing("accumulate() was never called") : not_due("nothing was trained");
  return std::nullopt;
}

Deed adjust_scheduler(const OwnFacts& f) {
  if (const auto none = no_accumulation(f)) return *none;
  if (f.schedulers == 0) return nothing("no schedule was prepared");
  if (read(OptimCount::schedule_counts) > 0)
    return acted("schedules counted {} without a step",
                 counted(read(OptimCount::schedule_counts), "micro-step", "micro-steps"));
  if (f.accumulating.adjust_scheduler) return not_due("no schedule was asked in the middle of a group");
  return acted(
      "schedules did not count the {} in the middle of groups",
      counted(read(TrainingCount::micro_steps) - read(TrainingCount::synchronised_steps), "micro-step", "micro-steps"));
}

Deed sync_with_dataloader(const OwnFacts& f) {
  if (const auto none = no_accumulation(f)) return *none;
  if (read(TrainingCount::loader_end_synchronisations) > 0)
    return acted("{} ended in the middle of a group and synchronised",
                 counted(read(TrainingCount::loader_end_synchronisations), "pass", "passes"));
  if (read(TrainingCount::loader_ends_passed) > 0)
    return acted("{} ended in the middle of a group, which went on in the next one",
                 counted(read(TrainingCount::loader_ends_passed), "pass", "passes"));
  return not_due("no pass of a prepared loader ended in the middle of a group");
}

Deed sync_each_batch(const OwnFacts& f) {
  if (!f.accumulating.sync_each_batch) return off("off");
  if (f.run.ranks == 1) return nothing("one process has nobody to synchronise with");
  if (const auto none = no_accumulation(f)) return *none;
  if (read(TrainingCount::early_synchronisations) == 0) return not_due("no micro-step was in the middle of a group");
  return acted("gradients were averaged in {} in the middle of groups",
               counted(read(TrainingCount::early_synchronisations), "micro-step", "micro-steps"));
}

Deed average(const OwnFacts& f) {
  if (f.accumulating.average == GradientAverage::steps) return off("by steps and processes");
  if (read(RunCount::backwards) == 0) return not_due("nothing was trained");
  return acted("gradients of {} weigh the same in {}", counted(read(RunCount::items), "item", "items"),
               counted(read(RunCount::backwards), "backward", "backwards"));
}

// ---- projects

template <auto Field> Asked project(const OwnFacts& f) {
  return asked<&OwnFacts::given, &AcceleratorOptions::project_config, Field>(f);
}

Deed project_dir(const OwnFacts& f) {
  if (f.project.project_dir.empty()) return off("unset");
  const int64_t used = read(CheckpointCount::automatic_checkpoints) + read(TrackerCount::trackers);
  if (used > 0)
    return acted("{} and {} went there",
                 counted(read(CheckpointCount::automatic_checkpoints), "checkpoint", "checkpoints"),
                 counted(read(TrackerCount::trackers), "tracker", "trackers"));
  if (f.given.log_with.empty() && !f.project.automatic_checkpoint_naming)
    return nothing("there are neither trackers nor automatic_checkpoint_naming, the two that write there");
  return not_due("nothing was saved or tracked");
}

Deed logging_dir(const OwnFacts& f) {
  if (f.given.log_with.empty()) return nothing("there is no tracker (log_with)");
  if (!f.main_process && read(TrackerCount::trackers) == 0) return not_due("trackers are the main process's");
  if (read(TrackerCount::trackers) == 0) return not_due("init_trackers() was not called");
  return acted("{} wrote to {}", counted(read(TrackerCount::trackers), "tracker", "trackers"),
               f.project.logging_dir.string());
}

Deed log_with(const OwnFacts& f) {
  if (f.given.log_with.empty()) return off("unset");
  if (!f.main_process && read(TrackerCount::trackers) == 0) return not_due("trackers are the main process's");
  if (read(TrackerCount::trackers) == 0) return nothing("init_trackers() was not called");
  return acted("{} opened", counted(read(TrackerCount::trackers), "tracker", "trackers"));
}

Deed automatic_checkpoint_naming(const OwnFacts& f) {
  if (!f.project.automatic_checkpoint_naming) return off("off");
  if (read(CheckpointCount::automatic_checkpoints) == 0) return not_due("nothing was saved");
  return acted("{} named themselves, up to checkpoint_{}",
               counted(read(CheckpointCount::automatic_checkpoints), "checkpoint", "checkpoints"),
               f.project.iteration - 1);
}

Deed of_automatic_naming(const OwnFacts& f, const char* what) {
  if (!f.project.automatic_checkpoint_naming) return nothing("automatic_checkpoint_naming is off, and {}", what);
  return not_due("nothing was saved");
}

Deed total_limit(const OwnFacts& f) {
  if (!f.project.total_limit) return off("unset");
  if (read(CheckpointCount::automatic_checkpoints) == 0)
    return of_automatic_naming(f, "only checkpoints that it names are removed");
  if (read(CheckpointCount::checkpoints_pruned) == 0)
    return not_due("there were never more than {}", *f.project.total_limit);
  return acted("{} removed",
               counted(read(CheckpointCount::checkpoints_pruned), "older checkpoint was", "older checkpoints were"));
}

Deed iteration(const OwnFacts& f) {
  if (read(CheckpointCount::automatic_checkpoints) == 0)
    return of_automatic_naming(f, "only names that it gives are counted");
  return acted("the latest checkpoint is number {}", f.project.iteration - 1);
}

Deed save_on_each_node(const OwnFacts& f) {
  if (!f.project.save_on_each_node) return off("off");
  if (read(CheckpointCount::checkpoints) == 0) return not_due("nothing was saved");
  if (read(CheckpointCount::copies_on_nodes) > 0)
    return acted("{} written here besides rank 0's",
                 counted(read(CheckpointCount::copies_on_nodes), "checkpoint was", "checkpoints were"));
  return off("rank 0 writes in any case; what the first ranks of other machines wrote is in their receipts");
}

Deed verify_checkpoints(const OwnFacts&) {
  if (read(CheckpointCount::checkpoints_loaded) == 0) return not_due("nothing was loaded");
  if (const auto n = read(CheckpointCount::checkpoints_unchecked); n > 0)
    return acted("{} loaded without a look at checksums", counted(n, "checkpoint was", "checkpoints were"));
  if (const auto n = read(CheckpointCount::records_checked); n > 0 && read(CheckpointCount::parts_checked) == 0)
    return acted("{} found to be what was written", counted(n, "record of an archive was", "records of archives were"));
  if (read(CheckpointCount::parts_checked) == 0)
    return nothing("what was loaded has no checkpoint.json, and no archive of torch.save");
  return acted("{} found to be what was written",
               counted(read(CheckpointCount::parts_checked), "part of a file was", "parts of files were"));
}

Deed save_on_signal(const OwnFacts& f) {
  if (!f.project.save_on_signal) return off("off");
  if (const auto n = read(CheckpointCount::checkpoints_on_signals); n > 0)
    return acted("{} saved because of a signal", counted(n, "checkpoint was", "checkpoints were"));
  return not_due("no signal came");
}

Asked asked_behind_training(const OwnFacts&) {
  const bool asked = read(SnapshotCount::marks) > 0;
  return {asked, text_of(asked)};
}
Deed behind_training(const OwnFacts&) {
  const int64_t marks = read(SnapshotCount::marks);
  const auto milliseconds = [](SnapshotCount what) { return static_cast<double>(read(what)) / 1e6; };
  if (marks == 0) return off("off: save_state() returns when all is on the disk");
  const int64_t failures = read(SnapshotCount::failures);
  return acted(
      "{}, {:.1f} ms in all, after which training went on; {} copied at them, {} read later, of which {} were "
      "kept by steps; {:.1f} ms waited{}",
      counted(marks, "mark", "marks"), milliseconds(SnapshotCount::mark_ns), bytes(read(SnapshotCount::copied_bytes)),
      bytes(read(SnapshotCount::state_bytes)), bytes(read(SnapshotCount::kept_bytes)),
      milliseconds(SnapshotCount::waited_ns), failures == 0 ? "" : fmt::format("; {} failed", failures));
}

// ---- precision

Deed mixed_precision(const OwnFacts& f) {
  if (f.precision == PrecisionType::NO) return off("no: everything in the model's own type");
  if (f.precision == PrecisionType::FP8 && f.fp8_products > 0)
    return acted("{} computed in fp8, all else in bf16", counted(f.fp8_products, "product was", "products were"));
  if (f.sharded && read(ShardingCount::forwards_sharded) > 0)
    return acted("{} of sharded models, {} of {} parameter elements converted for them",
                 counted(read(ShardingCount::forwards_sharded), "forward", "forwards"),
                 read(ShardingCount::elements_converted), read(ShardingCount::elements_sharded));
  if (read(PrecisionCount::autocast_regions) > 0)
    return acted("{} ran under autocast", counted(read(PrecisionCount::autocast_regions), "region", "regions"));
  if (!f.autocast) return nothing("AutocastKwargs.enabled is false");
  return not_due("no prepared model was called");
}

constexpr ReceiptRow<OwnFacts> kAccumulationRows[] = {
    {"gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", kAccumulate,
     asked<&OwnFacts::given, &AcceleratorOptions::gradient_accumulation_steps>, num_steps,
     /*variable_wins=*/true},
    {"gradient_accumulation_plugin.num_steps", nullptr, kAccumulate,
     asked<&OwnFacts::accumulation, &Accumulation::num_steps>, num_steps},
    {"gradient_accumulation_plugin.adjust_scheduler", nullptr, "with schedules, in the middle of groups",
     asked<&OwnFacts::accumulation, &Accumulation::adjust_scheduler>, adjust_scheduler},
    {"gradient_accumulation_plugin.sync_with_dataloader", nullptr, "where a loader ends in the middle of a group",
     asked<&OwnFacts::accumulation, &Accumulation::sync_with_dataloader>, sync_with_dataloader},
    {"gradient_accumulation_plugin.sync_each_batch", nullptr, "with several processes, in the middle of groups",
     asked<&OwnFacts::accumulation, &Accumulation::sync_each_batch>, sync_each_batch},
    {"gradient_accumulation_plugin.average", nullptr, "in backward()",
     asked<&OwnFacts::accumulation, &Accumulation::average>, average},
};

constexpr ReceiptRow<OwnFacts> kProjectRows[] = {
    {"log_with", nullptr, "after init_trackers()", asked<&OwnFacts::given, &AcceleratorOptions::log_with>, log_with},
    {"project_dir", nullptr, "with trackers and automatic checkpoints",
     asked<&OwnFacts::given, &AcceleratorOptions::project_dir>, project_dir},
    {"project_config.project_dir", nullptr, "with trackers and automatic checkpoints", project<&Project::project_dir>,
     project_dir},
    {"project_config.logging_dir", nullptr, "with trackers", project<&Project::logging_dir>, logging_dir},
    {"project_config.automatic_checkpoint_naming", nullptr, kSaving, project<&Project::automatic_checkpoint_naming>,
     automatic_checkpoint_naming},
    {"project_config.total_limit", nullptr, kSaving, project<&Project::total_limit>, total_limit},
    {"project_config.iteration", nullptr, kSaving, project<&Project::iteration>, iteration},
    {"project_config.save_on_each_node", nullptr, kSaving, project<&Project::save_on_each_node>, save_on_each_node},
    {"project_config.verify_checkpoints", "ACCELERATE_VERIFY_CHECKPOINTS", "when load_state() is called",
     project<&Project::verify_checkpoints>, verify_checkpoints},
    {"project_config.save_on_signal", nullptr, "when SIGTERM or SIGUSR1 comes", project<&Project::save_on_signal>,
     save_on_signal},
    {"save_state.behind_training", nullptr, kSaving, asked_behind_training, behind_training},
};

constexpr ReceiptRow<OwnFacts> kPrecisionRows[] = {
    {"mixed_precision", "ACCELERATE_MIXED_PRECISION", "in forwards of prepared models",
     asked<&OwnFacts::given, &AcceleratorOptions::mixed_precision>, mixed_precision},
};

}  // namespace

std::vector<Receipt> of_accumulation(const OwnFacts& facts) { return made(kAccumulationRows, facts); }
std::vector<Receipt> of_projects(const OwnFacts& facts) { return made(kProjectRows, facts); }
std::vector<Receipt> of_precision(const OwnFacts& facts) { return made(kPrecisionRows, facts); }

}  // namespace receipts
}  // namespace accelerate
