#pragma once

/// Loaders of a distributed program: which rank sees what, on which device, when the end is near, and where to resume.
/// Source: reference features table 1.4; conformance: prepared_dataloader.json, collective_ops.json ("shuffled"),
/// skip_batches.json.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/data/loader.hpp"
#include "accelerate/data/random.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/archive.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate::data {

struct PrepareDataLoaderOptions {
  DataLoaderConfiguration config = {};
  /// Batches come on `device`.
  bool put_on_device = true;
  /// Unset: PartialState's device.
  std::optional<at::Device> device = std::nullopt;
  /// Unset: PartialState's. Dispatching needs the real ones.
  std::optional<int64_t> num_processes = std::nullopt;
  std::optional<int64_t> process_index = std::nullopt;
  /// Generators that get rank 0's state at the start of each pass. `generator` is the sampler's.
  std::vector<RNGType> rng_types = {RNGType::generator};
};

/// Where a loader stands. Equal on all ranks but for the default generator, so rank 0's may be loaded everywhere.
struct ACCELERATE_API DataLoaderState {
  /// Pass that the loader is in, or that comes next.
  int64_t iteration = 0;
  /// Batches of that pass that the training loop has got; what was read ahead does not count.
  int64_t batches_yielded = 0;
  /// The sampler's generator at the start of the pass (uint8); empty when it has none.
  at::Tensor sampler_rng_state;
  /// LibTorch's default CPU generator at the start of the pass; empty between passes.
  at::Tensor default_rng_state;
  ACCELERATE_FIELDS(iteration, batches_yielded, sampler_rng_state, default_rng_state)

  /// A dictionary of the fields, for checkpoints.
  c10::IValue to_ivalue() const;
  /// @throws CheckpointError when a field is missing or has another type.
  static DataLoaderState from_ivalue(const c10::IValue& value);
};

namespace detail {

struct PreparedSettings {
  DataLoaderConfiguration config = {};
  std::optional<at::Device> device = std::nullopt;
  int64_t num_processes = 1, process_index = 0;
  bool dispatch = false;
  std::vector<RNGType> rng_types = {};
};

}  // namespace detail

/// What all prepared loaders have in common, whatever their batches are. Owned by PreparedDataLoader; Accelerator keeps
/// these to save and load states.
class ACCELERATE_API PreparedStatus : public LoaderStatus {
 public:
  PreparedStatus(detail::PreparedSettings settings, std::optional<at::Generator> generator,
                 std::optional<int64_t> batch_size, std::optional<int64_t> num_samples, bool drop_last, bool is_stream,
                 int64_t skip);

  bool end_of_dataloader() const override { return end_; }
  int64_t remainder() const override { return remainder_; }
  /// Passes that have been completed, or the epoch that was set.
  int64_t iteration() const { return iteration_; }
  void set_iteration(int64_t iteration) { iteration_ = iteration; }
  /// Samples per step over all ranks, unset when batches vary in size.
  std::optional<int64_t> total_batch_size() const;
  std::optional<int64_t> total_dataset_length() const { return num_samples_; }
  bool even_batches() const { return even_override_.value_or(settings_.config.even_batches); }
  /// Replaces even_batches from the next pass on; unset: back to the configuration's. False for streams and dispatched
  /// loaders, which stay as they are.
  bool override_even_batches(std::optional<bool> even);
  bool is_stream() const { return is_stream_; }
  bool dispatches() const { return settings_.dispatch; }
  const detail::PreparedSettings& settings() const { return settings_; }
  int64_t skip() const { return skip_; }

  DataLoaderState state_dict() const;
  /// The next pass goes on where the state was taken, in the order of that pass.
  void load_state_dict(const DataLoaderState& state);

 protected:
  /// Synchronises generators, resets the flags and announces the loader to GradientState. Collective.
  /// `start(skip)` begins reading; it runs with the generators as they were at the start of the pass.
  void begin_pass(const std::function<void(int64_t skip)>& start);
  void end_pass(bool completed) noexcept;
  void count_batch(bool last, const std::optional<int64_t>& remainder);

  detail::PreparedSettings settings_;

 private:
  std::optional<bool> even_override_;
  std::optional<at::Generator> generator_;
  std::optional<int64_t> batch_size_, num_samples_;
  bool drop_last_, is_stream_;
  int64_t skip_;
  int64_t iteration_ = 0;
  int64_t yielded_ = 0;
  bool end_ = false;
  int64_t remainder_ = -1;
  at::Tensor sampler_rng_state_, default_rng_state_;  // at the start of the pass
  std::optional<DataLoaderState> loaded_;
};

/// How rows of a dispatched batch are cut out for a rank. The default takes rows [begin, end) of tensors and of lists
/// without tensors.
template <class Batch>
using SliceFunction =
    std::function<Batch(const Batch& batch, int64_t begin, int64_t end, int64_t process_index, int64_t num_processes)>;

namespace detail {

ACCELERATE_API PreparedSettings resolve(const PrepareDataLoaderOptions& options, bool is_stream, bool can_shard,
                                        std::optional<int64_t> batch_size);
[[noreturn]] ACCELERATE_API void throw_not_archivable();
[[noreturn]] ACCELERATE_API void throw_reader_failed(int64_t rank, const std::string& what);
ACCELERATE_API std::string what_of(const std::exception_ptr& error);
/// The sampler that a prepared loader uses: seedable where the configuration asks for it, with a generator of its own
/// where ranks must agree on an order.
ACCELERATE_API std::shared_ptr<AnyBatchSampler> prepared_sampler(std::shared_ptr<AnyBatchSampler> batches,
                                                                 const PreparedSettings& settings);

/// Remembers the first `count` samples of the latest pass.
class ACCELERATE_API RecordingBatchSampler : public BatchSamplerWrapper {
 public:
  RecordingBatchSampler(std::shared_ptr<AnyBatchSampler> inner, int64_t count)
      : BatchSamplerWrapper(std::move(inner)), count_(count) {}
  Cursor<Indices> start() override;
  std::optional<int64_t> size() const override { return inner_->size(); }
  const Indices& first() const { return *first_; }

 private:
  int64_t count_;
  std::shared_ptr<Indices> first_ = std::make_shared<Indices>();
};

template <class Batch> using Feed = std::function<std::optional<Part<Batch>>()>;

/// Rank 0 reads, cuts nothing, and sends all ranks the whole batch with the rows of each; every rank keeps its own.
/// Collective.
template <class Batch> class DispatchFeed {
 public:
  /// @param first_rows  of a pass that does not start at its beginning: the rows that complete its last batch. Empty:
  /// the first ones that are read.
  DispatchFeed(std::shared_ptr<Pass<Batch>> pass, const PreparedSettings& settings, bool drop_last, bool sizes_vary,
               SliceFunction<Batch> slice, std::function<Batch()> first_rows)
      : pass_(std::move(pass)),
        ranks_(settings.num_processes),
        rank_(settings.process_index),
        split_(settings.config.split_batches),
        drop_last_(drop_last),
        sizes_vary_(sizes_vary),
        slice_(std::move(slice)),
        first_rows_(std::move(first_rows)) {}

  std::optional<Part<Batch>> operator()() {
    if (ended_) return std::nullopt;
    Batch batch{};
    Header header;
    if (rank_ == 0) {
      std::exception_ptr error;
      try {
        header = next_batch(batch);
      } catch (...) {
        error = std::current_exception();
        header = {.failure = what_of(error)};
      }
      ArchiveWriter writer;
      writer.write(header);
      if (header.failure.empty() && !header.end) writer.write(batch);
      comm::broadcast_bytes(writer.take(), 0);
      if (error) {
        ended_ = true;
        std::rethrow_exception(error);
      }
    } else {
      const std::string bytes = comm::broadcast_bytes("", 0);
      ArchiveReader reader(bytes);
      reader.read(header);
      if (header.failure.empty() && !header.end) reader.read(batch);
    }
    ended_ = header.end || header.last || !header.failure.empty();
    if (!header.failure.empty()) throw_reader_failed(0, header.failure);
    if (header.end) return std::nullopt;
    const int64_t begin = header.bounds[static_cast<size_t>(rank_)],
                  end = header.bounds[static_cast<size_t>(rank_) + 1];
    return Part<Batch>{slice_ ? slice_(batch, begin, end, rank_, ranks_) : slice_rows(batch, begin, end, header.rows),
                       header.samples};
  }

 private:
  struct Header {
    std::string failure = {};          ///< not empty: rank 0 could not read
    bool end = false;                  ///< nothing more comes, and nothing with this
    bool last = false;                 ///< this batch is the last
    int64_t rows = 0;                  ///< rows of the batch that comes along
    int64_t samples = 0;               ///< of which are no repetitions
    std::vector<int64_t> bounds = {};  ///< rank r's rows are [bounds[r], bounds[r + 1])
    ACCELERATE_FIELDS(failure, end, last, rows, samples, bounds)
  };
  struct Group {
    Batch batch;
    std::vector<int64_t> part_rows;
  };

  Header next_batch(Batch& batch) {
    if (!begun_) ahead_ = read_group();
    begun_ = true;
    if (failed_) std::rethrow_exception(failed_);
    if (!ahead_) return {.end = true};
    Group group = std::move(*ahead_);
    try {
      ahead_ = read_group();  // to know whether this one is the last
    } catch (...) {
      failed_ = std::current_exception();  // belongs to the next batch
    }
    return share(std::move(group), !ahead_ && !failed_, batch);
  }

  std::optional<Group> read_group() {
    ahead_.reset();
    std::vector<Batch> parts;
    std::vector<int64_t> part_rows;
    const int64_t wanted = split_ ? 1 : ranks_;
    while (static_cast<int64_t>(parts.size()) < wanted) {
      auto part = pass_->next();
      if (!part) break;
      part_rows.push_back(rows_of(part->batch));
      parts.push_back(std::move(part->batch));
    }
    if (parts.empty() || (drop_last_ && static_cast<int64_t>(parts.size()) < wanted)) return std::nullopt;
    return Group{concat_rows(parts), std::move(part_rows)};
  }

  Header share(Group group, bool last, Batch& batch) {
    const int64_t samples = rows_of(group.batch);
    if (!first_ && !first_rows_) first_ = slice_rows(group.batch, 0, std::min(ranks_, samples), samples);
    Header header{.last = last, .rows = samples, .samples = samples, .bounds = {0}};
    if (sizes_vary_ && static_cast<int64_t>(group.part_rows.size()) == ranks_) {
      for (const int64_t rows : group.part_rows)
        header.bounds.push_back(header.bounds.back() + rows);  // a batch each, as the sampler made them
    } else {
      // Every rank must get something: an empty batch would leave it out of the next collective.
      if (samples < ranks_ || (last && samples % ranks_ != 0 && !drop_last_)) {
        header.rows = (samples + ranks_ - 1) / ranks_ * ranks_;
        group.batch = complete_rows(group.batch, first_rows_ ? first_rows_() : *first_, header.rows);
      }
      for (int64_t rank = 0; rank < ranks_; ++rank)
        header.bounds.push_back(header.bounds.back() + header.rows / ranks_ + (rank < header.rows % ranks_));
    }
    batch = std::move(group.batch);
    return header;
  }

  std::shared_ptr<Pass<Batch>> pass_;
  int64_t ranks_, rank_;
  bool split_, drop_last_, sizes_vary_;
  SliceFunction<Batch> slice_;
  std::function<Batch()> first_rows_;
  bool begun_ = false, ended_ = false;
  std::optional<Group> ahead_;
  std::exception_ptr failed_;
  std::optional<Batch> first_;
};

/// Streams that shard themselves may end at different steps on different ranks. Ranks tell each other how many samples
/// they have; when one runs short, the samples of that step are shared out again, so that all ranks do the same number
/// of steps. Collective.
template <class Batch> class AgreedFeed {
 public:
  AgreedFeed(std::shared_ptr<Pass<Batch>> pass, const PreparedSettings& settings, int64_t batch_size, bool drop_last)
      : pass_(std::move(pass)),
        ranks_(settings.num_processes),
        rank_(settings.process_index),
        batch_size_(batch_size),
        drop_last_(drop_last) {}

  std::optional<Part<Batch>> operator()() {
    if (ended_) return std::nullopt;
    std::optional<Batch> mine;
    std::exception_ptr error;
    try {
      if (auto part = pass_->next()) mine = std::move(part->batch);
    } catch (...) {
      error = std::current_exception();
    }
    const std::pair<int64_t, std::string> report{mine ? rows_of(*mine) : 0, error ? what_of(error) : ""};
    int64_t samples = 0, full = 0;
    std::optional<std::pair<int64_t, std::string>> failure;
    int64_t rank = 0;
    for (const std::string& bytes : comm::all_gather_bytes(to_bytes(report))) {
      const auto [rows, what] = from_bytes<std::pair<int64_t, std::string>>(bytes);
      samples += rows;
      full += rows == batch_size_;
      if (!what.empty() && !failure) failure = {rank, what};
      ++rank;
    }
    if (failure || samples == 0 || (drop_last_ && full < ranks_)) ended_ = true;
    if (error) std::rethrow_exception(error);
    if (failure) throw_reader_failed(failure->first, failure->second);
    if (ended_) return std::nullopt;
    if (full == ranks_) return Part<Batch>{std::move(*mine), drop_last_ ? -1 : 0};
    std::vector<Batch> all;
    for (const std::string& bytes : comm::all_gather_bytes(to_bytes(mine)))
      if (auto batch = from_bytes<std::optional<Batch>>(bytes)) all.push_back(std::move(*batch));
    const int64_t each = (samples + ranks_ - 1) / ranks_;
    const Batch joined = concat_rows(all);
    const Batch whole = complete_rows(joined, joined, each * ranks_);
    return Part<Batch>{slice_rows(whole, each * rank_, each * (rank_ + 1), each * ranks_), samples};
  }

 private:
  std::shared_ptr<Pass<Batch>> pass_;
  int64_t ranks_, rank_, batch_size_;
  bool drop_last_;
  bool ended_ = false;
};

/// State and plan of a prepared loader.
template <class Batch>
class PreparedLoader : public PreparedStatus, public std::enable_shared_from_this<PreparedLoader<Batch>> {
 public:
  PreparedLoader(std::shared_ptr<LoaderCore<Batch>> core, PreparedSettings settings,
                 std::shared_ptr<AnyBatchSampler> batches, SliceFunction<Batch> slice, int64_t skip)
      : PreparedStatus(settings, batches ? batches->generator() : std::nullopt,
                       batches ? batches->batch_size() : core->options.batch_size,
                       batches && batches->num_samples() ? batches->num_samples() : core->dataset_size,
                       batches ? batches->drop_last() : core->options.drop_last, core->is_stream(), skip),
        core_(std::move(core)),
        batches_(std::move(batches)),
        slice_(std::move(slice)) {
    if constexpr (!Archivable<Batch>::value)
      if (settings.dispatch || self_sharding()) throw_not_archivable();
    if (batches_ && !settings_.dispatch) (void)sharded_sampler();  // its checks
    if (core_->is_stream() && settings_.config.split_batches) (void)stream_plan();
  }

  std::shared_ptr<PreparedLoader> skipping(int64_t num_batches) const {
    auto copy = std::make_shared<PreparedLoader>(core_, settings_, batches_, slice_, skip() + num_batches);
    copy->set_iteration(iteration());
    return copy;
  }

  void set_epoch(int64_t epoch) {
    set_iteration(epoch);
    if (batches_) batches_->set_epoch(epoch);
    core_->set_epoch(epoch);
  }

  std::optional<int64_t> size() const {
    std::optional<int64_t> all;
    const bool drop = batches_ ? batches_->drop_last() : core_->options.drop_last;
    const auto divided = [drop](int64_t count, int64_t by) { return drop ? count / by : (count + by - 1) / by; };
    if (settings_.num_processes == 1 || settings_.dispatch) {
      const auto whole = batches_ ? batches_->size() : core_->num_batches();
      if (whole) all = settings_.config.split_batches ? *whole : divided(*whole, settings_.num_processes);
    } else if (batches_) {
      all = sharded_sampler()->size();
    } else if (!self_sharding() && core_->dataset_size) {
      all = divided(*core_->dataset_size, stream_plan().group);
    }
    if (all) all = std::max<int64_t>(*all - skip(), 0);
    return all;
  }

  /// One pass; the running one, if any, ends.
  class Source {
   public:
    explicit Source(std::shared_ptr<PreparedLoader> loader) : loader_(std::move(loader)) {
      loader_->begin_pass([this](int64_t skip) { feed_ = loader_->make_feed(skip); });
      active_ = true;
    }
    ~Source() { stop(false); }
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;

    Batch* next() {
      if (!active_) return nullptr;
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
      return &current_->batch;
    }

    void stop(bool completed) noexcept {
      if (!active_) return;
      active_ = false;
      feed_ = nullptr;
      loader_->end_pass(completed);
    }

   private:
    std::optional<Part<Batch>> read() {
      auto part = feed_();
      if (part && loader_->settings_.device)
        part->batch = send_to_device(part->batch, *loader_->settings_.device, loader_->settings_.config.non_blocking);
      return part;
    }

    std::shared_ptr<PreparedLoader> loader_;
    Feed<Batch> feed_;
    bool active_ = false, begun_ = false;
    std::optional<Part<Batch>> current_, ahead_;
    std::exception_ptr failed_;
  };

  std::shared_ptr<Source> start() {
    if (const auto running = running_.lock()) running->stop(false);
    auto source = std::make_shared<Source>(this->shared_from_this());
    running_ = source;
    return source;
  }

 private:
  /// The stream reads its own share only.
  bool self_sharding() const {
    return core_->is_stream() && !settings_.dispatch && settings_.num_processes > 1 && core_->stream->can_shard();
  }

  std::shared_ptr<AnyBatchSampler> sharded_sampler() const {
    const auto& config = settings_.config;
    if (settings_.num_processes == 1) return batches_;
    return std::make_shared<BatchSamplerShard>(batches_, ShardOptions{.num_processes = settings_.num_processes,
                                                                      .process_index = settings_.process_index,
                                                                      .split_batches = config.split_batches,
                                                                      .even_batches = even_batches()});
  }

  StreamPlan stream_plan() const {
    const int64_t ranks = settings_.num_processes;
    if (ranks == 1 || settings_.dispatch) return core_->whole().stream;
    StreamPlan plan = shard_plan({.batch_size = core_->options.batch_size,
                                  .drop_last = core_->options.drop_last,
                                  .num_processes = ranks,
                                  .process_index = settings_.process_index,
                                  .split_batches = settings_.config.split_batches});
    if (!self_sharding()) return plan;
    const int64_t share = plan.end - plan.begin;
    return {.group = share,
            .begin = 0,
            .end = share,
            .chunk = share,
            .drop_last = core_->options.drop_last,
            .rank = settings_.process_index,
            .world_size = ranks};
  }

  Feed<Batch> make_feed(int64_t skip) {
    set_epoch(iteration());
    const int64_t ranks = settings_.num_processes;
    PassPlan plan{.skip = skip, .generator = settings_.dispatch ? std::nullopt : core_->options.generator};
    if (core_->is_stream()) plan.stream = stream_plan();
    else plan.batches = settings_.dispatch ? batches_ : sharded_sampler();
    if (settings_.dispatch) {
      if (!settings_.config.split_batches) plan.skip *= ranks;
      // Only rank 0 reads, but all draw the same random numbers.
      std::shared_ptr<Pass<Batch>> pass;
      std::function<Batch()> first_rows;
      if (settings_.process_index != 0) {
        draw_base_seed(plan.generator);
      } else {
        if (plan.skip > 0) first_rows = first_rows_of(plan);
        pass = core_->start(plan);
      }
      if constexpr (Archivable<Batch>::value) {
        const bool sizes_vary = batches_ && !batches_->batch_size();
        return DispatchFeed<Batch>(std::move(pass), settings_,
                                   batches_ ? batches_->drop_last() : core_->options.drop_last, sizes_vary, slice_,
                                   std::move(first_rows));
      }
    }
    auto pass = core_->start(plan);
    if constexpr (Archivable<Batch>::value)
      if (self_sharding() && settings_.config.even_batches)
        return AgreedFeed<Batch>(std::move(pass), settings_, plan.stream.group, core_->options.drop_last);
    return [pass = std::move(pass)] { return pass->next(); };
  }

  /// The first rows of a pass of which `plan` leaves out the start. Streams are read for them, then rewound.
  std::function<Batch()> first_rows_of(PassPlan& plan) {
    const int64_t ranks = settings_.num_processes;
    if (plan.batches) {
      const auto recorder = std::make_shared<RecordingBatchSampler>(plan.batches, ranks);
      plan.batches = recorder;
      return [recorder, fetch = core_->fetch] { return (*fetch)(recorder->first()); };
    }
    PassPlan from_start = plan;
    from_start.skip = 0;
    from_start.draw_base_seed = false;
    const auto pass = core_->start(from_start);
    std::vector<Batch> parts;
    for (int64_t rows = 0; rows < ranks; rows += rows_of(parts.back())) {
      auto part = pass->next();
      if (!part) break;
      parts.push_back(std::move(part->batch));
    }
    if (parts.empty()) return {};
    return [first = concat_rows(parts)] { return first; };
  }

  std::shared_ptr<LoaderCore<Batch>> core_;
  std::shared_ptr<AnyBatchSampler> batches_;
  SliceFunction<Batch> slice_;
  std::weak_ptr<Source> running_;
};

}  // namespace detail

/// A loader that `prepare` has made ready for this rank: its share of the data, on its device.
///
/// It reads one batch ahead, so that `end_of_dataloader()` is true while the loop holds the last batch. Starting a pass
/// is collective (generators are synchronised), and with dispatching every batch is. Streams that shard themselves are
/// asked for their share and exchange one small message per step; with even_batches = false they exchange nothing and
/// ranks may do different numbers of steps. Copies are cheap and share their state. Leaving the loop early is fine;
/// starting a new pass ends the one that runs.
template <class Batch> class PreparedDataLoader {
 public:
  using batch_type = Batch;
  explicit PreparedDataLoader(std::shared_ptr<detail::PreparedLoader<Batch>> impl) : impl_(std::move(impl)) {}

  auto begin() const {
    return detail::BatchIterator<Batch, typename detail::PreparedLoader<Batch>::Source>(impl_->start());
  }
  std::default_sentinel_t end() const { return {}; }

  /// Batches of a pass on this rank. @throws ConfigError when it can't be known.
  int64_t size() const {
    const auto size = impl_->size();
    if (!size) detail::throw_unsized("size()");
    return *size;
  }
  /// Samples per step over all ranks. @throws ConfigError when batches vary in size.
  int64_t total_batch_size() const {
    const auto size = impl_->total_batch_size();
    if (!size) detail::throw_unsized("total_batch_size()");
    return *size;
  }
  /// Samples of a pass over all ranks. @throws ConfigError when unknown.
  int64_t total_dataset_length() const {
    const auto length = impl_->total_dataset_length();
    if (!length) detail::throw_unsized("total_dataset_length()");
    return *length;
  }
  /// Chooses the epoch of the next pass, for samplers and data sets that depend on it.
  void set_epoch(int64_t epoch) { impl_->set_epoch(epoch); }
  int64_t iteration() const { return impl_->iteration(); }
  bool end_of_dataloader() const { return impl_->end_of_dataloader(); }
  int64_t remainder() const { return impl_->remainder(); }

  /// Where the loop stands: the next pass of a loader that loads this gives exactly the batches that the loop has not
  /// got, in the same order.
  DataLoaderState state_dict() const { return impl_->state_dict(); }
  void load_state_dict(const DataLoaderState& state) { impl_->load_state_dict(state); }

  bool override_even_batches(std::optional<bool> even) { return impl_->override_even_batches(even); }
  /// The part that does not depend on the type of the batches.
  std::shared_ptr<PreparedStatus> status() const { return impl_; }
  const std::shared_ptr<detail::PreparedLoader<Batch>>& impl() const { return impl_; }

 private:
  std::shared_ptr<detail::PreparedLoader<Batch>> impl_;
};

/// Makes a loader ready for this rank. Shuffled loaders of several ranks get a generator of their own, seeded from
/// LibTorch's default one, which `begin()` synchronises. Not collective. `dispatch_batches` unset means: dispatch
/// streams that can't shard themselves, when put_on_device is set.
/// @throws ConfigError for settings that contradict each other or the loader (split_batches without a batch size that
/// ranks can share, ...).
template <class Batch>
PreparedDataLoader<Batch> prepare_data_loader(const DataLoader<Batch>& loader,
                                              const PrepareDataLoaderOptions& options = {},
                                              SliceFunction<Batch> slice_fn_for_dispatch = {}) {
  const auto& core = loader.core();
  const auto settings = detail::resolve(options, core->is_stream(), core->is_stream() && core->stream->can_shard(),
                                        core->batches ? core->batches->batch_size() : core->options.batch_size);
  auto batches = core->batches ? detail::prepared_sampler(core->batches, settings) : nullptr;
  return PreparedDataLoader<Batch>(std::make_shared<detail::PreparedLoader<Batch>>(
      core, settings, std::move(batches), std::move(slice_fn_for_dispatch), loader.skip()));
}

/// A loader that leaves out the first steps of each pass and goes on with the same epoch. The original is not changed.
template <class Batch>
PreparedDataLoader<Batch> skip_first_batches(const PreparedDataLoader<Batch>& loader, int64_t num_batches) {
  return PreparedDataLoader<Batch>(loader.impl()->skipping(num_batches));
}

}  // namespace accelerate::data
