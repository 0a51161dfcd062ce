// Prepared loaders without a process group: ranks are arguments. Tests with real ranks are in tests/dist/data_test.cpp.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/data.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"

namespace {

using namespace accelerate::data;
using namespace datasets;
using accelerate::ConfigError;
using accelerate::GradientState;

PrepareDataLoaderOptions as_rank(int64_t rank, int64_t world_size, accelerate::DataLoaderConfiguration config = {}) {
  if (!config.dispatch_batches) config.dispatch_batches = false;
  return {.config = config, .device = torch::kCPU, .num_processes = world_size, .process_index = rank};
}
template <class Loader>
Batches rank_batches(const Loader& loader, int64_t rank, int64_t world_size,
                     accelerate::DataLoaderConfiguration config = {}) {
  auto prepared = prepare_data_loader(loader, as_rank(rank, world_size, config));
  auto batches = batches_of(prepared);
  EXPECT_EQ(static_cast<int64_t>(batches.size()), prepared.size());
  return batches;
}

TEST(PreparedDataLoader, OneRankSeesAll) {
  auto prepared = prepare_data_loader(DataLoader(numbers(5), {.batch_size = 2}), as_rank(0, 1));
  EXPECT_EQ(batches_of(prepared), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(prepared.total_batch_size(), 2);
  EXPECT_EQ(prepared.total_dataset_length(), 5);
  EXPECT_EQ(prepared.remainder(), 1);
}

TEST(PreparedDataLoader, VaryingBatchSizes) {
  const DataLoader loader(numbers(10), Growing{10});
  auto prepared = prepare_data_loader(loader, as_rank(1, 3));
  EXPECT_EQ(batches_of(prepared), (Batches{{1, 2}, {0}}));  // {0} {1 2} {3 4 5} {6 7 8 9} + the first two again
  EXPECT_THROW(prepared.total_batch_size(), ConfigError);
  auto uneven = prepare_data_loader(loader, as_rank(1, 3, {.even_batches = false}));
  EXPECT_EQ(batches_of(uneven), (Batches{{1, 2}}));
  EXPECT_THROW(prepare_data_loader(loader, as_rank(0, 2, {.split_batches = true})), ConfigError);
}

TEST(PreparedDataLoader, EmptyAndTinyDatasets) {
  for (int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(rank_batches(DataLoader(numbers(0), {.batch_size = 2}), rank, 3), Batches{});
    EXPECT_EQ(rank_batches(DataLoader(numbers(1), {.batch_size = 2}), rank, 3), (Batches{{0, 0}}));
    EXPECT_EQ(rank_batches(DataLoader(SizedStream(0), {.batch_size = 2}), rank, 3), Batches{});
    EXPECT_EQ(rank_batches(DataLoader(SizedStream(1), {.batch_size = 2}), rank, 3), (Batches{{0, 0}}));
    EXPECT_EQ(rank_batches(DataLoader(numbers(1), {.batch_size = 2, .drop_last = true}), rank, 3), Batches{});
  }
}

TEST(PreparedDataLoader, CollatedStreamsAreSharedOutByRows) {
  const DataLoader loader(TorchStateful(7).map(torch::data::transforms::Stack<>()), {.batch_size = 2});
  for (int64_t rank = 0; rank < 2; ++rank) {
    auto prepared = prepare_data_loader(loader, as_rank(rank, 2));
    Batches seen;
    for (auto& batch : prepared) seen.push_back(values(batch.target));
    EXPECT_EQ(seen, rank == 0 ? (Batches{{0, 1}, {4, 5}}) : (Batches{{2, 3}, {6, 0}}));
    EXPECT_EQ(prepared.remainder(), 3);
  }
}

TEST(PreparedDataLoader, ShuffledRanksAgreeAndCoverAll) {
  for (const bool libtorch : {false, true}) {
    std::vector<int64_t> seen;
    for (int64_t rank = 0; rank < 2; ++rank) {
      torch::manual_seed(7);
      const auto loader = libtorch
                              ? DataLoader(numbers(32), torch::data::samplers::RandomSampler(32), {.batch_size = 4})
                              : DataLoader(numbers(32), {.batch_size = 4, .shuffle = true});
      for (const auto& batch : rank_batches(loader, rank, 2)) seen.insert(seen.end(), batch.begin(), batch.end());
    }
    EXPECT_FALSE(std::is_sorted(seen.begin(), seen.end()));
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, batches_of(*std::make_unique<DataLoader<torch::Tensor>>(numbers(32),
                                                                            DataLoaderOptions{.batch_size = 32}))[0]);
  }
}

TEST(PreparedDataLoader, SeedableSamplerFollowsTheEpoch) {
  const auto make = [] {
    return prepare_data_loader(DataLoader(numbers(5), {.batch_size = 5, .shuffle = true}),
                               as_rank(0, 1, {.use_seedable_sampler = true, .data_seed = 42}));
  };
  auto loader = make();
  const Batches first{{2, 4, 3, 0, 1}}, second{{3, 1, 4, 2, 0}};  // seedable_random_sampler.json
  EXPECT_EQ(batches_of(loader), first);
  EXPECT_EQ(loader.iteration(), 1);
  EXPECT_EQ(batches_of(loader), second);
  auto jumping = make();
  jumping.set_epoch(1);
  EXPECT_EQ(batches_of(jumping), second);
  auto skipping = skip_first_batches(loader, 0);
  EXPECT_EQ(skipping.iteration(), 2);
}

TEST(PreparedDataLoader, EndIsKnownWhileTheLastBatchIsHeld) {
  GradientState::reset();
  const GradientState gradients;
  auto prepared = prepare_data_loader(DataLoader(numbers(16), {.batch_size = 4}), as_rank(0, 1));
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<bool> ends;
    for (auto& batch : prepared) {
      ASSERT_TRUE(batch.defined());
      EXPECT_EQ(gradients.active_dataloader(), prepared.status().get());
      ends.push_back(gradients.end_of_dataloader());
    }
    EXPECT_EQ(ends, (std::vector<bool>{false, false, false, true}));
    EXPECT_FALSE(gradients.in_dataloader());
  }
  auto two_ranks = prepare_data_loader(DataLoader(numbers(15), {.batch_size = 4}), as_rank(0, 2));
  const auto begun = two_ranks.begin();
  EXPECT_EQ(two_ranks.remainder(), 7) << "known before the last batch, where data set and sampler know their sizes";
}

TEST(PreparedDataLoader, NestedLoopsAndBreakLeaveNoLoaderActive) {
  GradientState::reset();
  const GradientState gradients;
  auto outer = prepare_data_loader(DataLoader(numbers(4), {.batch_size = 2}), as_rank(0, 1));
  auto inner = prepare_data_loader(DataLoader(numbers(6), {.batch_size = 2}), as_rank(0, 1));
  for (auto& a : outer) {
    (void)a;
    for (auto& b : inner) {
      (void)b;
      EXPECT_EQ(gradients.active_dataloader(), inner.status().get());
      break;
    }
    EXPECT_EQ(gradients.active_dataloader(), outer.status().get());
  }
  EXPECT_FALSE(gradients.in_dataloader());
  {
    auto it = outer.begin();
    auto again = outer.begin();  // ends the first pass
    EXPECT_THROW(++it, accelerate::ConfigError) << "not an end, as if there were no more batches";
    EXPECT_EQ(values(*again), (std::vector<int64_t>{0, 1}));
    EXPECT_TRUE(gradients.in_dataloader());
  }
  EXPECT_FALSE(gradients.in_dataloader());
}

TEST(PreparedDataLoader, ErrorsComeAtTheirBatchAndEndThePass) {
  GradientState::reset();
  auto prepared = prepare_data_loader(DataLoader(Faulty{8, 4}, {.batch_size = 2, .num_workers = 2}), as_rank(0, 1));
  Batches seen;
  EXPECT_THROW(
      {
        for (auto& batch : prepared) {
          seen.push_back(values(batch));
          EXPECT_FALSE(prepared.end_of_dataloader());
        }
      },
      std::out_of_range);
  EXPECT_EQ(seen, (Batches{{0, 1}, {2, 3}}));
  EXPECT_FALSE(GradientState().in_dataloader());
}

TEST(PreparedDataLoader, OverrideEvenBatches) {
  auto prepared = prepare_data_loader(DataLoader(numbers(3), {.batch_size = 1}), as_rank(1, 2));
  EXPECT_EQ(batches_of(prepared).size(), 2u);
  EXPECT_TRUE(prepared.override_even_batches(false));
  EXPECT_EQ(batches_of(prepared).size(), 1u);
  EXPECT_TRUE(prepared.override_even_batches(std::nullopt));
  EXPECT_EQ(batches_of(prepared).size(), 2u);
  EXPECT_FALSE(prepare_data_loader(DataLoader(Stream{3}), as_rank(0, 1)).override_even_batches(false));
}

TEST(PreparedDataLoader, SkipFirstBatchesKeepsRemainderAndEpoch) {
  auto prepared = prepare_data_loader(DataLoader(numbers(11), {.batch_size = 2}), as_rank(0, 2));
  EXPECT_EQ(batches_of(prepared), (Batches{{0, 1}, {4, 5}, {8, 9}}));
  auto skipping = skip_first_batches(prepared, 2);
  EXPECT_EQ(skipping.size(), 1);
  EXPECT_EQ(skipping.iteration(), 1);
  EXPECT_EQ(batches_of(skipping), (Batches{{8, 9}}));
  EXPECT_EQ(skipping.remainder(), 3);
  EXPECT_EQ(batches_of(prepared).size(), 3u);
}

TEST(PreparedDataLoader, AStreamThatShardsItselfReadsItsShareOnly) {
  SelfSharding stream(10);
  auto prepared = prepare_data_loader(
      DataLoader(stream, {.batch_size = 2}),
      {.config = {.even_batches = false}, .device = torch::kCPU, .num_processes = 2, .process_index = 1});
  EXPECT_EQ(batches_of(prepared), (Batches{{1, 3}, {5, 7}, {9}}));
  EXPECT_EQ(*stream.reads, 5);
}

TEST(PreparedDataLoader, WrongSettings) {
  EXPECT_THROW(prepare_data_loader(DataLoader(numbers(4), {.batch_size = 3}), as_rank(0, 2, {.split_batches = true})),
               ConfigError);
  EXPECT_THROW(prepare_data_loader(DataLoader(Stream{4}, {.batch_size = 3}), as_rank(0, 2, {.split_batches = true})),
               ConfigError);
  EXPECT_THROW(prepare_data_loader(DataLoader(numbers(4)), as_rank(2, 2)), ConfigError);
  EXPECT_THROW(prepare_data_loader(DataLoader(numbers(4)), as_rank(0, 2, {.dispatch_batches = true})), ConfigError)
      << "there is no group";
}

// --- resume

struct ResumeCase {
  const char* name;
  bool stream, shuffle, seedable;
  int64_t workers;
};

class Resume : public testing::TestWithParam<ResumeCase> {
 protected:
  PreparedDataLoader<torch::Tensor> make(int64_t rank) const {
    const auto& c = GetParam();
    const DataLoaderOptions options{.batch_size = 2, .shuffle = c.shuffle, .num_workers = c.workers};
    const auto config = accelerate::DataLoaderConfiguration{.use_seedable_sampler = c.seedable, .data_seed = 3};
    if (c.stream) return prepare_data_loader(DataLoader(Stream{23}, options), as_rank(rank, 2, config));
    return prepare_data_loader(DataLoader(numbers(23), options), as_rank(rank, 2, config));
  }
};

/// Interrupts the second of three passes after every possible number of batches, saves, and goes on in a new loader
/// with other random states.
TEST_P(Resume, GivesExactlyTheBatchesThatWereNotSeen) {
  for (int64_t rank = 0; rank < 2; ++rank) {
    torch::manual_seed(11);
    auto whole = make(rank);
    const Batches first = batches_of(whole), second = batches_of(whole), third = batches_of(whole);
    for (size_t stop = 0; stop <= second.size(); ++stop) {
      torch::manual_seed(11);
      auto loader = make(rank);
      batches_of(loader);
      DataLoaderState state;
      Batches seen;
      if (stop == 0) state = loader.state_dict();
      for (auto& batch : loader) {
        if (stop == 0) break;
        seen.push_back(values(batch));
        if (seen.size() < stop) continue;
        state = loader.state_dict();
        break;
      }
      torch::manual_seed(999);
      auto resumed = make(rank);
      torch::rand(5);
      resumed.load_state_dict(DataLoaderState::from_ivalue(state.to_ivalue()));
      EXPECT_EQ(resumed.state_dict().batches_yielded, state.batches_yielded);
      if (stop < second.size()) {
        torch::manual_seed(5);  // whatever the program has drawn meanwhile
        for (auto& batch : resumed) seen.push_back(values(batch));
      }
      EXPECT_EQ(seen, second) << "stopped after " << stop;
      EXPECT_EQ(batches_of(resumed), third) << "stopped after " << stop;
    }
  }
}

TEST_P(Resume, ABreakKeepsThePositionUntilTheNextPass) {
  torch::manual_seed(1);
  auto loader = make(0);
  for (auto& batch : loader) {
    (void)batch;
    break;
  }
  EXPECT_EQ(loader.state_dict().batches_yielded, 1);
  EXPECT_EQ(loader.state_dict().iteration, 0);
  batches_of(loader);
  EXPECT_EQ(loader.state_dict().batches_yielded, 0);
  EXPECT_EQ(loader.state_dict().iteration, 1);
}

INSTANTIATE_TEST_SUITE_P(
    All, Resume,
    testing::Values(ResumeCase{"map", false, false, false, 0}, ResumeCase{"map_workers", false, false, false, 2},
                    ResumeCase{"shuffled", false, true, false, 0},
                    ResumeCase{"shuffled_workers", false, true, false, 2}, ResumeCase{"seedable", false, true, true, 0},
                    ResumeCase{"seedable_workers", false, true, true, 2}, ResumeCase{"stream", true, false, false, 0},
                    ResumeCase{"stream_workers", true, false, false, 2}),
    [](const auto& info) { return std::string(info.param.name); });

// --- resume on another number of ranks

struct OtherRanksCase {
  const char* name;
  bool stream, shuffle, seedable, split, drop_last;
};

class ResumeOnOtherRanks : public testing::TestWithParam<OtherRanksCase> {
 protected:
  static constexpr int64_t kSamples = 23;
  using Loader = PreparedDataLoader<torch::Tensor>;

  std::vector<Loader> make(int64_t ranks) const {
    const auto& c = GetParam();
    const DataLoaderOptions options{.batch_size = c.split ? 6 : 2, .shuffle = c.shuffle, .drop_last = c.drop_last};
    const accelerate::DataLoaderConfiguration config{
        .split_batches = c.split, .use_seedable_sampler = c.seedable, .data_seed = 3};
    std::vector<Loader> all;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      torch::manual_seed(11);  // as if ranks had agreed on their generators
      if (c.stream)
        all.push_back(prepare_data_loader(DataLoader(SizedStream(kSamples), options), as_rank(rank, ranks, config)));
      else all.push_back(prepare_data_loader(DataLoader(numbers(kSamples), options), as_rank(rank, ranks, config)));
    }
    return all;
  }

  /// The samples that all ranks together get in up to `steps` steps, without those that are repeated to fill the last
  /// one, and rank 0's state then.
  static std::pair<std::vector<int64_t>, DataLoaderState> read(std::vector<Loader>& ranks, size_t steps) {
    std::vector<std::vector<std::vector<int64_t>>> by_step;
    DataLoaderState state;
    bool ended = false;
    for (auto& loader : ranks) {
      torch::manual_seed(17);
      size_t step = 0;
      for (auto& batch : loader) {
        by_step.resize(std::max(by_step.size(), step + 1));
        by_step[step].push_back(values(batch));
        if (&loader == &ranks[0]) state = loader.state_dict();
        ended = loader.end_of_dataloader();
        if (++step == steps) break;
      }
    }
    std::vector<int64_t> all;
    size_t before_last = 0;
    for (const auto& batches : by_step) {
      before_last = all.size();
      for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
    }
    if (ended && ranks[0].remainder() > 0) all.resize(before_last + static_cast<size_t>(ranks[0].remainder()));
    return {all, state};
  }
};

TEST_P(ResumeOnOtherRanks, EverySampleComesOnceInTheOrderOfThePass) {
  constexpr size_t kAll = 100;
  for (int64_t before = 1; before <= 3; ++before)
    for (int64_t after = 1; after <= 3; ++after) {
      auto uninterrupted = make(before);
      auto order = read(uninterrupted, kAll).first;
      const auto num_steps = static_cast<size_t>(uninterrupted[0].size());
      for (size_t steps = 1; steps < num_steps; ++steps) {
        SCOPED_TRACE(testing::Message() << before << " ranks, " << steps << " steps, then " << after);
        auto first = make(before);
        auto [seen, state] = read(first, steps);
        auto second = make(after);
        for (auto& loader : second) {
          loader.load_state_dict(DataLoaderState::from_ivalue(state.to_ivalue()));
          loader.load_state_dict(loader.state_dict());  // saved again before anything is read
        }
        // Once more, after a step of the new run.
        auto [then, state_then] = read(second, 1);
        seen.insert(seen.end(), then.begin(), then.end());
        if (!then.empty() && !second[0].end_of_dataloader()) {
          auto third = make(before);
          for (auto& loader : third) loader.load_state_dict(state_then);
          const auto rest = read(third, kAll).first;
          seen.insert(seen.end(), rest.begin(), rest.end());
        }
        auto expected = order;
        if (GetParam().drop_last) {  // how much is left out depends on the size of the steps
          EXPECT_GE(seen.size(), static_cast<size_t>(kSamples) - 6);
          const auto both = std::min(seen.size(), expected.size());
          seen.resize(both), expected.resize(both);
        }
        EXPECT_EQ(seen, expected);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(All, ResumeOnOtherRanks,
                         testing::Values(OtherRanksCase{"map", false, false, false, false, false},
                                         OtherRanksCase{"shuffled", false, true, false, false, false},
                                         OtherRanksCase{"seedable", false, true, true, false, false},
                                         OtherRanksCase{"split", false, true, false, true, false},
                                         OtherRanksCase{"drop_last", false, true, false, false, true},
                                         OtherRanksCase{"stream", true, false, false, false, false},
                                         OtherRanksCase{"stream_split", true, false, false, true, false}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DataLoaderState, WhatCannotGoOnOnOtherRanksIsRefusedWithTheNumbers) {
  const auto state_after = [](auto prepared, int64_t steps) {
    auto it = prepared.begin();
    for (int64_t i = 1; i < steps; ++i) ++it;
    return prepared.state_dict();
  };
  const auto text_of = [](const auto& prepared, const DataLoaderState& state) {
    try {
      auto loader = prepared;
      loader.load_state_dict(state);
    } catch (const accelerate::CheckpointError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  // Batches of a user's own making go to ranks in turn: two of one rank are one step of two.
  const DataLoader growing(numbers(21), Growing{21});
  const auto alone = prepare_data_loader(growing, as_rank(0, 1)),
             second_of_two = prepare_data_loader(growing, as_rank(1, 2));
  const auto text = text_of(second_of_two, state_after(alone, 3));
  EXPECT_NE(text.find("saved by 1 ranks after 3 steps"), std::string::npos) << text;
  EXPECT_NE(text.find("loaded by 2 ranks"), std::string::npos) << text;
  auto resumed = second_of_two;
  resumed.load_state_dict(state_after(alone, 2));
  EXPECT_EQ(values(*resumed.begin()), (std::vector<int64_t>{6, 7, 8, 9}));  // {0} {1 2} | {3 4 5} {6 7 8 9}
  const DataLoader stream(SelfSharding{{24}}, {.batch_size = 2});
  const auto share = text_of(prepare_data_loader(stream, as_rank(0, 2, {.even_batches = false})),
                             state_after(prepare_data_loader(stream, as_rank(0, 3, {.even_batches = false})), 2));
  EXPECT_NE(share.find("saved by 3 ranks after 2 steps of 6 samples"), std::string::npos) << share;
  EXPECT_NE(text_of(prepare_data_loader(stream, as_rank(0, 1)),
                    state_after(prepare_data_loader(stream, as_rank(0, 2, {.even_batches = false})), 2)),
            "");
  // Between passes nothing is in the way, and a file of an earlier version is taken as it is.
  auto between = state_after(alone, 3);
  between.batches_yielded = 0;
  EXPECT_EQ(text_of(second_of_two, between), "");
  auto old = state_after(alone, 3).to_ivalue().toGenericDict();
  for (const char* name : {"samples_before", "total_batch_size", "num_processes"}) (void)old.erase(name);
  EXPECT_EQ(DataLoaderState::from_ivalue(old).num_processes, 0);
  EXPECT_EQ(text_of(second_of_two, DataLoaderState::from_ivalue(old)), "");
}

TEST(DataLoaderState, RefusesOtherFiles) {
  EXPECT_THROW(DataLoaderState::from_ivalue(c10::IValue(3)), accelerate::CheckpointError);
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("iteration", int64_t{1});
  EXPECT_THROW(DataLoaderState::from_ivalue(dict), accelerate::CheckpointError);
}

TEST(DataLoaderState, DefaultGeneratorGoesOnAfterResuming) {
  torch::manual_seed(4);
  auto loader = prepare_data_loader(DataLoader(numbers(8), {.batch_size = 2, .shuffle = true}), as_rank(0, 1));
  auto it = loader.begin();
  const auto state = loader.state_dict();
  auto resumed = prepare_data_loader(DataLoader(numbers(8), {.batch_size = 2, .shuffle = true}), as_rank(0, 1));
  resumed.load_state_dict(state);
  torch::manual_seed(6);
  const auto expected = torch::rand(3);
  torch::manual_seed(6);
  auto resumed_it = resumed.begin();
  EXPECT_TRUE(torch::equal(torch::rand(3), expected));
  ++it;
  EXPECT_EQ(values(*resumed_it), values(*it));
}

}  // namespace
