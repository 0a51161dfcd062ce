// Walking through batches of any type, sending objects, batch-size finding, progress bars, shared state: all that needs
// one process only.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#include "memory/huge_pages.hpp"
#include "message_of.hpp"
#include "utils/parallel.hpp"

using namespace accelerate;
using testing::HasSubstr;

using support::message_of;

namespace {

enum class Kind : int8_t { word = 3, digit = 5 };

struct Leaf {
  torch::Tensor tensor;
  std::optional<std::pair<torch::Tensor, int>> maybe;
  ACCELERATE_FIELDS(tensor, maybe)
};
struct Tree {
  std::vector<Leaf> leaves;
  std::unordered_map<std::string, torch::Tensor> named;
  std::map<int, std::array<torch::Tensor, 2>> numbered;
  torch::data::Example<torch::Tensor, void> bare;
  torch::data::Example<> example;
  std::tuple<std::string, double, torch::Tensor> mixed;
  ACCELERATE_FIELDS(leaves, named, numbered, bare, example, mixed)
};

torch::Tensor number(int64_t value) { return torch::full({1}, value); }

Tree tree() {
  return {.leaves = {{number(1), std::nullopt}, {number(2), std::make_pair(number(3), 7)}},
          .named = {{"z", number(5)}, {"a", number(4)}},
          .numbered = {{-1, {number(6), number(7)}}},
          .bare = {number(8)},
          .example = {number(9), number(10)},
          .mixed = {"text", 0.5, number(11)}};
}

template <class T> std::vector<int64_t> numbers_in(const T& value) {
  std::vector<int64_t> result;
  nested::for_each_tensor(value, [&](const torch::Tensor& t) { result.push_back(t.item<int64_t>()); });
  return result;
}

}  // namespace

TEST(Nested, VisitsEveryTensorInAFixedOrder) {
  EXPECT_EQ(numbers_in(tree()), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  const Tree doubled = recursively_apply([](const torch::Tensor& t) { return t * 2; }, tree());
  EXPECT_EQ(numbers_in(doubled), (std::vector<int64_t>{2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22}));
  EXPECT_EQ(std::get<0>(doubled.mixed), "text");
  EXPECT_EQ(doubled.leaves[1].maybe->second, 7);
  EXPECT_EQ(send_to_device(tree(), at::kMeta).example.target.device(), at::Device(at::kMeta));
  static_assert(nested::all_tensors<std::tuple<torch::Tensor, std::vector<torch::Tensor>>> &&
                !nested::all_tensors<Tree> && nested::all_tensors<torch::data::Example<>>);
}

TEST(Nested, ZipsThePlacesThatBothHave) {
  auto left = tree();
  const auto right = recursively_apply([](const torch::Tensor& t) { return t * 10; }, left);
  left.named.erase("a");
  left.leaves.push_back({number(20), std::nullopt});
  std::vector<std::pair<int64_t, int64_t>> pairs;
  const auto visit = [&](const auto& self, const auto& a, const auto& b) -> void {
    if constexpr (std::is_same_v<decltype(a), const torch::Tensor&>)
      pairs.emplace_back(a.template item<int64_t>(), b.template item<int64_t>());
    else nested::zip_children(a, b, [&](const auto& x, const auto& y) { self(self, x, y); });
  };
  visit(visit, left, right);
  EXPECT_EQ(pairs, (std::vector<std::pair<int64_t, int64_t>>{
                       {1, 10}, {2, 20}, {3, 30}, {5, 50}, {6, 60}, {7, 70}, {8, 80}, {9, 90}, {10, 100}, {11, 110}}));
}

TEST(Nested, JoinsEqualStructuresAndRefusesOthers) {
  const auto joined = concatenate(std::vector<Tree>{tree(), tree()});
  EXPECT_TRUE(joined.numbered.at(-1)[1].equal(torch::tensor({7, 7})));
  EXPECT_TRUE(joined.leaves[1].maybe->first.equal(torch::tensor({3, 3})));
  const auto slice = slice_tensors(joined, 1, 2);
  EXPECT_EQ(numbers_in(slice), numbers_in(tree()));
  auto other = tree();
  other.leaves.pop_back();
  EXPECT_THAT(message_of<ShapeError>([&] {
                concatenate(std::vector<Tree>{tree(), other});
              }),
              HasSubstr("2 and 1 items"));
  other = tree();
  other.named.erase("a");
  EXPECT_THROW(concatenate(std::vector<Tree>{tree(), other}), ShapeError);
  other = tree();
  other.leaves[0].maybe.emplace(number(1), 1);
  EXPECT_THROW(concatenate(std::vector<Tree>{tree(), other}), ShapeError);
  EXPECT_THROW(concatenate(std::vector<torch::Tensor>{}), ShapeError);
}

TEST(Archive, GivesBackWhatWasWritten) {
  const Tree copy = from_bytes<Tree>(to_bytes(tree()));
  EXPECT_EQ(numbers_in(copy), numbers_in(tree()));
  EXPECT_EQ(std::get<0>(copy.mixed), "text");
  using Odd = std::tuple<Kind, std::vector<bool>, std::string, std::optional<double>, torch::Tensor,
                         std::vector<std::map<std::string, int8_t>>>;
  const Odd odd{Kind::digit,  {true, false, true}, std::string("a\0b", 3),
                std::nullopt, torch::Tensor(),     {{{"x", -128}}, {}}};
  const Odd back = from_bytes<Odd>(to_bytes(odd));
  EXPECT_EQ(std::get<0>(back), Kind::digit);
  EXPECT_EQ(std::get<1>(back), std::get<1>(odd));
  EXPECT_EQ(std::get<2>(back), std::get<2>(odd));
  EXPECT_FALSE(std::get<3>(back));
  EXPECT_FALSE(std::get<4>(back).defined());
  EXPECT_EQ(std::get<5>(back), std::get<5>(odd));
  for (const auto dtype : {at::kBool, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kLong, at::kFloat8_e4m3fn}) {
    const auto tensor = torch::arange(6, torch::kFloat).view({2, 3}).to(dtype).t();
    const auto read = from_bytes<torch::Tensor>(to_bytes(tensor));
    EXPECT_EQ(read.scalar_type(), dtype);
    EXPECT_TRUE(read.to(at::kComplexDouble).equal(tensor.to(at::kComplexDouble)));
  }
}

TEST(Archive, EveryTruncationIsAnErrorAndNeverReadsBeyondTheEnd) {
  const auto bytes = to_bytes(tree());
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(from_bytes<Tree>(bytes.substr(0, size)), CommError) << size;
  // Lengths that no message can have.
  for (const int64_t count : {int64_t{-1}, int64_t{1} << 62, int64_t{1} << 40}) {
    EXPECT_THROW(from_bytes<std::string>(to_bytes(count)), CommError);
    EXPECT_THROW(from_bytes<std::vector<double>>(to_bytes(count)), CommError);
  }
  const auto tensor = [](int dtype, std::vector<int64_t> sizes) {
    std::string text = to_bytes(true) + to_bytes(static_cast<int8_t>(dtype)) + to_bytes(sizes);
    return from_bytes<torch::Tensor>(text);
  };
  constexpr int kFloat = static_cast<int>(at::kFloat);
  EXPECT_EQ(tensor(kFloat, {5, 0}).sizes(), torch::IntArrayRef({5, 0}));
  EXPECT_THROW(tensor(kFloat, {1 << 20, 1 << 20}), CommError);  // 4 TB
  EXPECT_THROW(tensor(kFloat, {int64_t{1} << 62, int64_t{1} << 62, 0}), CommError);
  EXPECT_THROW(tensor(kFloat, {-1}), CommError);
  EXPECT_THROW(tensor(kFloat, {1}), CommError);
  EXPECT_THROW(tensor(-3, {0}), CommError);
  EXPECT_THROW(tensor(120, {0}), CommError);
}

TEST(Memory, KnowsWhatASmallerBatchCures) {
  EXPECT_TRUE(should_reduce_batch_size(std::bad_alloc()));
  EXPECT_TRUE(should_reduce_batch_size(std::runtime_error("CUDA out of memory. Tried to allocate 2.00 GiB")));
  for (const char* text :
       {"CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "HIP error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "NCCL error: Cuda failure 'out of memory'"})
    EXPECT_TRUE(should_reduce_batch_size(std::runtime_error(text))) << text;
  EXPECT_FALSE(should_reduce_batch_size(std::runtime_error("CUDA error: an illegal memory access was encountered")));
  EXPECT_FALSE(should_reduce_batch_size(std::runtime_error("the disk is full")));
  EXPECT_FALSE(should_reduce_batch_size(std::logic_error("CUDA out of memory. ")));
  // A real one: more than any address space.
  bool caught = false;
  try {
    torch::empty({int64_t{1} << 58});
  } catch (const std::exception& error) {
    caught = true;
    EXPECT_TRUE(should_reduce_batch_size(error)) << error.what();
  }
  EXPECT_TRUE(caught);

  std::vector<int64_t> tried;
  const auto fits = find_executable_batch_size(
      [&](int64_t size) {
        tried.push_back(size);
        if (size > 20) throw std::bad_alloc();
        return size;
      },
      {.starting_batch_size = 100, .reduce_batch_size_fn = [](int64_t size) { return size / 2; }});
  EXPECT_EQ(fits, 12);
  EXPECT_EQ(tried, (std::vector<int64_t>{100, 50, 25, 12}));
  EXPECT_THROW(find_executable_batch_size([](int64_t) -> int { throw std::bad_alloc(); }, 4), ResourceError);
  EXPECT_THROW(find_executable_batch_size([](int64_t) -> int { throw std::domain_error("other"); }, 4),
               std::domain_error);
}

TEST(Progress, OneLineAtTheEndWhereThereIsNoTerminal) {
  testing::internal::CaptureStderr();
  {
    ProgressBar bar({.total = 4, .description = "epoch 1", .enabled = true});
    for (int i = 0; i < 4; ++i) bar.update();
    bar.set_postfix("loss 0.25");
    EXPECT_EQ(bar.count(), 4);
    bar.close();
  }
  const auto text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_THAT(text, testing::AllOf(HasSubstr("epoch 1"), HasSubstr("4/4"), HasSubstr("loss 0.25"),
                                   testing::Not(HasSubstr("\r"))));

  testing::internal::CaptureStderr();
  {
    ProgressBar log({.total = 40, .min_interval = {}, .enabled = true});
    for (int i = 0; i < 40; ++i) log.update();
  }
  const auto tenths = testing::internal::GetCapturedStderr();  // at 10 %, 20 %, ... and the last one
  EXPECT_EQ(std::count(tenths.begin(), tenths.end(), '\n'), 10) << tenths;
  EXPECT_THAT(tenths, testing::AllOf(HasSubstr(" 10%|"), HasSubstr(" 90%|"), HasSubstr("40/40")));

  testing::internal::CaptureStderr();
  {
    ProgressBar off({.total = 4, .enabled = false});
    off.update(4);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");

  for (const auto& [delay, lines] :
       {std::pair(std::chrono::milliseconds(60000), 0), {std::chrono::milliseconds(0), 1}}) {
    testing::internal::CaptureStderr();
    { ProgressBar soon_done({.total = 1, .delay = delay, .enabled = true}); }
    const auto shown = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), lines) << shown;
  }

  testing::internal::CaptureStderr();
  std::vector<int> values{1, 2, 3};
  int sum = 0;
  for (auto& value : tqdm(values, {.description = "sum", .enabled = true})) sum += value;
  EXPECT_EQ(sum, 6);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("3/3"));
}

TEST(State, GradientStateIsSharedAndChecked) {
  GradientState::reset();
  const GradientState one({.num_steps = 4, .adjust_scheduler = false}), two;
  EXPECT_EQ(two.num_steps(), 4);
  EXPECT_FALSE(two.adjust_scheduler());
  two.set_sync_gradients(false);
  EXPECT_FALSE(one.sync_gradients());
  EXPECT_THROW(one.set_num_steps(0), ConfigError);
  EXPECT_THROW(GradientState({.num_steps = -1}), ConfigError);
  GradientState::reset();
  EXPECT_TRUE(GradientState().sync_gradients());
  EXPECT_EQ(one.num_steps(), 4) << "an older handle keeps what it had";

  // Loaders within loaders: the innermost counts.
  struct Loader : LoaderStatus {
    bool end_of_dataloader() const override { return end; }
    int64_t remainder() const override { return 3; }
    bool end = false;
  } outer, inner;
  const GradientState state;
  EXPECT_FALSE(state.in_dataloader());
  EXPECT_EQ(state.remainder(), -1);
  state.add_dataloader(&outer);
  state.add_dataloader(&inner);
  inner.end = true;
  EXPECT_TRUE(state.end_of_dataloader());
  state.remove_dataloader(&inner);
  EXPECT_FALSE(state.end_of_dataloader());
  EXPECT_EQ(state.remainder(), 3);
  state.remove_dataloader(&outer);
}

TEST(State, EnvironmentAndPrecisionNames) {
  PartialState::reset();
  ::setenv("ACCELERATE_MIXED_PRECISION", "bf16", 1);
  AcceleratorState::reset(true);
  EXPECT_EQ(AcceleratorState().mixed_precision(), PrecisionType::BF16);
  AcceleratorState::reset(true);
  ::setenv("ACCELERATE_MIXED_PRECISION", "int3", 1);
  EXPECT_THAT(message_of<ConfigError>([] { AcceleratorState(); }), HasSubstr("'int3', expected no, fp16, bf16 or fp8"));
  EXPECT_THAT(message_of<ConfigError>([] { AcceleratorState({.mixed_precision = "bf16"}); }),
              HasSubstr("'int3', expected no, fp16, bf16 or fp8"))
      << "the launch asked for what is not there";
  ::setenv("ACCELERATE_MIXED_PRECISION", "fp8", 1);
  EXPECT_EQ(AcceleratorState().mixed_precision(), PrecisionType::FP8);
  AcceleratorState::reset(true);
  ::setenv("ACCELERATE_MIXED_PRECISION", "fp16", 1);
  EXPECT_EQ(AcceleratorState({.mixed_precision = "bf16"}).mixed_precision(), PrecisionType::BF16) << "the program wins";
  AcceleratorState::reset(true);
  ::unsetenv("ACCELERATE_MIXED_PRECISION");
  PartialState::reset();
  ::setenv("ACCELERATE_DEBUG_MODE", "perhaps", 1);
  EXPECT_THAT(message_of<ConfigError>([] { PartialState(); }), HasSubstr("ACCELERATE_DEBUG_MODE is 'perhaps'"));
  ::setenv("ACCELERATE_DEBUG_MODE", "Yes", 1);
  EXPECT_TRUE(PartialState().debug());
  EXPECT_TRUE(PartialState::initialized());
  ::unsetenv("ACCELERATE_DEBUG_MODE");
  PartialState::reset();
  EXPECT_FALSE(PartialState::initialized());
  ::setenv("ACCELERATE_TORCH_DEVICE", "gpu7", 1);
  EXPECT_THAT(message_of<ConfigError>([] { PartialState(); }), HasSubstr("'gpu7'"));
  // Devices that this LibTorch can't use, or that can't communicate, are errors before anything is trained.
  ::setenv("ACCELERATE_TORCH_DEVICE", "mps", 1);
  EXPECT_THAT(message_of<accelerate::NotBuiltError>([] { PartialState(); }), HasSubstr("can't use mps here"));
  ::setenv("ACCELERATE_TORCH_DEVICE", "npu:1", 1);
  EXPECT_THAT(message_of<accelerate::NotBuiltError>([] { PartialState(); }), HasSubstr("can't use npu here"));
  ::setenv("ACCELERATE_TORCH_DEVICE", "meta", 1);
  ::setenv("WORLD_SIZE", "2", 1);
  EXPECT_THAT(message_of<accelerate::NotBuiltError>([] { PartialState(); }),
              HasSubstr("several ranks on meta devices can't communicate"));
  ::unsetenv("WORLD_SIZE");
  ::unsetenv("ACCELERATE_TORCH_DEVICE");
  ::setenv("ACCELERATE_LAUNCHED_FOR", "xpu", 1);
  EXPECT_THAT(message_of<accelerate::NotBuiltError>([] { PartialState(); }),
              HasSubstr("the launch was for xpu devices"));
  EXPECT_TRUE(PartialState({.cpu = true}).device().is_cpu()) << "the CPU was asked for";
  ::unsetenv("ACCELERATE_LAUNCHED_FOR");
  PartialState::reset();
  const PartialState cpu({.cpu = true});
  EXPECT_TRUE(cpu.device().is_cpu());
  EXPECT_THROW(PartialState({.cpu = false}), ConfigError);
  AcceleratorState::reset(true);
}

TEST(Parallel, RangesMakeUpTheWholeAndErrorsComeBack) {
  for (const int64_t count : {0, 1, 7, 1000}) {
    std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
    accelerate::parallel_ranges(count, 3, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
    });
    for (const auto& times : seen) EXPECT_EQ(times, 1) << "of " << count;
  }
  EXPECT_EQ(support::message_of<accelerate::ConfigError>([] {
              accelerate::parallel_ranges(100, 1, [](int64_t begin, int64_t end) {
                if (begin <= 99 && 99 < end) throw accelerate::ConfigError("the last one");
              });
            }),
            "the last one");
}

TEST(HugePages, ATensorsPagesGoAndItsNeighboursStay) {
  constexpr int64_t kBytes = 8 << 20, kPage = 4096;
  auto block = torch::empty({kBytes}, torch::kByte);
  accelerate::prefer_huge_pages(block);
  block.fill_(7);
  accelerate::prefer_huge_pages(torch::empty({3}));  // nothing to do
  accelerate::prefer_huge_pages(torch::empty({3}, torch::kMeta));
  auto* const begin = block.data_ptr<uint8_t>() + 100;
  accelerate::give_pages_back(begin, kBytes / 2);
  const auto zeros = (block == 0).nonzero();
  ASSERT_GT(zeros.numel(), kBytes / 2 - 2 * kPage);
  EXPECT_GE(zeros[0].item<int64_t>(), 100);
  EXPECT_LT(zeros[-1].item<int64_t>(), 100 + kBytes / 2);
}

TEST(ByteSizes, SizesWithUnits) {
  EXPECT_EQ(checkpointing::parse_size("10GB"), 10000000000);
  EXPECT_EQ(checkpointing::parse_size("1.5KB"), 1500);
  EXPECT_EQ(checkpointing::parse_size("2 MiB"), 2 << 20);
  for (const auto* text : {"", "GB", "10", "200B", "-1GB", "1e30TB", "x5GB", "0KB", "nanGB"})
    EXPECT_THROW(checkpointing::parse_size(text), ConfigError) << text;
}

TEST(Given, ACopyHasAValueOfItsOwn) {
  AcceleratorOptions options{.parallelism_config = ParallelismConfig{.dp_shard_size = 2}};
  AcceleratorOptions copy = options;
  copy.parallelism_config->dp_shard_size = 4;
  EXPECT_EQ(options.parallelism_config->dp_shard_size, 2);
  options = copy;
  copy.parallelism_config.reset();
  EXPECT_FALSE(copy.parallelism_config);
  EXPECT_EQ(options.parallelism_config.value_or({}).dp_shard_size, 4);
  copy.parallelism_config = std::optional<ParallelismConfig>();
  EXPECT_FALSE(copy.parallelism_config.to_optional());
  EXPECT_EQ(copy.parallelism_config.emplace().total_size(), 1);
}

TEST(KwargsHandlers, EachIsOfOneKind) {
  const KwargsHandler handler = GradScalerKwargs{.init_scale = 8};
  ASSERT_TRUE(handler.get_if<GradScalerKwargs>());
  EXPECT_EQ(handler.get_if<GradScalerKwargs>()->init_scale, 8);
  EXPECT_FALSE(handler.get_if<AutocastKwargs>());
}

TEST(Errors, KindsAndExitCodes) {
  EXPECT_EQ(ConfigError("x").exit_code(), 64);
  EXPECT_EQ(CommError("x").kind(), ErrorKind::comm);
  const DistributedOperationException mismatch("x");
  EXPECT_TRUE(dynamic_cast<const CommError*>(&mismatch));
  EXPECT_THROW(throw ShapeError("x"), Error);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// rank_server.cpp of this program has it. A thread that sleeps leaves its core of its own accord.
TEST(GlooGivesWay, ItsThreadSleepsWhereAConnectionIsLocked) {
  constexpr int kTries = 20;
  const auto sleeps_of = [](const char* name, bool locked) {
    std::mutex mutex;
    std::unique_lock lock(mutex, std::defer_lock);
    if (locked) lock.lock();
    int64_t sleeps = 0;
    std::thread([&] {
      EXPECT_EQ(::pthread_setname_np(::pthread_self(), name), 0);
      rusage before{}, after{};
      ::getrusage(RUSAGE_THREAD, &before);
      for (int i = 0; i < kTries; ++i) {
        const bool got = mutex.try_lock();
        EXPECT_EQ(got, !locked);
        if (got) mutex.unlock();
      }
      ::getrusage(RUSAGE_THREAD, &after);
      sleeps = after.ru_nvcsw - before.ru_nvcsw;
    }).join();
    return sleeps;
  };
  EXPECT_GE(sleeps_of("gloo_tcp_loop", true), kTries);
  EXPECT_LT(sleeps_of("gloo_tcp_loop", false), kTries);
  EXPECT_LT(sleeps_of("another", true), kTries);
}
#endif
