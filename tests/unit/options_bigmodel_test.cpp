// Options of dispatching that change no result: by what they change otherwise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <iterator>

#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/residency.hpp"
#include "ranks.hpp"

namespace options_bigmodel {
namespace {

namespace fs = std::filesystem;
using namespace accelerate;

constexpr int64_t kWide = 64, kBytes = (kWide * kWide + kWide) * 4;

struct PairImpl : torch::nn::Module {
  PairImpl() {
    first = register_module("first", torch::nn::Linear(kWide, kWide));
    second = register_module("second", torch::nn::Linear(kWide, kWide));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Pair);

struct TwoPairsImpl : torch::nn::Module {
  TwoPairsImpl() {
    a = register_module("a", Pair());
    b = register_module("b", Pair());
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(x)); }
  Pair a{nullptr}, b{nullptr};
};
TORCH_MODULE(TwoPairs);

/// Takes its input by name, beside something that must stay where it is.
struct NamedImpl : torch::nn::Module {
  NamedImpl() { linear = register_module("linear", torch::nn::Linear(kWide, kWide)); }
  at::Tensor forward(const std::map<std::string, at::Tensor>& input) {
    other = input.at("like").device();
    return linear(input.at("data"));
  }
  torch::nn::Linear linear{nullptr};
  at::Device other = at::kCPU;
};
TORCH_MODULE(Named);

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    linear = register_module("linear", torch::nn::Linear(kWide, kWide));
    norm = register_module("norm", torch::nn::BatchNorm1d(kWide));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

template <class Holder> Holder without_memory() {
  const auto scope = init_empty_weights();
  return Holder();
}

struct OptionsOfDispatch : testing::Test {
  OptionsOfDispatch() {
    torch::manual_seed(1);
    whole = TwoPairs();
    input = torch::randn({2, kWide});
    expected = whole(input);
    checkpointing::save_model(ModelRef(whole.ptr()), folder / "checkpoint", 1 << 30, true);
    (void)disk_offload(whole, folder / "offloaded");  // leaves the folder behind
    whole = TwoPairs(nullptr);
  }
  torch::NoGradGuard no_grad;
  fs::path folder = support::scratch_dir();
  TwoPairs whole = nullptr;
  at::Tensor input, expected;
  const DeviceMap on_disk{{"", "disk"}}, here{{"", "cpu"}};
  /// Room for a pair, of which a quarter holds less than two layers.
  const OffloadOptions little{.budget_bytes = 5 * kBytes, .always_read = true};
};

TEST_F(OptionsOfDispatch, ClassesAreFetchedWhole) {
  const std::vector<std::string> pairs = {"Pair"};
  const auto units = [&](const auto& model) {
    EXPECT_TRUE(torch::equal(model(input), expected));
    return model.units();
  };
  const auto dispatched = [&](const std::vector<std::string>& classes) {
    return units(
        dispatch_model(without_memory<TwoPairs>(), on_disk,
                       {.offload_dir = folder / "offloaded", .preload_module_classes = classes, .offload = little}));
  };
  EXPECT_EQ(dispatched({}), 4);
  EXPECT_EQ(dispatched(pairs), 2);
  const auto loaded = [&](const std::vector<std::string>& classes) {
    return units(
        load_checkpoint_and_dispatch(without_memory<TwoPairs>(), folder / "checkpoint",
                                     {.device_map = on_disk, .preload_module_classes = classes, .offload = little}));
  };
  EXPECT_EQ(loaded({}), 4);
  EXPECT_EQ(loaded(pairs), 2);
  const auto offloaded = [&](const std::vector<std::string>& classes) {
    return units(disk_offload(without_memory<TwoPairs>(), folder / "offloaded",
                              {.preload_module_classes = classes, .offload = little}));
  };
  EXPECT_EQ(offloaded({}), 4);
  EXPECT_EQ(offloaded(pairs), 2);
}

TEST_F(OptionsOfDispatch, ClassesThatMustNotBeSplitStayWholeInMapsAndWhenTheyAreFetched) {
  const auto load = [&](const auto& map, std::optional<MaxMemory> memory, const std::vector<std::string>& classes) {
    auto model = load_checkpoint_and_dispatch(
        without_memory<TwoPairs>(), folder / "checkpoint",
        {.device_map = map, .max_memory = std::move(memory), .no_split_module_classes = classes, .offload = little});
    EXPECT_TRUE(torch::equal(model(input), expected));
    return model;
  };
  // Room for a pair beside a layer that comes and goes, but not beside a pair that comes and goes.
  const MaxMemory memory{{"cpu", 7 * kBytes / 2}};
  EXPECT_EQ(load("sequential", memory, {}).hf_device_map(), (DeviceMap{{"a", "cpu"}, {"b", "disk"}}));
  EXPECT_EQ(load("sequential", memory, {"Pair"}).hf_device_map(), (DeviceMap{{"", "disk"}}));
  EXPECT_EQ(load(on_disk, std::nullopt, {}).units(), 4);
  EXPECT_EQ(load(on_disk, std::nullopt, {"Pair"}).units(), 2);
}

TEST_F(OptionsOfDispatch, AnIndexMayReplaceTheFoldersOwn) {
  const auto index = load_offload_index(folder / "offloaded");
  fs::remove(folder / "offloaded" / "index.json");
  EXPECT_ANY_THROW((void)dispatch_model(without_memory<TwoPairs>(), on_disk, {.offload_dir = folder / "offloaded"}));
  const auto model = dispatch_model(without_memory<TwoPairs>(), on_disk,
                                    {.offload_dir = folder / "offloaded", .offload_index = index});
  EXPECT_TRUE(torch::equal(model(input), expected));
}

TEST_F(OptionsOfDispatch, InputsComeToTheModelButForThoseThatAreNamed) {
  // A tensor without values can't come to the host.
  const std::map<std::string, at::Tensor> named = {{"data", input}, {"like", at::empty({1}, at::kMeta)}};
  Named net;
  const auto folder_of_named = folder / "named";
  checkpointing::save_model(ModelRef(net.ptr()), folder_of_named, 1 << 30, true);
  const auto check = [&](const auto& dispatched) {
    const auto plain = dispatched(false, {});
    EXPECT_FALSE(plain.moves_inputs()) << "on the host alone there is nowhere to come from";
    plain(named);
    const auto forced = dispatched(true, {});
    EXPECT_TRUE(forced.moves_inputs());
    EXPECT_ANY_THROW(forced(named));
    const auto skipping = dispatched(true, {"like"});
    EXPECT_EQ(skipping(named).sizes(), input.sizes());
    EXPECT_TRUE(skipping.unwrap()->other.is_meta());
  };
  check([&](bool force, const std::vector<std::string>& skip) {
    return dispatch_model(Named(), here, {.skip_keys = skip, .force_hooks = force});
  });
  check([&](bool force, const std::vector<std::string>& skip) {
    return load_checkpoint_and_dispatch(without_memory<Named>(), folder_of_named,
                                        {.device_map = here, .skip_keys = skip, .force_hooks = force});
  });
}

TEST_F(OptionsOfDispatch, BuffersTravelWhereTheyAreOffloaded) {
  Normed net;
  checkpointing::save_model(ModelRef(net.ptr()), folder / "normed", 1 << 30, true);
  const auto more_with = [&](const auto& dispatched) {
    return dispatched(true).streamed_bytes() - dispatched(false).streamed_bytes();
  };
  const int64_t statistics = 2 * kWide * 4;
  EXPECT_GE(more_with([&](bool buffers) {
              return dispatch_model(Normed(), on_disk,
                                    {.offload_dir = folder / (buffers ? "with" : "without"),
                                     .offload_buffers = buffers,
                                     .offload = {.always_read = true}});
            }),
            statistics);
  EXPECT_GE(more_with([&](bool buffers) {
              return load_checkpoint_and_dispatch(
                  without_memory<Normed>(), folder / "normed",
                  {.device_map = on_disk, .offload_buffers = buffers, .offload = {.always_read = true}});
            }),
            statistics);
  EXPECT_GE(more_with([&](bool buffers) {
              return disk_offload(Normed(), folder / (buffers ? "all" : "parameters"),
                                  {.offload_buffers = buffers, .offload = {.always_read = true}});
            }),
            statistics);
}

TEST_F(OptionsOfDispatch, CheckpointsAreConvertedAndNeedNotFit) {
  const auto loaded =
      load_checkpoint_and_dispatch(without_memory<TwoPairs>(), folder / "checkpoint",
                                   {.device_map = here, .dtype = at::kHalf, .keep_in_fp32_modules = {"b"}});
  EXPECT_EQ(loaded.unwrap()->a->first->weight.scalar_type(), at::kHalf);
  EXPECT_EQ(loaded.unwrap()->b->first->weight.scalar_type(), at::kFloat);
  EXPECT_ANY_THROW((void)load_checkpoint_and_dispatch(Named(), folder / "checkpoint", {.device_map = here}));
  load_checkpoint_and_dispatch(Named(), folder / "checkpoint", {.device_map = here, .strict = false}).check_intact();
}

TEST_F(OptionsOfDispatch, UnitsAreFetchedAheadAsFarAsIsAskedFor) {
  const auto hits_with = [&](int64_t prefetch) {
    const auto model =
        disk_offload(without_memory<TwoPairs>(), folder / "offloaded",
                     {.offload = {.budget_bytes = 3 * kBytes, .prefetch = prefetch, .always_read = true}});
    residency::reset_stats();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(model(input), expected));
    return residency::stats().prefetch_hits;
  };
  EXPECT_EQ(hits_with(0), 0);
  EXPECT_GT(hits_with(1), 0);
}

TEST_F(OptionsOfDispatch, ChangesGoToTheScratchFolder) {
  const auto change_with = [&](const fs::path& scratch) {
    const auto model = disk_offload(without_memory<TwoPairs>(), folder / "offloaded",
                                    {.offload = {.budget_bytes = 2 * kBytes, .always_read = true, .scratch = scratch}});
    model.unwrap()->a->first->weight.add_(1);
    for (int i = 0; i < 2; ++i) EXPECT_FALSE(torch::equal(model(input), expected));
  };
  change_with({});
  EXPECT_ANY_THROW(change_with(folder / "is not there"));
}

TEST_F(OptionsOfDispatch, SeveralThreadsRead) {
  const auto threads = [] {
    const fs::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const auto more_with = [&](int64_t readers) {
    const auto before = threads();
    const auto model = disk_offload(without_memory<TwoPairs>(), folder / "offloaded",
                                    {.offload = {.readers = readers, .always_read = true}});
    EXPECT_TRUE(torch::equal(model(input), expected));
    return threads() - before;
  };
  more_with(1);  // those that LibTorch keeps
  EXPECT_EQ(more_with(4) - more_with(1), 3);
}

}  // namespace
}  // namespace options_bigmodel
