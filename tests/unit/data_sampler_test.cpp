#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

#include "accelerate/data/random.hpp"
#include "accelerate/data/sampler.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"

namespace {

using namespace accelerate::data;
using accelerate::ConfigError;

Indices order_of(AnySampler& sampler) {
  Indices order;
  auto next = sampler.start();
  while (auto index = next()) order.push_back(*index);
  return order;
}
std::vector<Indices> batches(AnyBatchSampler& sampler) {
  std::vector<Indices> all;
  auto next = sampler.start();
  while (auto batch = next()) all.push_back(*batch);
  return all;
}

TEST(RandomSampler, DrawsAsPythonDoes) {
  // torch.manual_seed(0); list(RandomSampler(range(8))) seeds a generator with the first 64-bit draw of the default
  // one.
  torch::manual_seed(0);
  const auto seed = torch::empty({}, torch::kLong).random_().item<int64_t>();
  const auto expected = torch::randperm(8, at::detail::createCPUGenerator(static_cast<uint64_t>(seed)), torch::kLong);
  torch::manual_seed(0);
  RandomSampler sampler(8);
  EXPECT_EQ(order_of(sampler), datasets::values(expected));
}

TEST(RandomSampler, PassesDifferAndCoverAll) {
  torch::manual_seed(1);
  RandomSampler sampler(100);
  auto first = order_of(sampler), second = order_of(sampler);
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end());
  Indices all(100);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(first, all);
}

TEST(RandomSampler, ReplacementAndNumSamples) {
  RandomSampler replaced(3, {.replacement = true, .num_samples = 70, .generator = at::detail::createCPUGenerator(5)});
  const auto order = order_of(replaced);
  EXPECT_EQ(order.size(), 70u);
  EXPECT_TRUE(std::all_of(order.begin(), order.end(), [](int64_t i) { return i >= 0 && i < 3; }));
  const auto of_seed = [](int64_t seed, bool replacement) {
    RandomSampler sampler(3, {.replacement = replacement,
                              .num_samples = 70,
                              .generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed))});
    return order_of(sampler);
  };
  EXPECT_EQ(of_seed(5, true), order) << "the generator decides";
  EXPECT_NE(of_seed(6, true), order);
  EXPECT_NE(of_seed(5, false), order);
  RandomSampler longer(3, {.num_samples = 8});
  auto twice = order_of(longer);
  EXPECT_EQ(twice.size(), 8u);
  std::sort(twice.begin(), twice.begin() + 3);
  EXPECT_EQ(Indices(twice.begin(), twice.begin() + 3), (Indices{0, 1, 2}));
  EXPECT_THROW(RandomSampler(3, {.num_samples = -1}), ConfigError);
}

TEST(SeedableRandomSampler, OrderDependsOnSeedAndEpochOnly) {
  SeedableRandomSampler a(50, 42), b(50, 42);
  const auto first = order_of(a);
  const auto second = order_of(a);
  torch::rand(7);
  EXPECT_EQ(order_of(b), first);
  b.set_epoch(1);
  EXPECT_EQ(order_of(b), second);
  EXPECT_NE(first, second);
}

TEST(BatchSampler, PassesAreIndependent) {
  BatchSampler sampler(std::make_shared<SequentialSampler>(5), 2, false);
  auto a = sampler.start(), b = sampler.start();
  EXPECT_EQ(*a(), (Indices{0, 1}));
  EXPECT_EQ(*b(), (Indices{0, 1}));
  EXPECT_EQ(*a(), (Indices{2, 3}));
  EXPECT_EQ(*a(), (Indices{4}));
  EXPECT_FALSE(a());
  EXPECT_FALSE(a());
  EXPECT_THROW(BatchSampler(std::make_shared<SequentialSampler>(5), 0, false), ConfigError);
}

TEST(BatchSamplerShard, RejectsRanksAndBatchSizesThatDoNotFit) {
  const auto inner = std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(5), 3, false);
  EXPECT_THROW(BatchSamplerShard(inner, {.num_processes = 2, .process_index = 2}), ConfigError);
  EXPECT_THROW(BatchSamplerShard(inner, {.num_processes = 2, .split_batches = true}), ConfigError);
}

TEST(BatchSamplerShard, OneSampleOnThreeRanks) {
  const auto inner = std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(1), 2, false);
  for (int64_t rank = 0; rank < 3; ++rank) {
    BatchSamplerShard shard(inner, {.num_processes = 3, .process_index = rank});
    EXPECT_EQ(batches(shard), (std::vector<Indices>{{0, 0}}));
    EXPECT_EQ(shard.size(), 1);
  }
}

TEST(ForeignSampler, LibTorchSamplersShuffleWithTheGivenGenerator) {
  const auto order = [](std::optional<at::Generator> generator) {
    auto sampler = as_batch_sampler(torch::data::samplers::RandomSampler(20), 4, false, 20);
    if (generator) sampler->set_generator(*generator);
    return batches(*sampler);
  };
  EXPECT_EQ(order(at::detail::createCPUGenerator(3)), order(at::detail::createCPUGenerator(3)));
  EXPECT_NE(order(at::detail::createCPUGenerator(3)), order(at::detail::createCPUGenerator(4)));
  auto sampler =
      as_batch_sampler(torch::data::samplers::RandomSampler(20), 4, false, 20);  // its constructor draws, too
  sampler->set_generator(at::detail::createCPUGenerator(3));
  torch::manual_seed(9);
  const auto expected = torch::rand(2);
  torch::manual_seed(9);
  sampler->start();
  EXPECT_TRUE(torch::equal(torch::rand(2), expected)) << "the default generator must not move";
}

TEST(ForeignSampler, DropLastAndSizes) {
  auto sampler = as_batch_sampler(torch::data::samplers::SequentialSampler(7), 3, true, 7);
  EXPECT_EQ(batches(*sampler), (std::vector<Indices>{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(sampler->size(), 2);
  auto growing = as_batch_sampler(datasets::Growing{7}, 1, false);
  EXPECT_EQ(batches(*growing), (std::vector<Indices>{{0}, {1, 2}, {3, 4, 5}, {6}}));
  EXPECT_EQ(growing->size(), std::nullopt);
  EXPECT_EQ(growing->batch_size(), std::nullopt);
}

TEST(SetSeed, RepeatsAndRefusesAMissingGenerator) {
  accelerate::set_seed(5);
  const auto first = torch::rand(3);
  accelerate::set_seed(5, {.deterministic = true});
  EXPECT_TRUE(torch::equal(torch::rand(3), first));
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  at::globalContext().setDeterministicAlgorithms(false, false);
  EXPECT_THROW(accelerate::synchronize_rng_state(accelerate::RNGType::generator), ConfigError);
}

}  // namespace
