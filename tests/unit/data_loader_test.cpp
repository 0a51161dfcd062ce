#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/data/loader.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"

namespace {

using namespace accelerate::data;
using namespace datasets;
using accelerate::ConfigError;
using accelerate::ShapeError;
using torch::data::Example;

struct Sentence {
  torch::Tensor ids;
  int64_t label = 0;
  std::string text;
  ACCELERATE_FIELDS(ids, label, text)
};
struct SentenceBatch {
  torch::Tensor ids, labels;
  std::vector<std::string> texts;
  ACCELERATE_FIELDS(ids, labels, texts)
};
struct LabelledSentence : Sentence {
  using Collated = SentenceBatch;
};
struct Pair {
  torch::Tensor left, right;
  ACCELERATE_FIELDS(left, right)
};
struct Opaque {
  int value = 0;
};

// --- collate

TEST(Collate, NumbersBecomeTensorsOfTheReferencesTypes) {
  EXPECT_EQ(default_collate(std::vector<int>{1, 2}).scalar_type(), torch::kLong);
  EXPECT_EQ(default_collate(std::vector<float>{1, 2}).scalar_type(), torch::kFloat);
  EXPECT_EQ(default_collate(std::vector<double>{1, 2}).scalar_type(), torch::kDouble);
  const auto bools = default_collate(std::vector<bool>{true, false, true});
  EXPECT_EQ(bools.scalar_type(), torch::kBool);
  EXPECT_EQ(values(bools), (std::vector<int64_t>{1, 0, 1}));
  EXPECT_EQ(values(default_collate(std::vector<uint8_t>{200, 3})), (std::vector<int64_t>{200, 3}));
  EXPECT_EQ(default_collate(std::vector<std::vector<int>>{{1, 2, 3}, {4, 5, 6}}).sizes(), (torch::IntArrayRef{2, 3}));
  EXPECT_EQ(default_collate(std::vector<std::array<double, 2>>{{1, 2}, {3, 4}}).sizes(), (torch::IntArrayRef{2, 2}));
}

TEST(Collate, StructuresKeepTheirShape) {
  const auto text = default_collate(std::vector<std::string>{"a", "b"});
  EXPECT_EQ(text, (std::vector<std::string>{"a", "b"}));
  const auto [a, b] =
      default_collate(std::vector<std::pair<torch::Tensor, int>>{{torch::ones(2), 1}, {torch::zeros(2), 2}});
  EXPECT_EQ(a.sizes(), (torch::IntArrayRef{2, 2}));
  EXPECT_EQ(values(b), (std::vector<int64_t>{1, 2}));
  const auto map = default_collate(
      std::vector<std::map<std::string, torch::Tensor>>{{{"x", torch::ones(2)}}, {{"x", torch::ones(2)}}});
  EXPECT_EQ(map.at("x").sizes(), (torch::IntArrayRef{2, 2}));
  const std::vector<torch::Tensor> columns = default_collate(
      std::vector<std::vector<torch::Tensor>>{{torch::ones(2), torch::ones(3)}, {torch::ones(2), torch::ones(3)}});
  EXPECT_EQ(columns[1].sizes(), (torch::IntArrayRef{2, 3}));
  const Example<> example =
      default_collate(std::vector<Example<>>{{torch::ones(2), torch::tensor(1)}, {torch::ones(2), torch::tensor(0)}});
  EXPECT_EQ(example.target.sizes(), (torch::IntArrayRef{2}));
  const torch::data::TensorExample only =
      default_collate(std::vector<torch::data::TensorExample>{{torch::ones(2)}, {torch::ones(2)}});
  EXPECT_EQ(only.data.sizes(), (torch::IntArrayRef{2, 2}));
  const std::vector<Opaque> opaque = default_collate(std::vector<Opaque>(3));
  EXPECT_EQ(opaque.size(), 3u);
}

TEST(Collate, StructsWithFields) {
  const Pair pair =
      default_collate(std::vector<Pair>{{torch::ones(2), torch::ones(3)}, {torch::ones(2), torch::ones(3)}});
  EXPECT_EQ(pair.right.sizes(), (torch::IntArrayRef{2, 3}));
  const auto [ids, labels, texts] =
      default_collate(std::vector<Sentence>{{torch::ones(2), 4, "x"}, {torch::ones(2), 5, "y"}});
  EXPECT_EQ(values(labels), (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(texts[1], "y");
  EXPECT_EQ(ids.size(0), 2);
  const SentenceBatch batch =
      default_collate(std::vector<LabelledSentence>{{{torch::ones(2), 4, "x"}}, {{torch::ones(2), 5, "y"}}});
  EXPECT_EQ(values(batch.labels), (std::vector<int64_t>{4, 5}));
}

TEST(Collate, StacksAsTorchDoes) {
  const auto check = [](const std::vector<torch::Tensor>& tensors) {
    EXPECT_TRUE(torch::equal(accelerate::data::detail::stack_samples(tensors), torch::stack(tensors)));
  };
  check({torch::rand({3, 4}), torch::rand({3, 4})});
  check({torch::rand({4, 3}).t(), torch::rand({3, 4})});        // not contiguous
  check({torch::rand({3}), torch::rand({3}, torch::kDouble)});  // promoted
  check({torch::empty({2, 0}), torch::empty({2, 0})});          // nothing to copy
  check({torch::tensor(3), torch::tensor(4)});
  const auto weight = torch::rand(2, torch::requires_grad());
  EXPECT_TRUE(accelerate::data::detail::stack_samples({weight, weight}).requires_grad());
}

TEST(Collate, NamesTheSampleThatDiffers) {
  const auto text = [](auto&& f) -> std::string {
    try {
      f();
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_NE(text([] {
              default_collate(std::vector<torch::Tensor>{torch::ones(2), torch::ones(2), torch::ones(3)});
            }).find("sample 2 of the batch has shape [3]"),
            std::string::npos);
  EXPECT_NE(text([] {
              default_collate(std::vector<std::vector<int>>{{1}, {1, 2}});
            }).find("sample 1 of the batch has a list of 2 items"),
            std::string::npos);
  EXPECT_NE(text([] {
              default_collate(std::vector<std::map<int, int>>{{{1, 1}}, {{2, 1}}});
            }).find("sample 1 of the batch has other keys"),
            std::string::npos);
}

// --- data sets

TEST(DataLoader, VectorsInOrder) {
  DataLoader loader(numbers(7), {.batch_size = 3});
  EXPECT_EQ(batches_of(loader), (Batches{{0, 1, 2}, {3, 4, 5}, {6}}));
  EXPECT_EQ(batches_of(loader), (Batches{{0, 1, 2}, {3, 4, 5}, {6}})) << "a second pass";
  EXPECT_EQ(loader.size(), 3);
  DataLoader dropping(numbers(7), {.batch_size = 3, .drop_last = true});
  EXPECT_EQ(batches_of(dropping), (Batches{{0, 1, 2}, {3, 4, 5}}));
  EXPECT_EQ(dropping.size(), 2);
  DataLoader empty(numbers(0), {.batch_size = 3, .num_workers = 2});
  EXPECT_EQ(batches_of(empty), Batches{});
  EXPECT_EQ(empty.size(), 0);
}

TEST(DataLoader, LibTorchDatasetsWithAndWithoutStack) {
  using torch::data::transforms::Stack;
  DataLoader collated_here(Images(5), {.batch_size = 2, .num_workers = 2});
  static_assert(std::is_same_v<decltype(collated_here)::batch_type, Example<>>);
  DataLoader collated_there(Images(5).map(torch::data::transforms::Normalize<>(0.0, 2.0)).map(Stack<>()),
                            {.batch_size = 2});
  static_assert(std::is_same_v<decltype(collated_there)::batch_type, Example<>>);
  std::vector<int64_t> labels;
  for (auto& batch : collated_here) {
    EXPECT_EQ(batch.data.sizes().slice(1), (torch::IntArrayRef{1, 2, 2}));
    for (int64_t label : values(batch.target)) labels.push_back(label);
  }
  EXPECT_EQ(labels, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  for (auto& batch : collated_there)
    EXPECT_TRUE(torch::allclose(batch.data.flatten(1).select(1, 0) * 2, batch.target.to(torch::kFloat)));
}

TEST(DataLoader, LibTorchStreams) {
  const auto targets = [](auto& loader) {
    Batches all;
    for (auto& batch : loader) all.push_back(values(batch.target));
    return all;
  };
  DataLoader sized(TorchStream(5), {.batch_size = 2});
  EXPECT_EQ(targets(sized), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(targets(sized), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(sized.size(), 3);
  DataLoader stateful(TorchStateful(5), {.batch_size = 2, .num_workers = 1});
  EXPECT_EQ(targets(stateful), (Batches{{0, 1}, {2, 3}, {4}}));
  EXPECT_EQ(targets(stateful), (Batches{{0, 1}, {2, 3}, {4}}));
  DataLoader stacked(TorchStateful(5).map(torch::data::transforms::Stack<>()), {.batch_size = 2, .drop_last = true});
  static_assert(std::is_same_v<decltype(stacked)::batch_type, Example<>>);
  EXPECT_EQ(targets(stacked), (Batches{{0, 1}, {2, 3}}));
  EXPECT_THROW(stacked.size(), ConfigError);
}

TEST(DataLoader, StreamsInlineAndAhead) {
  for (int64_t workers : {0, 3}) {
    DataLoader loader(Stream{7}, {.batch_size = 3, .num_workers = workers});
    for (int pass = 0; pass < 3; ++pass) EXPECT_EQ(batches_of(loader), (Batches{{0, 1, 2}, {3, 4, 5}, {6}}));
    EXPECT_THROW(loader.size(), ConfigError);
    DataLoader sized(SizedStream(7), {.batch_size = 3, .drop_last = true, .num_workers = workers});
    EXPECT_EQ(batches_of(sized), (Batches{{0, 1, 2}, {3, 4, 5}}));
    EXPECT_EQ(sized.size(), 2);
  }
}

TEST(DataLoader, SharedAndReferencedDatasets) {
  auto shared = std::make_shared<Faulty>(Faulty{4});
  DataLoader one(shared, {.batch_size = 2});
  EXPECT_EQ(batches_of(one), (Batches{{0, 1}, {2, 3}}));
  Faulty mine{4};
  DataLoader two(std::ref(mine), {.batch_size = 2});
  mine.n = 4, mine.bad = 3;
  EXPECT_THROW(batches_of(two), std::out_of_range) << "std::ref sees the caller's object";
}

TEST(DataLoader, CustomCollate) {
  DataLoader loader(numbers(5), {.batch_size = 2, .num_workers = 2},
                    [](std::vector<torch::Tensor> samples) { return static_cast<int64_t>(samples.size()); });
  static_assert(std::is_same_v<decltype(loader)::batch_type, int64_t>);
  std::vector<int64_t> sizes;
  for (auto& size : loader) sizes.push_back(size);
  EXPECT_EQ(sizes, (std::vector<int64_t>{2, 2, 1}));
}

TEST(DataLoader, SamplersOfAllKinds) {
  DataLoader growing(numbers(7), Growing{7}, {.num_workers = 2});
  EXPECT_EQ(batches_of(growing), (Batches{{0}, {1, 2}, {3, 4, 5}, {6}}));
  EXPECT_THROW(growing.size(), ConfigError);
  DataLoader torch_sampler(numbers(5), torch::data::samplers::SequentialSampler(5), {.batch_size = 2});
  EXPECT_EQ(batches_of(torch_sampler), (Batches{{0, 1}, {2, 3}, {4}}));
  DataLoader ours(numbers(5), SeedableRandomSampler(5, 42), {.batch_size = 5});
  EXPECT_EQ(batches_of(ours), (Batches{{2, 4, 3, 0, 1}}));
  const auto batch_sampler = std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(4), 2, false);
  DataLoader shared(numbers(4), batch_sampler);
  EXPECT_EQ(batches_of(shared), (Batches{{0, 1}, {2, 3}}));
}

TEST(DataLoader, ShufflesAsPythonDoes) {
  // g = torch.Generator().manual_seed(0): the loader draws one number from it, then the permutation.
  const auto generator = at::detail::createCPUGenerator(0);
  torch::empty({}, torch::kLong).random_(generator);
  const auto expected = values(torch::randperm(6, generator, torch::kLong));
  DataLoader loader(numbers(6), {.batch_size = 6, .shuffle = true, .seed = 0});
  EXPECT_EQ(batches_of(loader), Batches{expected});
  EXPECT_NE(batches_of(loader), Batches{expected}) << "the next pass has another order";
}

TEST(DataLoader, WrongOptions) {
  EXPECT_THROW(DataLoader(numbers(3), {.batch_size = 0}), ConfigError);
  EXPECT_THROW(DataLoader(numbers(3), {.num_workers = -1}), ConfigError);
  EXPECT_THROW(DataLoader(numbers(3), {.prefetch_factor = 0}), ConfigError);
  EXPECT_THROW(DataLoader(Stream{3}, {.shuffle = true}), ConfigError);
  EXPECT_THROW(DataLoader(numbers(3), SequentialSampler(3), {.shuffle = true}), ConfigError);
  EXPECT_THROW(DataLoader(numbers(3), {.generator = at::detail::createCPUGenerator(0), .seed = 0}), ConfigError);
}

// --- workers

TEST(Workers, KeepTheOrderWhenReadsTakeDifferentlyLong) {
  struct Uneven {
    int64_t size() const { return 40; }
    torch::Tensor get(size_t index) const {
      std::this_thread::sleep_for(std::chrono::milliseconds(index % 3));
      return torch::tensor(static_cast<int64_t>(index));
    }
  };
  DataLoader loader(Uneven(), {.batch_size = 2, .num_workers = 4});
  int64_t expected = 0;
  for (auto& batch : loader)
    for (int64_t value : values(batch)) EXPECT_EQ(value, expected++);
  EXPECT_EQ(expected, 40);
}

TEST(Workers, ReadOnlySoFarAhead) {
  Faulty dataset{100};
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 2, .prefetch_factor = 3});
  auto it = loader.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_LE(*dataset.reads, 2 * 2 * 3);
  EXPECT_GE(*dataset.reads, 2 * 2);
  EXPECT_EQ(values(*it), (std::vector<int64_t>{0, 1}));
}

TEST(Workers, ReadAtTheSameTime) {
  /// A sample is there when as many are asked for at a time as there are workers, or it is too late.
  struct Together {
    int64_t size() const { return 4; }
    torch::Tensor get(size_t index) const {
      ++*readers;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (*readers < 4 && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (*readers < 4) throw std::runtime_error("nobody else reads");
      return torch::tensor(static_cast<int64_t>(index));
    }
    std::shared_ptr<std::atomic<int64_t>> readers = std::make_shared<std::atomic<int64_t>>(0);
  };
  DataLoader loader(Together(), {.batch_size = 1, .num_workers = 4});
  EXPECT_EQ(batches_of(loader).size(), 4u);
}

TEST(Workers, ErrorsReachTheLoopAtTheirBatchWithTheirType) {
  for (int64_t workers : {0, 2}) {
    DataLoader loader(Faulty{10, 5}, {.batch_size = 2, .num_workers = workers});
    Batches seen;
    EXPECT_THROW(
        {
          for (auto& batch : loader) seen.push_back(values(batch));
        },
        std::out_of_range);
    EXPECT_EQ(seen, (Batches{{0, 1}, {2, 3}})) << workers << " workers";
  }
}

TEST(Workers, StreamErrorsReachTheLoop) {
  struct Broken : Stream {
    std::optional<torch::Tensor> next() {
      if (at == 3) throw std::domain_error("broken stream");
      return Stream::next();
    }
  };
  for (int64_t workers : {0, 1}) {
    Broken stream;
    stream.n = 10;
    DataLoader loader(stream, {.batch_size = 2, .num_workers = workers});
    Batches seen;
    EXPECT_THROW(
        {
          for (auto& batch : loader) seen.push_back(values(batch));
        },
        std::domain_error);
    EXPECT_EQ(seen, (Batches{{0, 1}}));
  }
}

TEST(Workers, LeavingEarlyDoesNotWaitForWhatIsAhead) {
  Faulty dataset{1000, -1, std::chrono::milliseconds(5)};
  {
    DataLoader loader(dataset, {.batch_size = 4, .num_workers = 2, .prefetch_factor = 50});
    for (auto& batch : loader) {
      EXPECT_EQ(batch.size(0), 4);
      break;
    }
  }
  EXPECT_LT(*dataset.reads, 2 * 50 * 4) << "not even what may be read ahead";
}

TEST(Workers, ALoaderIsUsableAfterABreakAndAfterAnError) {
  DataLoader loader(numbers(9), {.batch_size = 2, .num_workers = 2});
  for (int i = 0; i < 20; ++i)
    for (auto& batch : loader) {
      EXPECT_EQ(values(batch), (std::vector<int64_t>{0, 1}));
      break;
    }
  EXPECT_EQ(batches_of(loader).size(), 5u);
  DataLoader stream(Stream{9}, {.batch_size = 2, .num_workers = 1});
  for (int i = 0; i < 20; ++i)
    for (auto& batch : stream) {
      EXPECT_EQ(values(batch), (std::vector<int64_t>{0, 1}));
      break;
    }
  EXPECT_EQ(batches_of(stream).size(), 5u);
}

TEST(DataLoader, NestedPassesOverAMap) {
  DataLoader loader(numbers(4), {.batch_size = 2, .num_workers = 1});
  int64_t inner = 0;
  for (auto& a : loader)
    for (auto& b : loader) inner += (a + b).sum().item<int64_t>() >= 0;
  EXPECT_EQ(inner, 4);
}

/// Two passes at once over what has one position: the outer loop must not go on with the inner one's samples.
template <class Loader> void expect_outer_loop_fails(const Loader& loader) {
  int64_t outer = 0;
  EXPECT_THROW(
      {
        for (auto& a : loader) {
          (void)a;
          if (++outer == 2)
            for (auto& b : loader) {
              (void)b;
              break;
            }
        }
      },
      accelerate::ConfigError);
  EXPECT_LT(outer, 8);
  EXPECT_EQ(batches_of(loader).size(), 8U) << "the loader is as good as before";
}

TEST(DataLoader, NestedPassesOverWhatHasOnePositionAreAnError) {
  for (const int64_t workers : {0, 2}) {
    const DataLoaderOptions options{.batch_size = 4, .num_workers = workers};
    expect_outer_loop_fails(DataLoader(Stream{32}, options));
    expect_outer_loop_fails(DataLoader(numbers(32), torch::data::samplers::RandomSampler(32), options));
    expect_outer_loop_fails(DataLoader(numbers(32), torch::data::samplers::SequentialSampler(32), options));
  }
}

TEST(SkipFirstBatches, ReadsNothingOfAMap) {
  Faulty dataset{10, 1};
  const auto skipping = skip_first_batches(DataLoader(dataset, {.batch_size = 2}), 3);
  EXPECT_EQ(batches_of(skipping), (Batches{{6, 7}, {8, 9}}));
  EXPECT_EQ(*dataset.reads, 4);
  EXPECT_EQ(skipping.size(), 2);
  EXPECT_EQ(skip_first_batches(skipping, 9).size(), 0);
  const auto stream = skip_first_batches(DataLoader(Stream{10}, {.batch_size = 2, .num_workers = 1}), 3);
  EXPECT_EQ(batches_of(stream), (Batches{{6, 7}, {8, 9}}));
}

}  // namespace
