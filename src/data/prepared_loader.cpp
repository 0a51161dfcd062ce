#include "prepared_loader.hpp"
#include "utils/trace.hpp"
#include "utils/wait_clock.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace accelerate::data::detail {
namespace {

/// Remembers the first `count` samples of the latest pass.
class RecordingBatchSampler : public BatchSamplerWrapper {
 public:
  RecordingBatchSampler(std::shared_ptr<AnyBatchSampler> inner, int64_t count)
      : BatchSamplerWrapper(std::move(inner)), count_(count) {}
  Cursor<Indices> start() override {
    first_ = std::make_shared<Indices>();
    return [next = inner_->start(), first = first_, count = static_cast<size_t>(count_)] {
      auto batch = next();
      for (size_t i = 0; batch && i < batch->size() && first->size() < count; ++i) first->push_back((*batch)[i]);
      return batch;
    };
  }
  std::optional<int64_t> size() const override { return inner_->size(); }
  const Indices& first() const { return *first_; }

 private:
  int64_t count_;
  std::shared_ptr<Indices> first_ = std::make_shared<Indices>();
};

/// For traces: which of the process's loaders it is.
std::string next_name() {
  static std::atomic<int64_t> made{0};
  return "loader" + std::to_string(made++);
}

/// Batches of the samples that are left. @param batches  a BatchSampler
std::shared_ptr<AnyBatchSampler> without_first(const AnyBatchSampler& batches, int64_t samples) {
  const auto& fixed = dynamic_cast<const BatchSampler&>(batches);
  return std::make_shared<BatchSampler>(std::make_shared<SkipSampler>(fixed.sampler(), samples), *fixed.batch_size(),
                                        fixed.drop_last());
}

}  // namespace

/// One pass.
class PreparedLoader::Cursor final : public BatchCursor {
 public:
  explicit Cursor(std::shared_ptr<PreparedLoader> loader) : loader_(std::move(loader)) {
    loader_->begin_pass([this](int64_t samples, int64_t steps) { feed_ = loader_->make_feed(samples, steps); });
    active_ = true;
  }
  ~Cursor() override { stop(false); }
  Cursor(const Cursor&) = delete;
  Cursor& operator=(const Cursor&) = delete;

  const AnyBatch* next() override {
    if (!active_) return nullptr;
    const WaitClock waiting(counts::Count::data_wait_ns);
    try {
      if (!std::exchange(begun_, true)) ahead_ = read();
      current_ = std::move(ahead_);
      ahead_.reset();
      if (!current_) {
        if (failed_) std::rethrow_exception(failed_);
        stop(true);
        return nullptr;
      }
      try {
        ahead_ = read();  // one ahead, to know which batch is the last
      } catch (...) {
        failed_ = std::current_exception();  // belongs to the batch after this one
      }
    } catch (...) {
      stop(false);
      throw;
    }
    loader_->count_batch(!ahead_ && !failed_, current_->remainder);
    count();
    return &current_->batch;
  }

  void stop(bool completed) noexcept {
    if (!active_) return;
    active_ = false;
    feed_ = nullptr;
    loader_->end_pass(completed);
  }

 private:
  /// What the batch that the loop gets now went through.
  void count() const {
    using counts::Count;
    const PreparedSettings& settings = loader_->settings();
    counts::add(Count::batches);
    if (settings.num_processes == 1) return;
    if (settings.config.split_batches) counts::add(Count::batches_split);
    if (settings.dispatch) counts::add(Count::batches_dispatched);
    else if (loader_->is_stream()) counts::add(Count::stream_batches);
  }

  std::optional<LoadedBatch> read() {
    trace::Span span(trace::Kind::loader_wait, loader_->name_);
    auto loaded = feed_->next();
    if (loaded && trace::recording()) span.set_bytes(loader_->core_->ops().bytes(loaded->batch));
    const PreparedSettings& settings = loader_->settings();
    if (loaded && settings.device)
      loader_->core_->ops().to_device(loaded->batch, *settings.device, settings.config.non_blocking);
    return loaded;
  }

  std::shared_ptr<PreparedLoader> loader_;
  std::unique_ptr<Feed> feed_;
  bool active_ = false, begun_ = false;
  std::optional<LoadedBatch> current_, ahead_;
  std::exception_ptr failed_;
};

PreparedLoader::PreparedLoader(std::shared_ptr<LoaderCore> core, const PreparedSettings& settings,
                               const std::shared_ptr<AnyBatchSampler>& batches, SliceFunction<AnyBatch> slice,
                               int64_t skip)
    : LoaderProgress(*core, settings, batches, skip),
      core_(std::move(core)),
      slice_(std::move(slice)),
      name_(next_name()) {
  if (!core_->ops().archivable() && (settings.dispatch || self_sharding())) throw_not_archivable();
  if (batches && !settings.dispatch) (void)sharded_sampler(batches);  // its checks
  if (core_->is_stream() && settings.config.split_batches) (void)stream_plan();
}

void PreparedLoader::set_epoch(int64_t epoch) {
  set_iteration(epoch);
  if (batches()) batches()->set_epoch(epoch);
  core_->set_epoch(epoch);
}

std::optional<int64_t> PreparedLoader::size() const {
  std::optional<int64_t> all;
  const auto divided = [drop = drop_last()](int64_t count, int64_t by) {
    return drop ? count / by : (count + by - 1) / by;
  };
  if (settings().num_processes == 1 || settings().dispatch) {
    const auto whole = batches() ? batches()->size() : core_->num_batches();
    if (whole) all = settings().config.split_batches ? *whole : divided(*whole, settings().num_processes);
  } else if (batches()) {
    all = sharded_sampler(batches())->size();
  } else if (!self_sharding() && core_->dataset_size()) {
    all = divided(*core_->dataset_size(), stream_plan().group);
  }
  if (all) all = std::max<int64_t>(*all - skip(), 0);
  return all;
}

std::shared_ptr<PreparedStatus> PreparedLoader::skipping(int64_t num_batches) const {
  auto copy = std::make_shared<PreparedLoader>(core_, settings(), batches(), slice_, skip() + num_batches);
  copy->set_iteration(iteration());
  return copy;
}

std::shared_ptr<BatchCursor> PreparedLoader::start() {
  if (const auto running = running_.lock()) running->stop(false);
  auto cursor = std::make_shared<Cursor>(shared_from_this());
  running_ = cursor;
  return cursor;
}

bool PreparedLoader::self_sharding() const {
  return !settings().dispatch && settings().num_processes > 1 && core_->can_shard();
}

std::shared_ptr<AnyBatchSampler> PreparedLoader::sharded_sampler(
    const std::shared_ptr<AnyBatchSampler>& batches) const {
  if (settings().num_processes == 1) return batches;
  return std::make_shared<BatchSamplerShard>(batches, ShardOptions{.num_processes = settings().num_processes,
                                                                   .process_index = settings().process_index,
                                                                   .split_batches = settings().config.split_batches,
                                                                   .even_batches = even_batches()});
}

StreamPlan PreparedLoader::stream_plan() const {
  const int64_t ranks = settings().num_processes;
  if (ranks == 1 || settings().dispatch) return core_->whole().stream;
  const DataLoaderOptions& options = core_->options();
  const StreamPlan plan = shard_plan({.batch_size = options.batch_size,
                                      .drop_last = options.drop_last,
                                      .num_processes = ranks,
                                      .process_index = settings().process_index,
                                      .split_batches = settings().config.split_batches});
  if (!self_sharding()) return plan;
  const int64_t share = plan.end - plan.begin;
  return {.group = share,
          .begin = 0,
          .end = share,
          .chunk = share,
          .drop_last = options.drop_last,
          .rank = settings().process_index,
          .world_size = ranks};
}

std::unique_ptr<Feed> PreparedLoader::make_feed(int64_t samples, int64_t steps) {
  set_epoch(iteration());
  const bool dispatch = settings().dispatch;
  PassPlan plan{.skip = steps, .generator = dispatch ? std::nullopt : core_->options().generator};
  if (core_->is_stream()) {
    plan.stream = stream_plan();
    plan.stream.skip_samples = samples;
  } else {
    const auto all = samples == 0 ? batches() : without_first(*batches(), samples);
    plan.batches = dispatch ? all : sharded_sampler(all);
  }
  if (dispatch) return make_dispatch_feed(plan);
  auto pass = core_->start(plan);
  if (self_sharding() && settings().config.even_batches)
    return std::make_unique<AgreedFeed>(core_->ops(), std::move(pass), settings(), plan.stream.group,
                                        core_->options().drop_last);
  return pass;
}

std::unique_ptr<Feed> PreparedLoader::make_dispatch_feed(PassPlan& plan) {
  if (!settings().config.split_batches) plan.skip *= settings().num_processes;
  // Only rank 0 reads, but all draw the same random numbers.
  std::unique_ptr<Pass> pass;
  std::function<AnyBatch()> first_rows;
  if (settings().process_index != 0) {
    draw_base_seed(plan.generator);
  } else {
    if (plan.skip > 0) first_rows = first_rows_of(plan);
    pass = core_->start(plan);
  }
  return std::make_unique<DispatchFeed>(core_->ops(), std::move(pass), settings(),
                                        DispatchFeed::Plan{.drop_last = drop_last(),
                                                           .sizes_vary = batches() && !batches()->batch_size(),
                                                           .slice = slice_,
                                                           .first_rows = std::move(first_rows)});
}

std::function<AnyBatch()> PreparedLoader::first_rows_of(PassPlan& plan) {
  const int64_t ranks = settings().num_processes;
  if (plan.batches) {
    const auto recorder = std::make_shared<RecordingBatchSampler>(plan.batches, ranks);
    plan.batches = recorder;
    return [recorder, source = core_->map()] { return source->fetch(recorder->first()); };
  }
  const BatchOps& ops = core_->ops();
  PassPlan from_start = plan;
  from_start.skip = 0;
  from_start.draw_base_seed = false;
  const auto pass = core_->start(from_start);
  std::vector<AnyBatch> batches;
  for (int64_t rows = 0; rows < ranks; rows += ops.rows(batches.back())) {
    auto loaded = pass->next();
    if (!loaded) break;
    batches.push_back(std::move(loaded->batch));
  }
  if (batches.empty()) return {};
  const auto first = std::make_shared<AnyBatch>(ops.concat(batches));
  return [first, &ops] { return ops.concat(std::vector<const AnyBatch*>{first.get()}); };
}

std::shared_ptr<PreparedStatus> prepare(const AnyDataLoader& loader, const PrepareDataLoaderOptions& options,
                                        SliceFunction<AnyBatch> slice) {
  const auto& core = loader.core();
  const PreparedSettings settings = resolve(options, *core);
  counts::add(counts::Count::loaders);
  return std::make_shared<PreparedLoader>(core, settings, prepared_sampler(core->batches(), settings), std::move(slice),
                                          loader.skip());
}

}  // namespace accelerate::data::detail
