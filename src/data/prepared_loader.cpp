#include "prepared_loader.hpp"

#include "accelerate/comm.hpp"
#include "agreed_start.hpp"
#include "data/counts.hpp"
#include "draws.hpp"
#include "observe/save_points.hpp"
#include "observe/trace.hpp"
#include "observe/wait_clock.hpp"
#include "own_numbers.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace accelerate::data::detail {
namespace {

/// Remembers the first batches of the latest pass, until they have `count` samples.
class RecordingBatchSampler : public BatchSamplerWrapper {
 public:
  RecordingBatchSampler(std::shared_ptr<AnyBatchSampler> inner, int64_t count)
      : BatchSamplerWrapper(std::move(inner)), count_(count) {}
  Cursor<Indices> start() override {
    first_ = std::make_shared<std::vector<Indices>>();
    return [next = inner_->start(), first = first_, left = count_]() mutable {
      auto batch = next();
      if (batch && left > 0) {
        left -= static_cast<int64_t>(batch->size());
        first->push_back(*batch);
      }
      return batch;
    };
  }
  std::optional<int64_t> size() const override { return inner_->size(); }
  const std::vector<Indices>& first() const { return *first_; }

 private:
  int64_t count_;
  std::shared_ptr<std::vector<Indices>> first_ = std::make_shared<std::vector<Indices>>();
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
    if (replaced_)
      raise<ConfigError>(
          "DataLoader: a loop over a prepared loader asked for its next batch after another loop over the same loader "
          "had begun and ended it, expected one at a time because a loader has one position; prepare a second loader "
          "of the same data for the inner loop");
    if (!active_) return nullptr;
    // After the last batch an evaluation may follow, which a run that goes on from here would leave out.
    if (ahead_ || failed_) save_points::pass([this] { stop(true); });
    const WaitClock waiting(RunCount::data_wait_ns);
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
    const bool last = !ahead_ && !failed_;
    loader_->count_batch(last, last && !current_->remainder ? loader_->rest_of_pass() : current_->remainder);
    count();
    return &current_->batch;
  }

  /// Another pass begins.
  void replace() noexcept {
    replaced_ = active_;
    stop(false);
  }

  void stop(bool completed) noexcept {
    if (!active_) return;
    active_ = false;
    feed_ = nullptr;
    loader_->end_pass(completed);
  }

 private:
  /// Counts the treatment of the batch that the loop gets now.
  void count() const {
    const PreparedSettings& settings = loader_->settings();
    counts::add(DataCount::batches);
    if (settings.num_processes == 1) return;
    if (settings.config.split_batches) counts::add(DataCount::batches_split);
    if (settings.dispatch) counts::add(DataCount::batches_dispatched);
    else if (loader_->is_stream()) counts::add(DataCount::stream_batches);
  }

  std::optional<LoadedBatch> read() {
    trace::Span span(trace::SpanKind::loader_wait, loader_->name_);
    auto loaded = feed_->next();
    if (loaded && trace::recording()) span.set_bytes(loader_->core_->ops().bytes(loaded->batch));
    const PreparedSettings& settings = loader_->settings();
    if (loaded && settings.device)
      loader_->core_->ops().to_device(loaded->batch, *settings.device, settings.config.non_blocking);
    return loaded;
  }

  std::shared_ptr<PreparedLoader> loader_;
  std::unique_ptr<Feed> feed_;
  bool active_ = false, begun_ = false, replaced_ = false;
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
  if (const auto running = running_.lock()) running->replace();
  if (between_passes()) save_points::pass(nullptr);
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
    plan.batches = dispatch ? all : sharded_sampler(watched(all));
  }
  if (dispatch) return make_dispatch_feed(plan);
  auto pass = agrees_on_starts() ? start_together(plan) : core_->start(plan);
  *plan.seed = seed_of_epoch().value_or(*plan.seed);
  // Streams shuffle by these numbers, too, before ranks take their share: there they stay alike.
  if (!core_->is_stream()) *plan.seed = seed_of_rank(*plan.seed, settings().process_index);
  if (self_sharding() && settings().config.even_batches)
    return std::make_unique<AgreedFeed>(core_->ops(), std::move(pass), settings(), plan.stream.group,
                                        core_->options().drop_last);
  return pass;
}

std::shared_ptr<AnyBatchSampler> PreparedLoader::watched(const std::shared_ptr<AnyBatchSampler>& batches) {
  // Enough to tell one random order from another; with batches of any size it's no more than workers read ahead.
  constexpr int64_t kCompared = 256;
  const int64_t batches_per_step = settings().config.split_batches ? 1 : settings().num_processes;
  watched_ = std::make_shared<WatchedBatchSampler>(batches, batches_per_step, agrees_on_starts() ? kCompared : 0);
  return watched_;
}

bool PreparedLoader::agrees_on_starts() const {
  return settings().num_processes > 1 && comm::world_size() > 1 && !settings().dispatch && !self_sharding();
}

std::unique_ptr<Pass> PreparedLoader::start_together(PassPlan& plan) {
  std::unique_ptr<Pass> pass;
  PassStart mine;
  try {
    pass = core_->start(plan);
    mine = {.seed = *plan.seed, .dataset_size = core_->dataset_size()};
    if (plan.batches) {
      mine.num_batches = watched_->size();
      mine.order = watched_->seen();
    }
  } catch (...) {
    mine.failed = std::current_exception();  // the others wait to hear of it
  }
  // One rank's for all: a checkpoint has its generators, and ranks get different numbers out of it.
  *plan.seed = agree_on_start(mine);
  return pass;
}

std::optional<int64_t> PreparedLoader::seed_of_epoch() const {
  const auto fixed = std::dynamic_pointer_cast<BatchSampler>(batches());
  const auto seedable = fixed ? std::dynamic_pointer_cast<SeedableRandomSampler>(fixed->sampler()) : nullptr;
  if (!seedable || !seedable->generator()) return std::nullopt;
  return static_cast<int64_t>(seedable->generator()->current_seed());
}

std::optional<int64_t> PreparedLoader::rest_of_pass() const {
  if (!watched_ || drop_last() || !watched_->seen().ended) return std::nullopt;
  const OrderSeen& seen = watched_->seen();
  if (const auto total = total_batch_size()) return seen.samples % *total;
  const int64_t per_step = settings().config.split_batches ? 1 : settings().num_processes;
  return seen.batches % per_step == 0 ? 0 : seen.samples_of_step;
}

std::unique_ptr<Feed> PreparedLoader::make_dispatch_feed(PassPlan& plan) {
  if (!settings().config.split_batches) plan.skip *= settings().num_processes;
  // Only rank 0 reads, but all draw the same random numbers.
  *plan.seed = draw_seed(plan.generator);
  plan.draw_seed = false;
  std::unique_ptr<Pass> pass;
  std::function<AnyBatch()> first_rows;
  if (comm::rank() == 0) {
    if (plan.skip > 0) first_rows = first_rows_of(plan);
    pass = core_->start(plan);
    *plan.seed = seed_of_epoch().value_or(*plan.seed);
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
    return [recorder, source = core_->map(), seed = plan.seed] {
      std::vector<AnyBatch> batches;
      for (const Indices& indices : recorder->first()) {
        const OwnNumbers numbers(*seed, static_cast<int64_t>(batches.size()));
        batches.push_back(source->fetch(indices));
      }
      return batches.size() == 1 ? std::move(batches[0]) : source->ops().concat(batches);
    };
  }
  const BatchOps& ops = core_->ops();
  PassPlan from_start = plan;
  from_start.skip = 0;
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
  if (slice && settings.num_processes > 1 && !settings.dispatch)
    throw ConfigError(
        "prepare_data_loader: found a slice_fn_for_dispatch for a loader that does not dispatch, expected one of which "
        "rank 0 reads the batches; set DataLoaderConfiguration::dispatch_batches = true, or leave the function out");
  counts::add(DataCount::loaders);
  return std::make_shared<PreparedLoader>(core, settings, prepared_sampler(core->batches(), settings), std::move(slice),
                                          loader.skip());
}

}  // namespace accelerate::data::detail
