#include "loader_core.hpp"

#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>

#include "draws.hpp"
#include "own_numbers.hpp"
#include "utils/raise.hpp"

namespace accelerate::data {
namespace detail {
namespace {

/// Checks the numbers and makes the generator that `seed` asks for.
DataLoaderOptions checked(DataLoaderOptions options) {
  const auto require = [](bool right, std::string_view name, int64_t found, std::string_view expected) {
    if (!right) raise<ConfigError>("DataLoader: {} is {}, expected {}", name, found, expected);
  };
  require(options.batch_size >= 1, "batch_size", options.batch_size, "at least 1");
  require(options.num_workers >= 0, "num_workers", options.num_workers,
          "0 (read on the consumer's thread) or a number of threads");
  require(options.prefetch_factor >= 1, "prefetch_factor", options.prefetch_factor, "at least 1 batch per worker");
  if (options.seed) {
    if (options.generator)
      raise<ConfigError>(
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

std::shared_ptr<LoaderCore> map_core(std::shared_ptr<MapSource> source, DataLoaderOptions options,
                                     const MakeSampler& make_sampler) {
  options = checked(std::move(options));
  const auto size = source->size();
  if (!size)
    raise<ConfigError>(
        "DataLoader: the data set's size() is unknown, expected a number because its samples are read by index; return "
        "it from size(), or write a stream with next() and reset()");
  if (make_sampler && options.shuffle)
    raise<ConfigError>(
        "DataLoader: shuffle is set and a sampler is passed, expected one of them because the sampler decides on the "
        "order");
  auto batches = make_sampler ? make_sampler(options, *size) : default_sampler(*size, options);
  return std::make_shared<LoaderCore>(std::move(source), std::move(options), std::move(batches));
}

std::shared_ptr<LoaderCore> stream_core(std::shared_ptr<StreamSource> source, DataLoaderOptions options) {
  options = checked(std::move(options));
  if (options.shuffle)
    raise<ConfigError>(
        "DataLoader: shuffle is set but the data set is a stream, expected false because only the stream knows its "
        "order; shuffle in its next(), e.g. from a buffer");
  return std::make_shared<LoaderCore>(std::move(source), std::move(options));
}

std::atomic<int64_t> unprepared{0};

class PlainCursor final : public BatchCursor {
 public:
  explicit PlainCursor(std::unique_ptr<Pass> pass) : pass_(std::move(pass)) { ++unprepared; }
  ~PlainCursor() override { --unprepared; }
  PlainCursor(const PlainCursor&) = delete;
  PlainCursor& operator=(const PlainCursor&) = delete;
  const AnyBatch* next() override {
    current_.reset();  // before the next one is read
    current_ = pass_->next();
    return current_ ? &current_->batch : nullptr;
  }

 private:
  std::unique_ptr<Pass> pass_;
  std::optional<LoadedBatch> current_;
};

}  // namespace

int64_t unprepared_passes() { return unprepared; }

void throw_pass_is_over(const char* of_what) {
  raise<ConfigError>(
      "DataLoader: a loop asked for its next batch after another loop over the same data had begun, expected one at a "
      "time because they share {}; finish one loop first, or give the inner one a loader of its own",
      of_what);
}

LoaderCore::LoaderCore(std::shared_ptr<MapSource> source, DataLoaderOptions options,
                       std::shared_ptr<AnyBatchSampler> batches)
    : options_(std::move(options)),
      map_(std::move(source)),
      ops_(map_->ops()),
      dataset_size_(map_->size()),
      batches_(std::move(batches)) {
  OwnNumbers::install();
}

LoaderCore::LoaderCore(std::shared_ptr<StreamSource> source, DataLoaderOptions options)
    : options_(std::move(options)), stream_(std::move(source)), ops_(stream_->ops()), dataset_size_(stream_->size()) {
  OwnNumbers::install();
}

void LoaderCore::set_epoch(int64_t epoch) {
  if (batches_) batches_->set_epoch(epoch);
  if (map_) map_->set_epoch(epoch);
  if (stream_) stream_->set_epoch(epoch);
}

PassPlan LoaderCore::whole() const {
  const int64_t n = options_.batch_size;
  return {.batches = batches_,
          .stream = {.group = n, .begin = 0, .end = n, .chunk = n, .drop_last = options_.drop_last},
          .generator = options_.generator};
}

std::optional<int64_t> LoaderCore::num_batches() const {
  if (batches_) return batches_->size();
  if (!dataset_size_) return std::nullopt;
  return options_.drop_last ? *dataset_size_ / options_.batch_size
                            : (*dataset_size_ + options_.batch_size - 1) / options_.batch_size;
}

std::unique_ptr<Pass> LoaderCore::start(const PassPlan& plan) {
  // As Python's loader does at the start of each pass, so that a seeded program draws the same orders.
  if (plan.draw_seed) *plan.seed = draw_seed(plan.generator);
  const BatchOps* pin_by =
      options_.pin_memory && (at::globalContext().hasCUDA() || at::globalContext().hasXPU()) ? &ops_ : nullptr;
  auto next_read = stream_ ? stream_reads(plan) : map_reads(plan);
  if (pin_by)
    next_read = [next_read = std::move(next_read), pin_by]() -> Pass::Read {
      auto read = next_read();
      if (!read) return {};
      return [read = std::move(read), pin_by] {
        auto loaded = read();
        if (loaded) pin_by->pin_memory(loaded->batch);
        return loaded;
      };
    };
  return std::make_unique<Pass>(std::move(next_read), pool(), options_.num_workers * options_.prefetch_factor);
}

std::function<Pass::Read()> LoaderCore::stream_reads(const PassPlan& plan) {
  constexpr int64_t kBeforeTheFirst = -1;
  // Reads follow each other, by one thread at a time.
  return [source = stream_, latest = stream_passes_, pass = std::make_shared<int64_t>(0), plan = plan.stream,
          skip = plan.skip, seed = plan.seed, step = plan.skip]() mutable -> Pass::Read {
    return [source, latest, pass, plan, skip, seed, step = step++] {
      OwnNumbers numbers(*seed, kBeforeTheFirst);
      if (step == skip) {
        *pass = ++*latest;
        source->reset(plan, skip, [&](int64_t skipped) { numbers.select(skipped); });
      }
      if (*pass != *latest) throw_pass_is_over("a stream, which has one position");
      numbers.select(step);
      return source->read(plan);
    };
  };
}

std::function<Pass::Read()> LoaderCore::map_reads(const PassPlan& plan) const {
  auto cursor = plan.batches->start();
  for (int64_t i = 0; i < plan.skip; ++i)
    if (!cursor()) break;
  return [cursor = std::move(cursor), source = map_, seed = plan.seed, step = plan.skip]() mutable -> Pass::Read {
    auto indices = cursor();
    if (!indices) return {};
    return [indices = std::move(*indices), source, seed, step = step++]() -> std::optional<LoadedBatch> {
      const OwnNumbers numbers(*seed, step);
      return LoadedBatch{source->fetch(indices), std::nullopt};
    };
  };
}

std::shared_ptr<WorkerPool> LoaderCore::pool() {
  if (options_.num_workers == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  if (!pool_) pool_ = std::make_shared<WorkerPool>(stream_ ? 1 : options_.num_workers);
  return pool_;
}

int64_t known(const std::optional<int64_t>& value, const char* what) {
  if (!value)
    raise<ConfigError>(
        "DataLoader: {} of a loader whose length is unknown, expected a data set and a sampler with size(); count the "
        "batches in the loop, or give the stream a size()",
        what);
  return *value;
}

}  // namespace detail

AnyDataLoader::AnyDataLoader(std::shared_ptr<detail::MapSource> source, DataLoaderOptions options,
                             const detail::MakeSampler& make_sampler)
    : core_(detail::map_core(std::move(source), std::move(options), make_sampler)) {}

AnyDataLoader::AnyDataLoader(std::shared_ptr<detail::StreamSource> source, DataLoaderOptions options,
                             const detail::MakeSampler&)
    : core_(detail::stream_core(std::move(source), std::move(options))) {}

int64_t AnyDataLoader::size() const {
  return std::max<int64_t>(detail::known(core_->num_batches(), "size()") - skip_, 0);
}

const DataLoaderOptions& AnyDataLoader::options() const { return core_->options(); }

std::optional<int64_t> AnyDataLoader::batch_size() const {
  const auto& batches = core_->batches();
  return batches ? batches->batch_size() : options().batch_size;
}

void AnyDataLoader::set_epoch(int64_t epoch) { core_->set_epoch(epoch); }

std::shared_ptr<detail::BatchCursor> AnyDataLoader::start() const {
  detail::PassPlan plan = core_->whole();
  plan.skip = skip_;
  return std::make_shared<detail::PlainCursor>(core_->start(plan));
}

}  // namespace accelerate::data
