// Prepared loaders in real processes: dispatching, streams that shard themselves, synchronised shuffling, errors on one
// rank.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/data.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/archive.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate::data;
using namespace datasets;
using accelerate::DataLoaderConfiguration;
using accelerate::GradientState;
using accelerate::PartialState;

template <class Loader> auto prepared(const Loader& loader, DataLoaderConfiguration config = {}) {
  return prepare_data_loader(loader, {.config = config});
}

/// The samples of a pass that gather_for_metrics keeps, over all ranks.
template <class Loader> std::vector<int64_t> gathered(Loader& loader) {
  const GradientState gradients;
  std::vector<int64_t> all;
  for (auto& batch : loader) {
    auto joined = accelerate::gather(batch);
    if (gradients.end_of_dataloader() && gradients.remainder() > 0) joined = joined.slice(0, 0, gradients.remainder());
    for (int64_t value : values(joined)) all.push_back(value);
  }
  return all;
}
std::vector<int64_t> range(int64_t n) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(i);
  return all;
}

RANKS_TEST(DataDist, OneSampleAndNoneOnManyRanks, 2, 3) {
  const PartialState state;
  for (const bool dispatch : {false, true})
    for (const int64_t n : {0, 1}) {
      const DataLoaderConfiguration config{.dispatch_batches = dispatch};
      auto map = prepared(DataLoader(numbers(n), {.batch_size = 2}), config);
      auto stream = prepared(DataLoader(Stream{n}, {.batch_size = 2}), config);
      EXPECT_EQ(gathered(map), range(n));
      EXPECT_EQ(gathered(stream), range(n));
      EXPECT_EQ(batches_of(map).size(), static_cast<size_t>(n));
      auto dropping = prepared(DataLoader(numbers(n), {.batch_size = 2, .drop_last = true}), config);
      EXPECT_EQ(gathered(dropping), range(0));
    }
}

struct Text {
  int64_t number = 0;
  std::string text;
  ACCELERATE_FIELDS(number, text)
};

RANKS_TEST(DataDist, DispatchSendsTextsAndNumbersRowByRow, 2, 3) {
  const PartialState state;
  std::vector<Text> samples;
  for (int64_t i = 0; i < 7; ++i) samples.push_back({i, "t" + std::to_string(i)});
  auto loader = prepared(DataLoader(samples, {.batch_size = 2, .num_workers = 2}), {.dispatch_batches = true});
  std::vector<int64_t> all;
  for (auto& [numbers, texts] : loader) {
    ASSERT_EQ(static_cast<int64_t>(texts.size()), numbers.size(0));
    for (int64_t i = 0; i < numbers.size(0); ++i)
      EXPECT_EQ(texts[static_cast<size_t>(i)], "t" + std::to_string(numbers[i].item<int64_t>()));
    auto joined = values(accelerate::gather(numbers));
    if (loader.end_of_dataloader()) joined.resize(static_cast<size_t>(loader.remainder()));
    all.insert(all.end(), joined.begin(), joined.end());
  }
  EXPECT_EQ(all, range(7));
}

RANKS_TEST(DataDist, DispatchGivesEveryRankAWholeBatchWhenSizesVary, 2) {
  const PartialState state;
  auto loader =
      prepared(DataLoader(numbers(10), Growing{10}), {.dispatch_batches = true});  // {0} {1 2} | {3 4 5} {6 7 8 9}
  EXPECT_EQ(batches_of(loader),
            state.process_index() == 0 ? (Batches{{0}, {3, 4, 5}}) : (Batches{{1, 2}, {6, 7, 8, 9}}));
}

RANKS_TEST(DataDist, DispatchWithAnOwnSliceFunction, 2) {
  const PartialState state;
  auto loader = prepare_data_loader(
      DataLoader(numbers(4), {.batch_size = 2}), {.config = {.dispatch_batches = true}},
      SliceFunction<torch::Tensor>([](const torch::Tensor& batch, int64_t, int64_t, int64_t rank, int64_t ranks) {
        return batch.slice(0, rank, std::nullopt, ranks);
      }));
  EXPECT_EQ(batches_of(loader), (Batches{{state.process_index(), state.process_index() + 2}}));
}

RANKS_TEST(DataDist, AFailingReaderReachesAllRanks, 2, 3) {
  const PartialState state;
  auto loader = prepared(DataLoader(Faulty{20, 9}, {.batch_size = 2, .num_workers = 2}), {.dispatch_batches = true});
  int64_t steps = 0;
  const auto loop = [&] {
    for (auto& batch : loader) steps += batch.size(0) == 2;
  };
  if (state.is_main_process()) EXPECT_THROW(loop(), std::out_of_range);
  else
    EXPECT_THROW(
        try { loop(); } catch (const accelerate::CommError& e) {
          EXPECT_NE(std::string(e.what()).find("no sample 9"), std::string::npos) << e.what();
          throw;
        },
        accelerate::CommError);
  EXPECT_EQ(steps, 9 / (2 * state.num_processes()));
  state.wait_for_everyone();
}

RANKS_TEST(DataDist, StreamsShardThemselvesByDefaultAndReadOnlyTheirShare, 2, 3) {
  const PartialState state;
  for (const int64_t n : {0, 1, 2, 7, 12, 13, 24})
    for (const int64_t workers : {0, 1}) {
      SelfSharding stream(n);
      const auto reads = stream.reads;
      auto loader = prepared(DataLoader(stream, {.batch_size = 2, .num_workers = workers}));
      auto seen = gathered(loader);
      EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, range(n));
      EXPECT_EQ(*reads, (n + state.num_processes() - 1 - state.process_index()) / state.num_processes());
      const auto steps =
          accelerate::gather_object(std::vector<int64_t>{static_cast<int64_t>(batches_of(loader).size())});
      EXPECT_EQ(steps, std::vector<int64_t>(steps.size(), steps[0])) << "all ranks do the same number of steps";
    }
  auto uneven =
      prepared(DataLoader(SelfSharding(2 * state.num_processes() + 1), {.batch_size = 2}), {.even_batches = false});
  EXPECT_EQ(batches_of(uneven).size(), state.process_index() == 0 ? 2U : 1U);
  auto dropping = prepared(DataLoader(SelfSharding(13), {.batch_size = 2, .drop_last = true}));
  EXPECT_EQ(gathered(dropping).size(),
            static_cast<size_t>(13 / (2 * state.num_processes()) * 2 * state.num_processes()));
}

RANKS_TEST(DataDist, AFailingShardReachesAllRanks, 2) {
  const PartialState state;
  struct Broken : SelfSharding {
    using SelfSharding::SelfSharding;
    std::optional<torch::Tensor> next() {
      if (at == 5) throw std::domain_error("broken share");
      return SelfSharding::next();
    }
  };
  auto loader = prepared(DataLoader(Broken(20), {.batch_size = 2}));  // rank 1 reads 5
  if (state.process_index() == 1) EXPECT_THROW(gathered(loader), std::domain_error);
  else EXPECT_THROW(gathered(loader), accelerate::CommError);
}

RANKS_TEST(DataDist, ShufflingIsSynchronisedWhateverTheRanksSeeds, 2, 3) {
  const PartialState state;
  torch::manual_seed(100 + state.process_index());
  for (const bool libtorch : {false, true}) {
    const auto plain = libtorch ? DataLoader(numbers(24), torch::data::samplers::RandomSampler(24), {.batch_size = 2})
                                : DataLoader(numbers(24), {.batch_size = 2, .shuffle = true});
    auto loader = prepared(plain);
    std::vector<int64_t> previous;
    for (int pass = 0; pass < 2; ++pass) {
      auto seen = gathered(loader);
      EXPECT_NE(seen, previous);
      previous = seen;
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, range(24));
    }
  }
}

RANKS_TEST(DataDist, UnevenRanksWithoutEvenBatches, 2) {
  const PartialState state;
  auto loader = prepared(DataLoader(numbers(7), {.batch_size = 2}), {.even_batches = false});
  EXPECT_EQ(batches_of(loader), state.process_index() == 0 ? (Batches{{0, 1}, {4, 5}}) : (Batches{{2, 3}, {6}}));
  EXPECT_EQ(loader.size(), 2);
}

RANKS_TEST(DataDist, ResumeInTheMiddleOfADispatchedPass, 2) {
  const PartialState state;
  for (const bool stream : {false, true})
    for (const bool shuffle : {false, true})
      for (const int64_t workers : {0, 2})
        for (const bool split : {false, true}) {
          if (stream && shuffle) continue;
          const auto make = [&] {
            const DataLoaderOptions options{.batch_size = 2,
                                            .shuffle = shuffle,
                                            .num_workers = workers,
                                            .seed = shuffle ? std::optional<int64_t>(2) : std::nullopt};
            const DataLoaderConfiguration config{.split_batches = split, .dispatch_batches = true};
            return stream ? prepared(DataLoader(Stream{17}, options), config)
                          : prepared(DataLoader(numbers(17), options), config);
          };
          auto whole = make();
          const Batches first = batches_of(whole), second = batches_of(whole);
          for (size_t stop = 1; stop < first.size(); ++stop) {
            auto loader = make();
            Batches seen;
            DataLoaderState saved;
            for (auto& batch : loader) {
              seen.push_back(values(batch));
              if (seen.size() < stop) continue;
              saved = loader.state_dict();
              break;
            }
            auto resumed = make();
            resumed.load_state_dict(saved);
            for (auto& batch : resumed) seen.push_back(values(batch));
            EXPECT_EQ(seen, first) << "stream " << stream << " shuffle " << shuffle << " workers " << workers
                                   << " split " << split << " stop " << stop;
            EXPECT_EQ(batches_of(resumed), second);
          }
          auto skipping = skip_first_batches(make(), 2);
          EXPECT_EQ(batches_of(skipping), (Batches(first.begin() + 2, first.end())));
        }
}

RANKS_TEST(DataDist, ResumeAStreamThatShardsItself, 2) {
  const PartialState state;
  const auto make = [&] { return prepared(DataLoader(SelfSharding(17), {.batch_size = 2})); };
  auto whole = make();
  const Batches all = batches_of(whole);
  auto loader = make();
  Batches seen;
  DataLoaderState saved;
  for (auto& batch : loader) {
    seen.push_back(values(batch));
    if (seen.size() < 2) continue;
    saved = loader.state_dict();
    break;
  }
  auto resumed = make();
  resumed.load_state_dict(saved);
  for (auto& batch : resumed) seen.push_back(values(batch));
  EXPECT_EQ(seen, all);
}

/// An own order that draws from where ranks differ.
struct OwnShuffle : AnySampler {
  explicit OwnShuffle(int64_t n, uint64_t seed) : order(range(n)), random(seed) {}
  std::vector<int64_t> order;
  std::mt19937_64 random;
  int64_t starts = 0;
  std::optional<int64_t> size() const override { return static_cast<int64_t>(order.size()); }
  Cursor<int64_t> start() override {
    ++starts;
    std::shuffle(order.begin(), order.end(), random);
    return [order = order, i = size_t{0}]() mutable -> std::optional<int64_t> {
      return i < order.size() ? std::optional(order[i++]) : std::nullopt;
    };
  }
};

/// The error that a pass begins with, or nothing.
template <class Loader> std::string error_of_pass(const Loader& loader) {
  try {
    (void)loader.begin();
  } catch (const accelerate::ConfigError& error) {
    return error.what();
  }
  return {};
}

RANKS_TEST(DataDist, OrdersThatDifferAreAnErrorOnAllRanks, 2, 3, 5) {
  const PartialState state;
  const auto odd = static_cast<uint64_t>(state.is_last_process());
  for (const bool split : {false, true})
    for (const int64_t workers : {0, 2}) {
      const DataLoaderConfiguration config{.split_batches = split};
      const DataLoaderOptions options{.batch_size = 4 * state.num_processes(), .num_workers = workers};
      auto differs = prepared(DataLoader(numbers(48), std::make_shared<OwnShuffle>(48, odd), options), config);
      EXPECT_NE(error_of_pass(differs).find("different orders"), std::string::npos);
      auto shorter = prepared(
          DataLoader(numbers(48), std::make_shared<OwnShuffle>(48 - 40 * static_cast<int64_t>(odd), 1), options),
          config);
      EXPECT_NE(error_of_pass(shorter), "");
      // A rank's own files: the data set is another one, and its order looks alike.
      auto data = prepared(DataLoader(numbers(48 + static_cast<int64_t>(odd)), options), config);
      EXPECT_NE(error_of_pass(data).find("the data set of rank 0 has 48 samples"), std::string::npos);
      auto stream = prepare_data_loader(DataLoader(SizedStream(48 + static_cast<int64_t>(odd)), options),
                                        {.config = {.split_batches = split, .dispatch_batches = false}});
      EXPECT_NE(error_of_pass(stream).find("the data set of rank 0 has 48 samples"), std::string::npos);
      auto fine = prepared(DataLoader(numbers(48), std::make_shared<OwnShuffle>(48, 7), options), config);
      for (int pass = 0; pass < 2; ++pass) {
        auto all = gathered(fine);
        std::sort(all.begin(), all.end());
        EXPECT_EQ(all, range(48));
      }
    }
}

// Comparing orders costs no number and no sample: a pass reads what it reads where nobody compares.
RANKS_TEST(DataDist, ComparingOrdersMovesNothing, 2, 3) {
  const PartialState state;
  const auto own = std::make_shared<OwnShuffle>(400, 7);
  auto loader = prepared(DataLoader(numbers(400), own, {.batch_size = 3}));
  OwnShuffle expected(400, 7);
  for (int pass = 1; pass <= 2; ++pass) {
    const auto next = expected.start();
    std::vector<int64_t> order;
    while (const auto index = next()) order.push_back(*index);
    EXPECT_EQ(gathered(loader), order);
    EXPECT_EQ(own->starts, pass);
  }
  torch::manual_seed(3);
  const auto begun = loader.begin();
  const auto number = torch::rand({1});
  torch::manual_seed(3);
  torch::empty({}, torch::kLong).random_();  // the pass's seed, which Python's loader draws, too
  EXPECT_TRUE(torch::equal(torch::rand({1}), number));
}

RANKS_TEST(DataDist, AnOrderThatCannotBeDrawnOnOneRankIsAnErrorOnAll, 2, 3) {
  struct Failing : SequentialSampler {
    using SequentialSampler::SequentialSampler;
    Cursor<int64_t> start() override {
      if (PartialState().is_last_process()) throw std::out_of_range("no order here");
      return SequentialSampler::start();
    }
  };
  const PartialState state;
  auto loader = prepared(DataLoader(numbers(8), std::make_shared<Failing>(8), {.batch_size = 2}));
  try {
    (void)loader.begin();
    ADD_FAILURE() << "a pass without an order";
  } catch (const std::out_of_range&) {
    EXPECT_TRUE(state.is_last_process()) << "its own error stays what it is";
  } catch (const accelerate::CommError& error) {
    EXPECT_NE(std::string(error.what()).find("no order here"), std::string::npos) << error.what();
  }
  accelerate::comm::barrier();  // nobody was left behind in a collective
}

RANKS_TEST(DataDist, SamplersOfOneRankAreRefusedByName, 2) {
  namespace samplers = torch::data::samplers;
  const PartialState state;
  const auto rank = static_cast<size_t>(state.process_index());
  const auto refused = [](const auto& loader) {
    for (const bool dispatch : {false, true}) try {
        (void)prepared(loader, {.dispatch_batches = dispatch});
        ADD_FAILURE() << "prepared";
      } catch (const accelerate::ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("DistributedRandomSampler"), std::string::npos);
      }
  };
  const DataLoader random(numbers(48), samplers::DistributedRandomSampler(48, 2, rank), {.batch_size = 4});
  refused(random);
  EXPECT_EQ(batches_of(random).size(), 6U) << "a loader that nobody shares out may have it";
  refused(DataLoader(numbers(48), std::make_shared<samplers::DistributedSequentialSampler>(48, 2, rank)));
  const auto whole = std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(48), 4, false);
  refused(
      DataLoader(numbers(48), std::make_shared<BatchSamplerShard>(
                                  whole, ShardOptions{.num_processes = 2, .process_index = state.process_index()})));
}

/// Batches as they are given, all of one size or not.
struct Buckets : AnyBatchSampler {
  explicit Buckets(std::vector<Indices> batches) : batches(std::move(batches)) {}
  std::vector<Indices> batches;
  std::optional<int64_t> size() const override { return static_cast<int64_t>(batches.size()); }
  Cursor<Indices> start() override {
    return [batches = batches, i = size_t{0}]() mutable -> std::optional<Indices> {
      return i < batches.size() ? std::optional(batches[i++]) : std::nullopt;
    };
  }
};

// Rounds are filled up in their middle, as in the reference, and samples lost.
RANKS_TEST(DataDist, AShortBatchBeforeTheLastIsNamed, 2, 3) {
  struct Short : Buckets {
    using Buckets::Buckets;
    std::optional<int64_t> batch_size() const override { return 4; }
  };
  const PartialState state;
  const auto batches = std::make_shared<Short>(std::vector<Indices>{{0, 1, 2, 3}, {4}, {5, 6, 7, 8}, {9, 10, 11, 12}});
  for (const bool split : {false, true}) {
    if (split && state.num_processes() != 2) continue;
    auto loader = prepared(DataLoader(numbers(13), batches, {}), {.split_batches = split});
    const auto says = support::warnings_of([&] { batches_of(loader); });
    EXPECT_NE(says.find("gave another batch after one of 1"), std::string::npos) << says;
  }
}

// Where batches vary by design whole first ones are repeated; where the size is fixed, samples. Neither reaches the
// metrics, whether or not the sampler says how many samples it has.
RANKS_TEST(DataDist, MetricsGetEachSampleOnceWhateverMakesTheBatches, 2, 3, 5) {
  struct Half : AnySampler {  // of the data set, and it doesn't say how many
    Cursor<int64_t> start() override { return SequentialSampler(23).start(); }
  };
  const PartialState state;
  const auto in_metrics = [](auto loader, int64_t skip = 0) {
    std::vector<int64_t> all;
    for (auto& batch : skip_first_batches(loader, skip))
      for (const int64_t value : values(accelerate::gather_for_metrics(batch))) all.push_back(value);
    return all;
  };
  for (const int64_t workers : {0, 2})
    for (const bool dispatch : {false, true}) {
      const DataLoaderConfiguration config{.dispatch_batches = dispatch};
      const DataLoaderOptions options{.batch_size = 4, .num_workers = workers};
      for (const int64_t n : {1, 4, 7}) {
        std::vector<Indices> batches;
        for (int64_t i = 0; i < n; ++i) batches.push_back({3 * i, 3 * i + 1, 3 * i + 2});
        auto loader =
            prepared(DataLoader(numbers(50), std::make_shared<Buckets>(batches), {.num_workers = workers}), config);
        EXPECT_EQ(in_metrics(loader), range(3 * n)) << n;
        if (n > state.num_processes()) {
          EXPECT_EQ(in_metrics(loader, 1).size(), static_cast<size_t>(3 * (n - state.num_processes()))) << n;
        }
      }
      EXPECT_EQ(in_metrics(prepared(DataLoader(numbers(50), std::make_shared<Half>(), options), config)), range(23));
    }
}

/// Adds to each sample what augmentation might.
struct Noisy {
  int64_t n = 0;
  int64_t size() const { return n; }
  torch::Tensor get(size_t i) const { return torch::rand({1}) + static_cast<float>(i); }
};

std::vector<float> floats(const torch::Tensor& tensor) {
  const auto flat = tensor.contiguous().view(-1);
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

/// A permutation drawn as the pass begins, and a share of it where the stream is told its rank.
struct Shuffling {
  int64_t n = 0;
  std::vector<int64_t> order = {};
  size_t at = 0;
  void reset() {
    order = values(torch::randperm(n));
    at = 0;
  }
  std::optional<torch::Tensor> next() {
    return at < order.size() ? std::optional(torch::tensor(order[at++])) : std::nullopt;
  }
};

/// Gives four at a time, whatever is asked for.
struct InFours : torch::data::datasets::BatchDataset<InFours, std::optional<torch::Tensor>, size_t> {
  explicit InFours(int64_t n) : n(n) {}
  std::optional<torch::Tensor> get_batch(size_t) override {
    if (at >= n) return std::nullopt;
    const int64_t from = std::exchange(at, std::min(at + 4, n));
    return torch::arange(from, at);
  }
  std::optional<size_t> size() const override { return std::nullopt; }
  void reset() { at = 0; }
  int64_t n, at = 0;
};

RANKS_TEST(DataDist, StreamsThatGiveMoreThanIsAskedForLoseNothing, 1, 2, 3) {
  const PartialState state;
  for (const bool dispatch : {false, true})
    for (const int64_t size : {1, 3, 6}) {
      auto loader = prepared(DataLoader(InFours{22}, {.batch_size = size}), {.dispatch_batches = dispatch});
      for (int pass = 0; pass < 2; ++pass) EXPECT_EQ(gathered(loader), range(22)) << dispatch << " " << size;
    }
}

// Shards have 12, 6, 6, … samples. The first one's rest is shared out before the last batch: no sample counts twice.
RANKS_TEST(DataDist, MetricsGetEachSampleOnceOfShardsThatDiffer, 2, 3, 5) {
  struct Unequal : Stream {
    void shard(int64_t rank, int64_t) { first = rank == 0 ? 0 : 12 + 6 * (rank - 1), n = first + (rank == 0 ? 12 : 6); }
    void reset() { at = first; }
    int64_t first = 0;
  };
  const PartialState state;
  auto loader = prepared(DataLoader(Unequal{}, {.batch_size = 4}), {.dispatch_batches = false});
  std::vector<int64_t> seen;
  for (auto& batch : loader)
    for (const int64_t value : values(accelerate::gather_for_metrics(batch))) seen.push_back(value);
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, range(12 + 6 * (state.num_processes() - 1)));
}

RANKS_TEST(DataDist, ANumberStaysANumberInTheLastBatch, 1, 2) {
  const PartialState state;
  auto loader = prepared(DataLoader(numbers(10), {.batch_size = 4}));
  for (auto& batch : loader) {
    const auto sum = accelerate::gather_for_metrics(batch.sum());
    EXPECT_EQ(sum.numel(), state.num_processes());
  }
}

RANKS_TEST(DataDist, BatchesWithOtherKeysAreNotJoined, 2) {
  using Batch = std::map<std::string, torch::Tensor>;
  const PartialState state;
  const auto refused = [](const auto& one) {
    return support::message_of<accelerate::ShapeError>([&] { accelerate::gather_for_metrics(one, true); });
  };
  const bool first = support::rank() == 0;
  EXPECT_NE(refused(Batch{{"ids", torch::ones({2})}, {first ? "labels" : "mask", torch::ones({2})}}), "");
  using Maybe = std::pair<std::optional<torch::Tensor>, std::optional<torch::Tensor>>;
  EXPECT_NE(refused(first ? Maybe{torch::ones({2}), {}} : Maybe{{}, torch::ones({2})}), "");
}

RANKS_TEST(DataDist, StreamsThatShuffleThemselvesAreSharedOutWhole, 2, 3, 5) {
  accelerate::set_seed(11, {.device_specific = true});
  for (const int64_t workers : {0, 2}) {
    auto loader = prepared(DataLoader(Shuffling{47}, {.batch_size = 4, .num_workers = workers}),
                           DataLoaderConfiguration{.dispatch_batches = false});
    std::vector<std::vector<int64_t>> orders;
    for (int pass = 0; pass < 2; ++pass) {
      orders.push_back(gathered(loader));
      auto sorted = orders.back();
      std::sort(sorted.begin(), sorted.end());
      EXPECT_EQ(sorted, range(47));
    }
    EXPECT_NE(orders[0], orders[1]);
  }
}

// Every rank augments with numbers of its own, and a pass that goes on from a checkpoint has those that it would have
// had, also from rank 0's checkpoint.
RANKS_TEST(DataDist, AResumedPassDrawsTheSameNumbersForItsSamples, 2, 3, 5) {
  const PartialState state;
  for (const bool dispatch : {false, true})
    for (const bool seedable : {false, true})
      for (const int64_t workers : {0, 2}) {
        const auto make = [&] {
          return prepared(
              DataLoader(Noisy{43}, {.batch_size = 2, .shuffle = true, .num_workers = workers}),
              DataLoaderConfiguration{.dispatch_batches = dispatch, .use_seedable_sampler = seedable, .data_seed = 4});
        };
        accelerate::set_seed(11, {.device_specific = true});
        auto whole = make();
        std::vector<std::vector<float>> expected, seen;
        for (int pass = 0; pass < 2; ++pass)
          for (auto& batch : whole) expected.push_back(floats(batch));
        const size_t stop = expected.size() / 2 + 2;
        accelerate::set_seed(11, {.device_specific = true});
        auto loader = make();
        DataLoaderState at;
        for (int pass = 0; pass < 2; ++pass)
          for (auto& batch : loader) {
            seen.push_back(floats(batch));
            if (seen.size() < stop) continue;
            at = loader.state_dict();
            break;
          }
        accelerate::set_seed(99);
        auto resumed = make();
        resumed.load_state_dict(
            accelerate::from_bytes<DataLoaderState>(accelerate::comm::broadcast_bytes(accelerate::to_bytes(at), 0)));
        for (auto& batch : resumed) seen.push_back(floats(batch));
        EXPECT_EQ(seen, expected);
        // The fraction is the number that was drawn: no two ranks' first batches have one in common.
        const auto drawn = accelerate::gather(torch::frac(torch::tensor(expected[0])));
        EXPECT_EQ(std::get<0>(at::_unique2(drawn)).numel(), drawn.numel());
      }
}

RANKS_TEST(RandomDist, GeneratorsGetRankZerosState, 2) {
  const PartialState state;
  accelerate::set_seed(5, {.device_specific = true});
  const auto mine = torch::rand(1);
  EXPECT_NE(values(accelerate::gather(mine * 1e6))[0], values(accelerate::gather(mine * 1e6))[1]);
  accelerate::synchronize_rng_states({accelerate::RNGType::torch, accelerate::RNGType::device});
  const auto all = accelerate::gather(torch::rand(1));
  EXPECT_EQ(all[0].item<float>(), all[1].item<float>());
}

}  // namespace
