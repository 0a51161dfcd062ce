#include "prepared_settings.hpp"

#include "accelerate/state.hpp"
#include "comm/mesh.hpp"
#include "data/counts.hpp"
#include "draws.hpp"
#include "utils/raise.hpp"

namespace accelerate::data::detail {

PreparedSettings resolve(const PrepareDataLoaderOptions& options, const LoaderCore& core) {
  PreparedSettings settings{.config = options.config, .rng_types = options.rng_types};
  if (options.put_on_device) settings.device = options.device ? *options.device : PartialState().device();
  const PartialState joined;  // before the mesh is asked
  settings.num_processes = options.num_processes ? *options.num_processes : comm::mesh().size(comm::kSamples);
  settings.process_index = options.process_index ? *options.process_index : comm::mesh().place(comm::kSamples);
  const int64_t ranks = settings.num_processes;
  if (ranks < 1 || settings.process_index < 0 || settings.process_index >= ranks)
    raise<ConfigError>(
        "prepare_data_loader: found process_index {} of {} processes, expected 0 <= process_index < num_processes",
        settings.process_index, ranks);
  settings.dispatch = ranks > 1 && options.config.dispatch_batches.value_or(options.put_on_device && core.is_stream() &&
                                                                            !core.can_shard());
  if (settings.dispatch && ranks != comm::mesh().size(comm::kSamples))
    raise<ConfigError>(
        "prepare_data_loader: dispatch_batches is set for {} processes, expected the process group's {} because "
        "batches travel through it; leave num_processes unset or set dispatch_batches = false",
        ranks, comm::mesh().size(comm::kSamples));
  if (ranks > 1 && core.batches() && core.batches()->sharded())
    raise<ConfigError>(
        "prepare_data_loader: the sampler gives one rank's part already (LibTorch's DistributedRandomSampler and "
        "DistributedSequentialSampler do, and BatchSamplerShard), expected one of the whole data set because the "
        "prepared loader shares it out to {} ranks; pass a torch::data::samplers::RandomSampler, or shuffle = true",
        ranks);
  if (options.config.split_batches && ranks > 1) {
    const auto batch_size =
        core.is_stream() ? std::optional<int64_t>(core.options().batch_size) : core.batches()->batch_size();
    if (!batch_size)
      raise<ConfigError>(
          "prepare_data_loader: split_batches is set but the loader has no batch size, expected one that {} processes "
          "can share; batches of varying sizes can't be split, set split_batches = false or give the sampler a "
          "batch_size()",
          ranks);
    if (*batch_size % ranks != 0)
      raise<ConfigError>(
          "prepare_data_loader: split_batches is set and the batch size is {}, expected a multiple of num_processes "
          "({}), because every rank gets an equal piece; change batch_size or set split_batches = false",
          *batch_size, ranks);
  }
  return settings;
}

std::shared_ptr<AnyBatchSampler> prepared_sampler(std::shared_ptr<AnyBatchSampler> batches,
                                                  const PreparedSettings& settings) {
  if (!batches) return nullptr;
  if (settings.config.use_seedable_sampler) {
    const auto fixed = std::dynamic_pointer_cast<BatchSampler>(batches);
    const auto random = fixed ? std::dynamic_pointer_cast<RandomSampler>(fixed->sampler()) : nullptr;
    if (random && !std::dynamic_pointer_cast<SeedableRandomSampler>(random)) {
      counts::add(DataCount::seedable_samplers);
      return std::make_shared<BatchSampler>(
          std::make_shared<SeedableRandomSampler>(random->data_size(), settings.config.data_seed,
                                                  RandomSamplerOptions{.replacement = random->options().replacement,
                                                                       .num_samples = random->options().num_samples,
                                                                       .generator = random->generator()}),
          *fixed->batch_size(), fixed->drop_last());
    }
  }
  if (settings.num_processes > 1 && !settings.dispatch && batches->random() && !batches->generator())
    batches->set_generator(seeded_generator(draw_seed(std::nullopt)));
  return batches;
}

}  // namespace accelerate::data::detail
