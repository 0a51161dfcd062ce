/// Receipts of what concerns batches, accumulation and saving.

#include <cmath>

#include "accelerator/receipts.hpp"

namespace accelerate::receipts {
namespace {

using Options = AcceleratorOptions;
using Loading = DataLoaderConfiguration;
using Accumulation = GradientAccumulationPlugin;
using Project = ProjectConfiguration;

template <auto Field> Asked loading(const Facts& f) {
  return asked<&Facts::given, &Options::dataloader_config, Field>(f);
}
template <auto Field> Asked project(const Facts& f) { return asked<&Facts::given, &Options::project_config, Field>(f); }

constexpr const char* kLoaders = "in prepared loaders";
constexpr const char* kLoadersOfSeveral = "in prepared loaders of several processes";

std::optional<Deed> no_batches(const Facts& f) {
  if (f[Count::loaders] == 0) return nothing("no loader was prepared");
  if (f[Count::batches] == 0) return not_due("no batch has been read");
  return std::nullopt;
}
std::optional<Deed> no_shared_batches(const Facts& f) {
  if (f.ranks == 1) return nothing("one process reads all batches, whole");
  return no_batches(f);
}

Deed split_batches(const Facts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  if (!f.loading.split_batches) return off("off: {}, whole", counted(f[Count::batches], "batch", "batches"));
  return acted("{} cut in {}, a piece for each process", counted(f[Count::batches_split], "batch was", "batches were"),
               f.ranks);
}

Deed dispatch_batches(const Facts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  if (f[Count::batches_dispatched] > 0)
    return acted("{} came from rank 0, in {}", counted(f[Count::batches_dispatched], "batch", "batches"),
                 bytes(f[Count::dispatched_bytes]));
  if (f[Count::stream_batches] > 0 && f.loading.dispatch_batches)
    return acted("{} of streams were read by this rank itself", counted(f[Count::stream_batches], "batch", "batches"));
  return off("indexed data sets are read by each rank itself, as by default");
}

Deed even_batches(const Facts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  if (f[Count::samples_repeated] > 0)
    return acted("{} to complete last batches",
                 counted(f[Count::samples_repeated], "sample was repeated", "samples were repeated"));
  if (f[Count::uneven_passes] > 0)
    return acted("{} ended with what was left, and some ranks got less",
                 counted(f[Count::uneven_passes], "pass", "passes"));
  if (f[Count::batches_dispatched] > 0 && !f.loading.even_batches)
    return nothing("batches are dispatched, and rank 0 completes what it shares out");
  return not_due("no pass ended with a batch that is not full");
}

Deed use_seedable_sampler(const Facts& f) {
  if (f[Count::loaders] == 0) return nothing("no loader was prepared");
  if (!f.loading.use_seedable_sampler) return off("off");
  if (f[Count::seedable_samplers] == 0) return nothing("no prepared loader shuffles by a random sampler");
  return acted("{} shuffle by seed and epoch", counted(f[Count::seedable_samplers], "loader", "loaders"));
}

Deed data_seed(const Facts& f) {
  if (!f.loading.data_seed) return off("unset");
  if (!f.loading.use_seedable_sampler) return nothing("use_seedable_sampler is off, and other samplers have their own");
  if (f[Count::seedable_samplers] == 0) return nothing("no prepared loader shuffles by a random sampler");
  return acted("{} shuffle from seed {}", counted(f[Count::seedable_samplers], "loader", "loaders"),
               *f.loading.data_seed);
}

Deed non_blocking(const Facts& f) {
  if (const auto none = no_batches(f)) return *none;
  const int64_t moved = f[Count::tensors_moved], all = moved + f[Count::tensors_in_place];
  if (!f.loading.non_blocking) return off("off: {}, waited for", counted(moved, "copy", "copies"));
  if (!f.given.device_placement) return nothing("device_placement is off, so that loaders copy nothing");
  if (moved == 0)
    return nothing("0 of {}, batches are on the {} already", counted(all, "copy", "copies"), f.device.str());
  return acted("{} of {} were started and not waited for", moved, counted(all, "copy", "copies"));
}

Deed use_stateful_dataloader(const Facts& f) {
  if (!f.loading.use_stateful_dataloader) return off("off");
  if (f[Count::loaders] == 0) return nothing("no loader was prepared");
  if (f[Count::loader_positions] == 0) return not_due("nothing was saved");
  return acted("{} with positions of loaders ({} in all)", counted(f[Count::checkpoints], "checkpoint", "checkpoints"),
               f[Count::loader_positions]);
}

Deed device_placement(const Facts& f) {
  const int64_t moved = f[Count::tensors_moved], all = moved + f[Count::tensors_in_place];
  if (f.given.device_placement)
    return moved > 0 ? acted("{} of batches moved to {}", counted(moved, "tensor", "tensors"), f.device.str())
                     : off("all lies on the {} already", f.device.str());
  if (f.device.is_cpu()) return nothing("everything lies on the CPU anyway");
  return acted("models, optimizers and batches stayed where they were, {} looked at",
               counted(all, "tensor", "tensors"));
}

Deed rng_types(const Facts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  const int64_t samplers = f[Count::generators_sent], defaults = f[Count::default_generators_sent],
                devices = f[Count::device_generators_sent];
  const bool as_by_default = defaults == 0 && devices == 0 && samplers > 0;
  const auto text =
      fmt::format("rank 0's states were taken over: {} of samplers' generators, {} of the default one, {} of devices'",
                  samplers, defaults, devices);
  if (f.given.rng_types.empty()) return acted("no generator was synchronised");
  if (samplers + defaults + devices > 0)
    return as_by_default || defaults + devices > 0 ? acted("{}", text) : not_due("{}", text);
  return nothing("no state was sent: samplers have no generators of their own, or there is no device with one");
}

// ---- accumulation

constexpr const char* kAccumulate = "where the loop calls accumulate()";

Deed num_steps(const Facts& f) {
  const int64_t steps = f.accumulating.num_steps, micro = f[Count::micro_steps];
  if (steps == 1) return off("off: each step is an optimizer's");
  if (f[Count::backwards] == 0) return not_due("nothing was trained");
  if (micro == 0)
    return nothing("accumulate() was never called, so each of {} was an optimizer's, with a loss divided by {}",
                   counted(f[Count::backwards], "step", "steps"), steps);
  return acted("{} in groups of {}: gradients were synchronised in {} of them",
               counted(micro, "micro-step", "micro-steps"), steps, f[Count::synchronised_steps]);
}

std::optional<Deed> no_accumulation(const Facts& f) {
  if (f.accumulating.num_steps == 1) return nothing("there is no accumulation: num_steps is 1");
  if (f[Count::micro_steps] == 0)
    return f[Count::backwards] ? nothing("accumulate() was never called") : not_due("nothing was trained");
  return std::nullopt;
}

Deed adjust_scheduler(const Facts& f) {
  if (const auto none = no_accumulation(f)) return *none;
  if (f.schedulers == 0) return nothing("no schedule was prepared");
  if (f[Count::schedule_counts] > 0)
    return acted("schedules counted {} without a step",
                 counted(f[Count::schedule_counts], "micro-step", "micro-steps"));
  if (f.accumulating.adjust_scheduler) return not_due("no schedule was asked in the middle of a group");
  return acted("schedules did not count the {} in the middle of groups",
               counted(f[Count::micro_steps] - f[Count::synchronised_steps], "micro-step", "micro-steps"));
}

Deed sync_with_dataloader(const Facts& f) {
  if (const auto none = no_accumulation(f)) return *none;
  if (f[Count::loader_end_synchronisations] > 0)
    return acted("{} ended in the middle of a group and synchronised",
                 counted(f[Count::loader_end_synchronisations], "pass", "passes"));
  if (f[Count::loader_ends_passed] > 0)
    return acted("{} ended in the middle of a group, which went on in the next one",
                 counted(f[Count::loader_ends_passed], "pass", "passes"));
  return not_due("no pass of a prepared loader ended in the middle of a group");
}

Deed sync_each_batch(const Facts& f) {
  if (!f.accumulating.sync_each_batch) return off("off");
  if (f.ranks == 1) return nothing("one process has nobody to synchronise with");
  if (const auto none = no_accumulation(f)) return *none;
  if (f[Count::early_synchronisations] == 0) return not_due("no micro-step was in the middle of a group");
  return acted("gradients were averaged in {} in the middle of groups",
               counted(f[Count::early_synchronisations], "micro-step", "micro-steps"));
}

Deed average(const Facts& f) {
  if (f.accumulating.average == GradientAverage::steps) return off("by steps and processes");
  if (f[Count::backwards] == 0) return not_due("nothing was trained");
  return acted("gradients of {} weigh the same in {}", counted(f[Count::items], "item", "items"),
               counted(f[Count::backwards], "backward", "backwards"));
}

// ---- projects

Deed project_dir(const Facts& f) {
  if (f.project.project_dir.empty()) return off("unset");
  const int64_t used = f[Count::automatic_checkpoints] + f[Count::trackers];
  if (used > 0)
    return acted("{} and {} went there", counted(f[Count::automatic_checkpoints], "checkpoint", "checkpoints"),
                 counted(f[Count::trackers], "tracker", "trackers"));
  if (f.given.log_with.empty() && !f.project.automatic_checkpoint_naming)
    return nothing("there are neither trackers nor automatic_checkpoint_naming, the two that write there");
  return not_due("nothing was saved or tracked");
}

Deed logging_dir(const Facts& f) {
  if (f.given.log_with.empty()) return nothing("there is no tracker (log_with)");
  if (!f.main_process && f[Count::trackers] == 0) return not_due("trackers are the main process's");
  if (f[Count::trackers] == 0) return not_due("init_trackers() was not called");
  return acted("{} wrote to {}", counted(f[Count::trackers], "tracker", "trackers"), f.project.logging_dir.string());
}

Deed log_with(const Facts& f) {
  if (f.given.log_with.empty()) return off("unset");
  if (!f.main_process && f[Count::trackers] == 0) return not_due("trackers are the main process's");
  if (f[Count::trackers] == 0) return nothing("init_trackers() was not called");
  return acted("{} opened", counted(f[Count::trackers], "tracker", "trackers"));
}

Deed automatic_checkpoint_naming(const Facts& f) {
  if (!f.project.automatic_checkpoint_naming) return off("off");
  if (f[Count::automatic_checkpoints] == 0) return not_due("nothing was saved");
  return acted("{} named themselves, up to checkpoint_{}",
               counted(f[Count::automatic_checkpoints], "checkpoint", "checkpoints"), f.project.iteration - 1);
}

Deed of_automatic_naming(const Facts& f, const char* what) {
  if (!f.project.automatic_checkpoint_naming) return nothing("automatic_checkpoint_naming is off, and {}", what);
  return not_due("nothing was saved");
}

Deed total_limit(const Facts& f) {
  if (!f.project.total_limit) return off("unset");
  if (f[Count::automatic_checkpoints] == 0) return of_automatic_naming(f, "only checkpoints that it names are removed");
  if (f[Count::checkpoints_pruned] == 0) return not_due("there were never more than {}", *f.project.total_limit);
  return acted("{} removed", counted(f[Count::checkpoints_pruned], "older checkpoint was", "older checkpoints were"));
}

Deed iteration(const Facts& f) {
  if (f[Count::automatic_checkpoints] == 0) return of_automatic_naming(f, "only names that it gives are counted");
  return acted("the latest checkpoint is number {}", f.project.iteration - 1);
}

Deed save_on_each_node(const Facts& f) {
  if (!f.project.save_on_each_node) return off("off");
  if (f[Count::checkpoints] == 0) return not_due("nothing was saved");
  if (f[Count::copies_on_nodes] > 0)
    return acted("{} written here besides rank 0's",
                 counted(f[Count::copies_on_nodes], "checkpoint was", "checkpoints were"));
  return off("rank 0 writes in any case; what the first ranks of other machines wrote is in their receipts");
}

}  // namespace

std::vector<Row> rows_of_loading() {
  return {
      {"device_placement", nullptr, "where there is another device than the CPU",
       asked<&Facts::given, &Options::device_placement>, device_placement},
      {"rng_types", nullptr, kLoadersOfSeveral, asked<&Facts::given, &Options::rng_types>, rng_types},
      {"split_batches", nullptr, kLoadersOfSeveral, asked<&Facts::given, &Options::split_batches>, split_batches},
      {"dataloader_config.split_batches", nullptr, kLoadersOfSeveral, loading<&Loading::split_batches>, split_batches},
      {"dataloader_config.dispatch_batches", nullptr, kLoadersOfSeveral, loading<&Loading::dispatch_batches>,
       dispatch_batches},
      {"dataloader_config.even_batches", nullptr, kLoadersOfSeveral, loading<&Loading::even_batches>, even_batches},
      {"dataloader_config.use_seedable_sampler", nullptr, kLoaders, loading<&Loading::use_seedable_sampler>,
       use_seedable_sampler},
      {"dataloader_config.data_seed", nullptr, "with use_seedable_sampler", loading<&Loading::data_seed>, data_seed},
      {"dataloader_config.non_blocking", nullptr, "where batches go to another device", loading<&Loading::non_blocking>,
       non_blocking},
      {"dataloader_config.use_stateful_dataloader", nullptr, kSaving, loading<&Loading::use_stateful_dataloader>,
       use_stateful_dataloader},
      {"gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", kAccumulate,
       asked<&Facts::given, &Options::gradient_accumulation_steps>, num_steps, /*variable_wins=*/true},
      {"gradient_accumulation_plugin.num_steps", nullptr, kAccumulate,
       asked<&Facts::accumulation, &Accumulation::num_steps>, num_steps},
      {"gradient_accumulation_plugin.adjust_scheduler", nullptr, "with schedules, in the middle of groups",
       asked<&Facts::accumulation, &Accumulation::adjust_scheduler>, adjust_scheduler},
      {"gradient_accumulation_plugin.sync_with_dataloader", nullptr, "where a loader ends in the middle of a group",
       asked<&Facts::accumulation, &Accumulation::sync_with_dataloader>, sync_with_dataloader},
      {"gradient_accumulation_plugin.sync_each_batch", nullptr, "with several processes, in the middle of groups",
       asked<&Facts::accumulation, &Accumulation::sync_each_batch>, sync_each_batch},
      {"gradient_accumulation_plugin.average", nullptr, "in backward()",
       asked<&Facts::accumulation, &Accumulation::average>, average},
      {"log_with", nullptr, "after init_trackers()", asked<&Facts::given, &Options::log_with>, log_with},
      {"project_dir", nullptr, "with trackers and automatic checkpoints", asked<&Facts::given, &Options::project_dir>,
       project_dir},
      {"project_config.project_dir", nullptr, "with trackers and automatic checkpoints", project<&Project::project_dir>,
       project_dir},
      {"project_config.logging_dir", nullptr, "with trackers", project<&Project::logging_dir>, logging_dir},
      {"project_config.automatic_checkpoint_naming", nullptr, kSaving, project<&Project::automatic_checkpoint_naming>,
       automatic_checkpoint_naming},
      {"project_config.total_limit", nullptr, kSaving, project<&Project::total_limit>, total_limit},
      {"project_config.iteration", nullptr, kSaving, project<&Project::iteration>, iteration},
      {"project_config.save_on_each_node", nullptr, kSaving, project<&Project::save_on_each_node>, save_on_each_node},
  };
}

}  // namespace accelerate::receipts
