/// Receipts of DataLoaderConfiguration, and of what else is about batches.
//
// settings: DataLoaderConfiguration as dataloader_config.

#include "data/receipts.hpp"

#include "data/counts.hpp"
#include "utils/run_counts.hpp"

namespace accelerate {

static std::string text_of(RNGType value) {
  return value == RNGType::torch ? "torch" : value == RNGType::device ? "device" : "generator";
}

namespace receipts {
namespace {

using data::DataCount;
using Options = data::PrepareDataLoaderOptions;
using Loading = DataLoaderConfiguration;

template <auto Field> Asked loading(const LoadingFacts& f) {
  return asked<&LoadingFacts::given, &Options::config, Field>(f);
}

constexpr const char* kLoaders = "in prepared loaders";
constexpr const char* kLoadersOfSeveral = "in prepared loaders of several processes";

std::optional<Deed> no_batches(const LoadingFacts& f) {
  if (read(DataCount::loaders) == 0) return nothing("no loader was prepared");
  if (read(DataCount::batches) == 0) return not_due("no batch has been read");
  return std::nullopt;
}
std::optional<Deed> no_shared_batches(const LoadingFacts& f) {
  if (f.run.ranks == 1) return nothing("one process reads all batches, whole");
  return no_batches(f);
}

Deed split_batches(const LoadingFacts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  if (!f.loading.split_batches) return off("off: {}, whole", counted(read(DataCount::batches), "batch", "batches"));
  return acted("{} cut in {}, a piece for each process",
               counted(read(DataCount::batches_split), "batch was", "batches were"), f.run.ranks);
}

Deed dispatch_batches(const LoadingFacts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  if (read(DataCount::batches_dispatched) > 0)
    return acted("{} came from rank 0, in {}", counted(read(DataCount::batches_dispatched), "batch", "batches"),
                 bytes(read(DataCount::dispatched_bytes)));
  if (read(DataCount::stream_batches) > 0 && f.loading.dispatch_batches)
    return acted("{} of streams were read by this rank itself",
                 counted(read(DataCount::stream_batches), "batch", "batches"));
  return off("indexed data sets are read by each rank itself, as by default");
}

Deed even_batches(const LoadingFacts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  if (read(DataCount::samples_repeated) > 0)
    return acted("{} to complete last batches",
                 counted(read(DataCount::samples_repeated), "sample was repeated", "samples were repeated"));
  if (read(DataCount::uneven_passes) > 0)
    return acted("{} ended with what was left, and some ranks got less",
                 counted(read(DataCount::uneven_passes), "pass", "passes"));
  if (read(DataCount::batches_dispatched) > 0 && !f.loading.even_batches)
    return nothing("batches are dispatched, and rank 0 completes what it shares out");
  return not_due("no pass ended with a batch that is not full");
}

Deed use_seedable_sampler(const LoadingFacts& f) {
  if (read(DataCount::loaders) == 0) return nothing("no loader was prepared");
  if (!f.loading.use_seedable_sampler) return off("off");
  if (read(DataCount::seedable_samplers) == 0) return nothing("no prepared loader shuffles by a random sampler");
  return acted("{} shuffle by seed and epoch", counted(read(DataCount::seedable_samplers), "loader", "loaders"));
}

Deed data_seed(const LoadingFacts& f) {
  if (!f.loading.data_seed) return off("unset");
  if (!f.loading.use_seedable_sampler) return nothing("use_seedable_sampler is off, and other samplers have their own");
  if (read(DataCount::seedable_samplers) == 0) return nothing("no prepared loader shuffles by a random sampler");
  return acted("{} shuffle from seed {}", counted(read(DataCount::seedable_samplers), "loader", "loaders"),
               *f.loading.data_seed);
}

Deed non_blocking(const LoadingFacts& f) {
  if (const auto none = no_batches(f)) return *none;
  const int64_t moved = read(RunCount::tensors_moved), all = moved + read(RunCount::tensors_in_place);
  if (!f.loading.non_blocking) return off("off: {}, waited for", counted(moved, "copy", "copies"));
  if (!f.given.put_on_device) return nothing("device_placement is off, so that loaders copy nothing");
  if (moved == 0)
    return nothing("0 of {}, batches are on the {} already", counted(all, "copy", "copies"), f.run.device.str());
  return acted("{} of {} were started and not waited for", moved, counted(all, "copy", "copies"));
}

Deed use_stateful_dataloader(const LoadingFacts& f) {
  if (!f.loading.use_stateful_dataloader) return off("off");
  if (read(DataCount::loaders) == 0) return nothing("no loader was prepared");
  if (f.loader_positions == 0) return not_due("nothing was saved");
  return acted("{} with positions of loaders ({} in all)", counted(f.checkpoints, "checkpoint", "checkpoints"),
               f.loader_positions);
}

Deed device_placement(const LoadingFacts& f) {
  const int64_t moved = read(RunCount::tensors_moved), all = moved + read(RunCount::tensors_in_place);
  if (f.given.put_on_device)
    return moved > 0 ? acted("{} of batches moved to {}", counted(moved, "tensor", "tensors"), f.run.device.str())
                     : off("all lies on the {} already", f.run.device.str());
  if (f.run.device.is_cpu()) return nothing("everything lies on the CPU anyway");
  return acted("models, optimizers and batches stayed where they were, {} looked at",
               counted(all, "tensor", "tensors"));
}

Deed rng_types(const LoadingFacts& f) {
  if (const auto none = no_shared_batches(f)) return *none;
  const int64_t samplers = read(DataCount::generators_sent), defaults = read(DataCount::default_generators_sent),
                devices = read(DataCount::device_generators_sent);
  const bool as_by_default = defaults == 0 && devices == 0 && samplers > 0;
  const auto text =
      fmt::format("rank 0's states were taken over: {} of samplers' generators, {} of the default one, {} of devices'",
                  samplers, defaults, devices);
  if (f.given.rng_types.empty()) return acted("no generator was synchronised");
  if (samplers + defaults + devices > 0)
    return as_by_default || defaults + devices > 0 ? acted("{}", text) : not_due("{}", text);
  return nothing("no state was sent: samplers have no generators of their own, or there is no device with one");
}

constexpr ReceiptRow<LoadingFacts> kLoadingRows[] = {
    {"device_placement", nullptr, "where there is another device than the CPU",
     asked<&LoadingFacts::given, &Options::put_on_device>, device_placement},
    {"rng_types", nullptr, kLoadersOfSeveral, asked<&LoadingFacts::given, &Options::rng_types>, rng_types},
    {"split_batches", nullptr, kLoadersOfSeveral, asked<&LoadingFacts::split_batches>, split_batches},
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
};

}  // namespace

std::vector<Receipt> of_loading(const LoadingFacts& facts) { return made(kLoadingRows, facts); }

}  // namespace receipts
}  // namespace accelerate
