// Prepared loaders in real processes: dispatching, streams that shard themselves, synchronised shuffling, errors on one
// rank.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/comm.hpp"
#include "accelerate/data.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate::data;
using namespace datasets;
using accelerate::DataLoaderConfiguration;
using accelerate::GradientState;
using accelerate::PartialState;

template <class Loader> auto prepared(const Loader& loader, DataLoaderConfiguration config = {}) {
  return prepare_data_loader(loader, {.config = config});
}

/// What gather_for_metrics keeps of a pass, over all ranks.
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
