#include "accelerate/data/loader.hpp"

#include <ATen/Context.h>

#include <string>

#include "accelerate/utils/error.hpp"
#include "draws.hpp"

namespace accelerate::data::detail {

DataLoaderOptions validated(DataLoaderOptions options) {
  const auto require = [](bool right, const char* name, int64_t found, const char* expected) {
    if (!right)
      throw ConfigError(std::string("DataLoader: ") + name + " is " + std::to_string(found) + ", expected " + expected);
  };
  require(options.batch_size >= 1, "batch_size", options.batch_size, "at least 1");
  require(options.num_workers >= 0, "num_workers", options.num_workers,
          "0 (read on the consumer's thread) or a number of threads");
  require(options.prefetch_factor >= 1, "prefetch_factor", options.prefetch_factor, "at least 1 batch per worker");
  if (options.seed) {
    if (options.generator)
      throw ConfigError(
          "DataLoader: both seed and generator are set, expected one of them; seed the generator yourself with "
          "set_current_seed()");
    options.generator = seeded_generator(*options.seed);
  }
  return options;
}

std::shared_ptr<AnyBatchSampler> default_sampler(int64_t data_size, const DataLoaderOptions& options) {
  std::shared_ptr<AnySampler> sampler;
  if (options.shuffle)
    sampler = std::make_shared<RandomSampler>(data_size, RandomSamplerOptions{.generator = options.generator});
  else sampler = std::make_shared<SequentialSampler>(data_size);
  return std::make_shared<BatchSampler>(std::move(sampler), options.batch_size, options.drop_last);
}

void throw_unsized(const char* what) {
  throw ConfigError(std::string("DataLoader: ") + what +
                    " of a loader whose length is unknown, expected a data set and a sampler with size(); count the "
                    "batches in the loop, or give the stream a size()");
}

void draw_base_seed(const std::optional<at::Generator>& generator) { draw_seed(generator); }

bool can_pin_memory() { return at::globalContext().hasCUDA() || at::globalContext().hasXPU(); }

StreamPlan shard_plan(const IterableDatasetShardOptions& options) {
  const int64_t ranks = options.num_processes;
  if (options.batch_size < 1 || ranks < 1 || options.process_index < 0 || options.process_index >= ranks)
    throw ConfigError("IterableDatasetShard: found batch_size " + std::to_string(options.batch_size) +
                      " and process_index " + std::to_string(options.process_index) + " of " + std::to_string(ranks) +
                      " processes, expected batch_size >= 1 and 0 <= process_index < num_processes");
  if (options.split_batches && options.batch_size % ranks != 0)
    throw ConfigError("IterableDatasetShard: split_batches is set and the batch size is " +
                      std::to_string(options.batch_size) + ", expected a multiple of num_processes (" +
                      std::to_string(ranks) +
                      "), because every rank gets an equal piece; change batch_size or set split_batches = false");
  const int64_t share = options.split_batches ? options.batch_size / ranks : options.batch_size;
  return {.group = share * ranks,
          .begin = share * options.process_index,
          .end = share * (options.process_index + 1),
          .chunk = options.batch_size,
          .complete = !options.drop_last,
          .drop_last = options.drop_last};
}

}  // namespace accelerate::data::detail
