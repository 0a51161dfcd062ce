// Accelerator::summary() and print_summary(): of models alone, tied, frozen, without memory, averaged, sharded,
// offloaded.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "ranks.hpp"
#include "small_gpt.hpp"

using namespace accelerate;
using support::Gpt;
using support::rank;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

namespace {

struct Summary : testing::Test {
  void SetUp() override { reset(); }
  void TearDown() override { reset(); }
  static void reset() {
    AcceleratorState::reset(true);
    GradientState::reset();
  }
};

struct WithBufferImpl : torch::nn::Module {
  WithBufferImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    again = register_module("again", first.ptr());  // the same module at a second place
    first->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(first(x)); }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  std::shared_ptr<torch::nn::Module> again;
};
TORCH_MODULE(WithBuffer);

struct TiedHeadImpl : torch::nn::Module {
  TiedHeadImpl() {
    table = register_module("table", torch::nn::Embedding(10, 4));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 10).bias(false)));
    tie(table, "weight", head, "weight");
  }
  at::Tensor forward(const at::Tensor& ids) { return head(table(ids)); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(TiedHead);

const ModuleSummary& module_of(const ModelSummary& summary, const std::string& path) {
  for (const auto& module : summary.modules)
    if (module.path == path) return module;
  throw std::out_of_range("no module " + path);
}
const TensorSummary& tensor_of(const ModelSummary& summary, const std::string& name) {
  for (const auto& tensor : summary.tensors)
    if (tensor.name == name) return tensor;
  throw std::out_of_range("no tensor " + name);
}

std::vector<std::string> paths(const ModelSummary& summary) {
  std::vector<std::string> all;
  for (const auto& module : summary.modules) all.push_back(module.path);
  return all;
}

int64_t bytes_of(const ModelRef& model) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : model.parameters()) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace

TEST_F(Summary, NamesShapesAndNumbers) {
  const Accelerator accelerator;
  const WithBuffer net;
  const auto summary = accelerator.summary(net);
  // As named_modules(): a module that is registered twice is there once.
  EXPECT_THAT(paths(summary), ElementsAre("", "first", "norm"));
  const auto &all = summary.modules[0], &first = summary.modules[1], &norm = summary.modules[2];
  EXPECT_EQ(all.class_name, "WithBuffer");
  EXPECT_EQ(first.class_name, "Linear");
  EXPECT_EQ(first.depth, 1);
  EXPECT_EQ(std::tuple(first.parameters, first.trainable, first.bytes, first.bytes_here), std::tuple(16, 12, 64, 64));
  EXPECT_EQ(std::tuple(norm.parameters, norm.trainable), std::tuple(8, 8));
  EXPECT_EQ(norm.bytes, 8 * 4 + 2 * 4 * 4 + 8);  // running mean and variance, and a count of batches
  EXPECT_THAT(norm.dtypes, ElementsAre(at::kFloat, at::kLong));
  EXPECT_EQ(std::tuple(all.parameters, all.trainable, all.bytes), std::tuple(24, 20, first.bytes + norm.bytes));
  const auto& weight = tensor_of(summary, "first.weight");
  EXPECT_THAT(weight.shape, ElementsAre(4, 3));
  EXPECT_THAT(weight.tied, ElementsAre("again.weight"));
  EXPECT_EQ(weight.place, "cpu");
  EXPECT_TRUE(weight.parameter && weight.trainable);
  EXPECT_FALSE(tensor_of(summary, "first.bias").trainable);
  EXPECT_FALSE(tensor_of(summary, "norm.running_mean").parameter);
  EXPECT_EQ(summary.ranks, (std::vector<std::map<std::string, int64_t>>{{{"cpu", all.bytes}}}));
}

TEST_F(Summary, TheTableSaysItToPeople) {
  const Accelerator accelerator;
  const WithBuffer net;
  testing::internal::CaptureStdout();
  accelerator.print_summary(net);
  const auto table = testing::internal::GetCapturedStdout();
  EXPECT_EQ(table, accelerator.summary(net).text() + "\n");
  EXPECT_THAT(table, HasSubstr("module   class"));
  EXPECT_THAT(table, ContainsRegex("\n\\(model\\) +WithBuffer +24 +20 +float32, int64 +cpu +136 B\n"));
  EXPECT_THAT(table, ContainsRegex("\nfirst +Linear +weight 4x3, bias 4 +16 +12 +float32 +cpu +64 B\n"));
  EXPECT_THAT(table, ContainsRegex("\nnorm +BatchNorm1d +weight 4, bias 4, running_mean 4, 2 more +8 +8 "));
  EXPECT_THAT(table, HasSubstr("parameters: 24, of them trainable: 20; tied, and counted once: 2\n"));
  EXPECT_THAT(table, HasSubstr("whole: 136 B, of it 40 B in 3 buffers\nin memory: 136 B cpu\n"));
  const auto root = accelerator.summary(net).text({.depth = 0});
  EXPECT_THAT(root, AllOf(HasSubstr("(model)"), Not(HasSubstr("\nfirst")), HasSubstr("parameters: 24,")));
  const torch::nn::Linear large(2000, 1000);
  EXPECT_THAT(accelerator.summary(large).text(), AllOf(HasSubstr("2,001,000"), HasSubstr("7.6 MiB cpu")));
}

TEST_F(Summary, TheJsonSaysItToPrograms) {
  const Accelerator accelerator;
  const WithBuffer net;
  const auto summary = accelerator.summary(net);
  const auto json = nlohmann::json::parse(summary.json());
  ASSERT_EQ(json["modules"].size(), 3u);
  EXPECT_EQ(
      json["modules"][1],
      nlohmann::json(
          {{"path", "first"},
           {"class", "Linear"},
           {"depth", 1},
           {"own", {{{"name", "weight"}, {"tensor", "first.weight"}}, {{"name", "bias"}, {"tensor", "first.bias"}}}},
           {"parameters", 16},
           {"trainable", 12},
           {"bytes", 64},
           {"bytes_here", 64},
           {"dtypes", {"float32"}},
           {"places", {"cpu"}}}));
  EXPECT_EQ(json["tensors"][0], nlohmann::json({{"name", "first.weight"},
                                                {"tied", {"again.weight"}},
                                                {"shape", {4, 3}},
                                                {"dtype", "float32"},
                                                {"parameter", true},
                                                {"trainable", true},
                                                {"place", "cpu"},
                                                {"bytes", 48},
                                                {"bytes_here", 48}}));
  EXPECT_EQ(json["ranks"], nlohmann::json::parse(R"([{"cpu": 136}])"));
  EXPECT_EQ(json["shards"], 1);
}

TEST_F(Summary, TiedWeightsAreCountedOnceAndShownTwice) {
  const Accelerator accelerator;
  const TiedHead net;
  const auto summary = accelerator.summary(net);
  EXPECT_EQ(std::tuple(summary.modules[0].parameters, summary.modules[0].bytes), std::tuple(40, 160));
  EXPECT_EQ(module_of(summary, "table").parameters, 40);
  EXPECT_EQ(module_of(summary, "head").parameters, 40);
  ASSERT_EQ(summary.tensors.size(), 1u);
  EXPECT_THAT(summary.tensors[0].tied, ElementsAre("head.weight"));
  EXPECT_THAT(summary.text(), AllOf(HasSubstr("parameters: 40, "), HasSubstr("; tied, and counted once: 1\n"),
                                    ContainsRegex("\nhead +Linear +weight 10x4 +40 ")));
}

TEST_F(Summary, WithoutMemory) {
  Accelerator accelerator;
  const auto net = [] {
    const auto empty = init_empty_weights();
    return Gpt();
  }();
  const auto before = accelerator.summary(net);
  EXPECT_THAT(before.modules[0].places, ElementsAre("deferred"));
  EXPECT_EQ(before.modules[0].bytes, bytes_of(net));
  EXPECT_EQ(before.modules[0].bytes_here, 0);
  EXPECT_THAT(before.text(), testing::EndsWith("\nin memory: nothing"));
  EXPECT_TRUE(is_deferred(net->scale));  // nothing was made
  materialize(net);
  EXPECT_THAT(accelerator.summary(net).modules[0].places, ElementsAre("cpu"));
  const auto meta = [] {
    const auto on_meta = init_on_device(at::kMeta);
    return torch::nn::Linear(2, 2);
  }();
  EXPECT_THAT(accelerator.summary(meta).modules[0].places, ElementsAre("meta"));
  EXPECT_EQ(accelerator.summary(meta).modules[0].bytes_here, 0);
}

TEST_F(Summary, OffloadedToFiles) {
  Accelerator accelerator;
  Gpt net;
  const auto folder = std::filesystem::path(support::scratch_dir()) / "offload";
  for (const bool read : {false, true}) {
    const auto model =
        dispatch_model(net, DeviceMap{{"", "cpu"}, {"h1", "disk"}},
                       {.offload_dir = folder / (read ? "read" : "mapped"), .offload = {.always_read = read}});
    const auto summary = accelerator.summary(model);
    EXPECT_THAT(summary.modules[0].places, testing::UnorderedElementsAre("cpu", "file")) << read;
    const auto& block = module_of(summary, "h1");
    EXPECT_THAT(block.places, ElementsAre("file"));
    EXPECT_EQ(block.bytes_here, 0);
    EXPECT_EQ(block.bytes, module_of(summary, "h0").bytes_here);
    EXPECT_EQ(summary.ranks[0].at("cpu"), summary.modules[0].bytes - block.bytes);
    EXPECT_EQ(tensor_of(summary, "h1.up.weight").place, "file");
    EXPECT_THAT(tensor_of(summary, "h1.up.weight").shape, ElementsAre(96, 24));
  }
}

TEST_F(Summary, OffloadedToTheHost) {
  Accelerator accelerator;
  Gpt net;
  const int64_t whole = bytes_of(net);
  // A device without memory of its own, which is there on every machine.
  const auto model = dispatch_model(net, DeviceMap{{"", "cpu"}}, {.main_device = at::kMeta});
  const auto summary = accelerator.summary(model);
  EXPECT_THAT(summary.modules[0].places, ElementsAre("host"));
  EXPECT_EQ(summary.ranks[0].at("host"), whole);
  EXPECT_THAT(summary.text(), AllOf(HasSubstr("  host  "), HasSubstr(" host")));
}

TEST_F(Summary, InFewBits) {
  Accelerator accelerator;
  BnbQuantizationConfig config{.load_in_4bit = true, .bnb_4bit_quant_type = "nf4", .torch_dtype = at::kFloat};
  config.skip_modules = std::vector<std::string>{"1"};
  const auto folder = std::filesystem::path(support::scratch_dir()) / "codes";
  for (const bool on_disk : {false, true}) {
    torch::nn::Sequential net(torch::nn::Linear(64, 48), torch::nn::Linear(64, 64));
    const auto model = load_and_quantize_model(
        net, config, {}, {.device_map = DeviceMap{{"", on_disk ? "disk" : "cpu"}}, .offload_folder = folder});
    const auto summary = accelerator.summary(model);
    const auto& weight = tensor_of(summary, "0.weight");
    EXPECT_EQ(weight.place, on_disk ? "nf4 codes, file" : "nf4 codes");
    EXPECT_EQ(weight.bytes, 64 * 48 / 2 + 64 * 48 / 64 * 4) << "half a byte each, and a scale per 64";
    EXPECT_EQ(weight.bytes_here, on_disk ? 0 : weight.bytes);
    EXPECT_THAT(weight.shape, ElementsAre(48, 64));
    EXPECT_EQ(tensor_of(summary, "1.weight").place, on_disk ? "file" : "cpu");
  }
}

RANKS_TEST(SummaryInRanks, EachHasAllOfAnAveragedModel, 2) {
  Accelerator accelerator;
  Gpt net;
  auto model = accelerator.prepare(net);
  const auto summary = accelerator.summary(model);
  EXPECT_EQ(summary.shards, 1);
  EXPECT_EQ(summary.ranks.size(), 2u);
  EXPECT_EQ(summary.ranks[0], summary.ranks[1]);
  EXPECT_EQ(summary.ranks[0].at("cpu"), bytes_of(net));
  EXPECT_THAT(summary.text(), HasSubstr("in memory of each of 2 ranks: "));
  testing::internal::CaptureStdout();
  accelerator.print_summary(model, {.depth = 1});
  const auto printed = testing::internal::GetCapturedStdout();
  if (rank() == 0) EXPECT_THAT(printed, AllOf(HasSubstr("\nh0 "), Not(HasSubstr("h0.qkv"))));
  else EXPECT_EQ(printed, "");
}

RANKS_TEST(SummaryInRanks, ShardsAreWhatEachKeeps, 2, 3) {
  for (const bool deferred : {false, true}) {
    Accelerator accelerator({.fsdp_plugin = FullyShardedDataParallelPlugin{}});
    const auto net = [&] {
      if (!deferred) return Gpt();
      const auto empty = init_empty_weights();
      return Gpt();
    }();
    const int64_t whole = bytes_of(net);
    auto model = accelerator.prepare(net);
    const auto before = residency::stats().bytes_fetched;
    const auto summary = accelerator.summary(model);
    EXPECT_EQ(residency::stats().bytes_fetched, before);  // nothing was gathered for it
    EXPECT_THAT(summary.modules[0].places, ElementsAre("sharded"));
    EXPECT_THAT(tensor_of(summary, "wte.weight").shape, ElementsAre(61, 24));
    EXPECT_EQ(summary.modules[0].bytes, whole);
    EXPECT_EQ(summary.shards, support::world_size());
    int64_t together = 0;
    for (const auto& one : summary.ranks) together += one.at("sharded");
    EXPECT_EQ(together, whole);
    EXPECT_EQ(summary.ranks[static_cast<size_t>(rank())].at("sharded"), summary.modules[0].bytes_here);
    EXPECT_LT(summary.modules[0].bytes_here, whole * 2 / 3);
    EXPECT_THAT(summary.text(), AllOf(HasSubstr("sharded over " + std::to_string(support::world_size()) + " ranks"),
                                      HasSubstr("  rank 1: ")));
  }
}

RANKS_TEST(SummaryInRanks, HybridShardsAreSoManyAsHoldTheModelTogether, 4) {
  Accelerator accelerator({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2},
                           .parallelism_config = ParallelismConfig{.dp_replicate_size = 2, .dp_shard_size = 2}});
  Gpt net;
  auto model = accelerator.prepare(net);
  EXPECT_EQ(accelerator.summary(model).shards, 2);
}
