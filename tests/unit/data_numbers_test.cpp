// Random numbers that data sets draw: the same for equal seeds whoever reads, and nobody else's.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "accelerate/data.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"

namespace {

using namespace accelerate::data;
using namespace datasets;

using Floats = std::vector<std::vector<float>>;

std::vector<float> floats(const torch::Tensor& tensor) {
  const auto flat = tensor.to(torch::kFloat).contiguous().view(-1);
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

/// Draws by operators of every kind: that fill, that make, that sample, that drop; out of place, and in place.
torch::Tensor draw() {
  const auto ones = torch::ones({2});
  return torch::cat({torch::rand({1}), torch::randn({1}), torch::randint(100, {1}).to(torch::kFloat),
                     torch::randperm(5).to(torch::kFloat), torch::dropout(torch::ones({4}), 0.5, true),
                     torch::rand_like(ones), torch::bernoulli(ones * 0.5), at::normal(0.0, ones),
                     torch::multinomial(torch::ones({9}), 2).to(torch::kFloat), torch::empty({1}).uniform_(),
                     torch::empty({1}).exponential_(), torch::poisson(ones * 3),
                     torch::rand({1}, at::detail::getDefaultCPUGenerator())});
}

struct Noisy {
  int64_t n = 0;
  int64_t size() const { return n; }
  torch::Tensor get(size_t i) const { return torch::cat({torch::full({1}, static_cast<float>(i)), draw()}); }
};

/// Remembers what it drew: a shuffle buffer does. Its samples depend on all that came before.
struct NoisyStream {
  int64_t n = 0;
  float drift = 0;
  int64_t at = 0;
  void reset() {
    at = 0;
    drift = torch::rand({1}).item<float>();
  }
  std::optional<torch::Tensor> next() {
    if (at >= n) return std::nullopt;
    drift += torch::rand({1}).item<float>();
    return torch::tensor({static_cast<float>(at++), drift});
  }
};

/// LibTorch's kind, with a transform that draws and one that collates.
struct Plain : torch::data::datasets::Dataset<Plain> {
  torch::data::Example<> get(size_t i) override { return {torch::full({1}, static_cast<float>(i)), torch::rand({1})}; }
  std::optional<size_t> size() const override { return 22; }
};
auto transformed() {
  return Plain()
      .map(torch::data::transforms::Lambda<torch::data::Example<>>([](torch::data::Example<> example) {
        return torch::data::Example<>(example.data + torch::rand({1}), example.target);
      }))
      .map(torch::data::transforms::Stack<>());
}

using Loader = DataLoader<torch::Tensor>;
using Make = std::function<Loader(int64_t workers)>;

const std::vector<std::tuple<std::string, Make>>& kinds() {
  static const std::vector<std::tuple<std::string, Make>> all = {
      {"map", [](int64_t w) { return Loader(Noisy{22}, {.batch_size = 4, .shuffle = true, .num_workers = w}); }},
      {"stream", [](int64_t w) { return Loader(NoisyStream{22}, {.batch_size = 4, .num_workers = w}); }},
      {"in order", [](int64_t w) { return Loader(Noisy{22}, {.batch_size = 4, .num_workers = w}); }},
      {"collate", [](int64_t w) {
         return Loader(numbers(22), {.batch_size = 4, .num_workers = w},
                       [](std::vector<torch::Tensor> samples) { return torch::stack(samples) + torch::rand({1}); });
       }}};
  return all;
}

template <class L> Floats pass(const L& loader) {
  Floats all;
  for (auto& batch : loader) all.push_back(floats(batch));
  return all;
}

PrepareDataLoaderOptions numbers_as_rank(int64_t rank, int64_t ranks) {
  return {.put_on_device = false, .num_processes = ranks, .process_index = rank};
}

TEST(NumbersOfDataSets, AreTheSameWithAnyNumberOfWorkers) {
  for (const auto& [name, make] : kinds()) {
    torch::manual_seed(3);
    const Floats first = pass(make(0)), second = pass(make(0));
    EXPECT_NE(first, second) << name << ": another pass, other numbers";
    for (const int64_t workers : {0, 1, 2, 5}) {
      torch::manual_seed(3);
      EXPECT_EQ(pass(make(workers)), first) << name << " with " << workers;
      torch::manual_seed(3);
      EXPECT_EQ(pass(prepare_data_loader(make(workers), numbers_as_rank(0, 1))).size(), first.size());
    }
  }
}

TEST(NumbersOfDataSets, DifferFromBatchToBatch) {
  struct Pure {
    int64_t size() const { return 22; }
    torch::Tensor get(size_t) const { return torch::rand({1}); }
  };
  std::set<float> numbers;
  for (const auto& batch : pass(DataLoader(Pure{}, {.batch_size = 4}))) numbers.insert(batch.begin(), batch.end());
  EXPECT_EQ(numbers.size(), 22U);
}

TEST(NumbersOfDataSets, TransformsOfLibTorchDrawThem) {
  Floats first;
  for (const int64_t workers : {0, 2, 5}) {
    torch::manual_seed(3);
    Floats all;
    for (auto& batch : DataLoader(transformed(), {.batch_size = 4, .num_workers = workers}))
      all.push_back(floats(torch::stack({batch.data.view(-1), batch.target.view(-1)})));
    if (first.empty()) first = all;
    EXPECT_EQ(all, first) << workers;
  }
}

TEST(NumbersOfDataSets, LeaveThoseOfTheProgramAlone) {
  const auto drawn = [](const auto& loader) {
    torch::manual_seed(3);
    Floats all;
    for (auto& batch : loader) {
      (void)batch;
      all.push_back(floats(draw()));
    }
    return all;
  };
  const Floats silent = drawn(DataLoader(numbers(22), {.batch_size = 4}));
  for (const auto& [name, make] : kinds())
    for (const int64_t workers : {0, 1, 2, 5}) {
      if (name == "map") continue;  // its order is drawn, too
      EXPECT_EQ(drawn(make(workers)), silent) << name << " with " << workers;
      EXPECT_EQ(drawn(prepare_data_loader(make(workers), numbers_as_rank(0, 1))), silent)
          << name << " with " << workers;
    }
}

TEST(NumbersOfDataSets, AreTheSameAfterSkippedBatches) {
  for (const auto& [name, make] : kinds())
    for (const int64_t workers : {0, 2}) {
      torch::manual_seed(3);
      const Floats all = pass(make(workers));
      torch::manual_seed(3);
      EXPECT_EQ(pass(skip_first_batches(make(workers), 2)), Floats(all.begin() + 2, all.end())) << name;
    }
}

TEST(NumbersOfDataSets, AreTheSameAfterResuming) {
  for (const auto& [name, make] : kinds())
    for (const int64_t workers : {0, 2})
      for (const int64_t ranks : {1, 2}) {
        const auto prepared = [&, make = make] {
          auto options = numbers_as_rank(0, ranks);
          options.config.dispatch_batches = false;
          return prepare_data_loader(make(workers), options);
        };
        torch::manual_seed(3);
        const Floats all = pass(prepared());
        torch::manual_seed(3);
        auto loader = prepared();
        Floats seen;
        DataLoaderState state;
        for (auto& batch : loader) {
          seen.push_back(floats(batch));
          state = loader.state_dict();
          torch::rand({7});  // what training draws
          break;
        }
        torch::manual_seed(99);
        auto resumed = prepared();
        resumed.load_state_dict(state);
        const auto before = at::detail::getDefaultCPUGenerator().get_state();
        for (auto& batch : resumed) seen.push_back(floats(batch));
        EXPECT_EQ(seen, all) << name << " with " << workers << " on " << ranks;
        EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), before)) << "dropout goes on";
      }
}

// Where the order depends on seed and epoch only, so do the numbers: that is how a program resumes by
// skip_first_batches, with generators that stand where the checkpoint was written.
TEST(NumbersOfDataSets, FollowTheEpochWhereTheOrderDoes) {
  for (const int64_t workers : {0, 2}) {
    const auto prepared = [&] {
      auto options = numbers_as_rank(0, 2);
      options.config.use_seedable_sampler = true;
      options.config.data_seed = 5;
      return prepare_data_loader(DataLoader(Noisy{22}, {.batch_size = 2, .shuffle = true, .num_workers = workers}),
                                 options);
    };
    torch::manual_seed(3);
    auto loader = prepared();
    const Floats first = pass(loader);
    const Floats second = pass(loader);
    torch::manual_seed(77);
    auto other = prepared();
    other.set_epoch(1);
    EXPECT_EQ(pass(skip_first_batches(other, 2)), Floats(second.begin() + 2, second.end()));
    other.set_epoch(0);
    EXPECT_EQ(pass(other), first);
  }
}

// Generators that a data set has of its own, and those of others, stay in use.
TEST(NumbersOfDataSets, OwnGeneratorsAreUsedAsTheyAre) {
  struct Own {
    int64_t size() const { return 3; }
    torch::Tensor get(size_t i) const { return torch::rand({1}, at::detail::createCPUGenerator(i)); }
  };
  const Floats all = pass(DataLoader(Own{}));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(all[i], floats(torch::rand({1}, at::detail::createCPUGenerator(i))));
}

}  // namespace
