// Low-rank adapters: against what is written out, against PEFT, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>

#include "accelerate/adapters.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/bert.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/residency/recompute.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"
#include "warnings_of.hpp"

namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using namespace accelerate;
using support::largest_difference;
using support::message_of;
using support::scratch;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

/// A weight [inputs, outputs], as Hugging Face's.
struct Conv1DImpl : nn::Module {
  Conv1DImpl(int64_t inputs, int64_t outputs) : nn::Module("Conv1DImpl") {
    weight = register_parameter("weight", torch::randn({inputs, outputs}) * 0.2);
    bias = register_parameter("bias", torch::randn({outputs}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::addmm(bias, x, weight); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Conv1D);

/// Products in all ways that are known. Sizes differ, so that nothing fits by chance.
struct NetImpl : nn::Module {
  NetImpl() {
    register_module("words", words);
    register_module("first", first);
    register_module("block", block);
    register_module("conv", conv);
    register_module("free", free);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = torch::tanh(first(words(ids)));                    // linear, [B, T, 8]
    x = torch::tanh(x.matmul(block->weight.t()));               // matmul by a transposed weight
    auto rows = torch::tanh(conv(x.reshape({-1, x.size(2)})));  // addmm by [inputs, outputs]
    rows = torch::tanh(torch::mm(rows, free->weight.t()));      // mm
    return head(rows);
  }
  nn::Embedding words{11, 6};
  nn::Linear first{6, 8};
  nn::Linear block{nn::LinearOptions(8, 10).bias(false)};
  Conv1D conv{10, 12};
  nn::Linear free{nn::LinearOptions(12, 14).bias(false)};
  nn::Linear head{14, 5};
};
TORCH_MODULE(Net);

Net make_net(at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(5);
  Net net;
  net->to(dtype);
  return net;
}
at::Tensor ids() { return torch::arange(12).remainder(11).view({3, 4}); }

LoraConfig config_of(std::vector<std::string> targets) {
  return {.r = 3, .lora_alpha = 7, .target_modules = std::move(targets), .init_lora_weights = LoraInit::random};
}
const std::vector<std::string> kAll{"first", "block", "conv", "free", "head"};

std::map<std::string, at::Tensor> by_name(const NamedTensors& tensors) { return {tensors.begin(), tensors.end()}; }

std::map<std::string, at::Tensor> gradients_of(const LoraAdapter& adapter) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, p] : adapter.parameters()) result[name] = p.grad();
  return result;
}

/// `net` computed with W + B A * scaling in the place of each weight, and the gradients of A and B from those of the
/// weights.
struct WrittenOut {
  at::Tensor output;
  std::map<std::string, at::Tensor> gradients;
};
WrittenOut written_out(const LoraAdapter& adapter, at::ScalarType dtype = at::kDouble, double scaling = 7.0 / 3) {
  auto net = make_net(dtype);
  const auto parts = by_name(adapter.parameters());
  {
    const torch::NoGradGuard no_grad;
    for (const auto& name : kAll) {
      const auto product = parts.at(name + ".lora_B.weight").mm(parts.at(name + ".lora_A.weight")) * scaling;
      net->named_parameters()[name + ".weight"].add_(name == "conv" ? product.t() : product);
    }
  }
  WrittenOut result{net->forward(ids()), {}};
  result.output.square().sum().backward();
  for (const auto& name : kAll) {
    auto gradient = net->named_parameters()[name + ".weight"].grad();
    if (name == "conv") gradient = gradient.t();
    result.gradients[name + ".lora_A.weight"] = parts.at(name + ".lora_B.weight").t().mm(gradient) * scaling;
    result.gradients[name + ".lora_B.weight"] = gradient.mm(parts.at(name + ".lora_A.weight").t()) * scaling;
  }
  return result;
}

void expect_near(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected,
                 double relative) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name) && found.at(name).defined()) << name;
    EXPECT_LT(largest_difference(found.at(name), tensor), relative * tensor.abs().max().item<double>()) << name;
  }
}

TEST(Adapters, ComputeWhatWrittenOutWeightsDo) {
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    auto net = make_net(dtype);
    const auto adapter = add_adapter(net, config_of(kAll));
    const auto expected = written_out(adapter, dtype);
    const auto output = net->forward(ids());
    const double close = dtype == at::kDouble ? 1e-12 : 2e-6;
    EXPECT_LT(largest_difference(output, expected.output), close * expected.output.abs().max().item<double>());
    output.square().sum().backward();
    expect_near(gradients_of(adapter), expected.gradients, close);
    // Without gradients as well.
    const torch::NoGradGuard no_grad;
    EXPECT_LT(largest_difference(net->forward(ids()), expected.output),
              close * expected.output.abs().max().item<double>());
  }
}

TEST(Adapters, OnlyTheyAreTrained) {
  auto net = make_net();
  const auto before = make_net()->forward(ids());
  const auto adapter = add_adapter(net, {.target_modules = {"first", "conv"}});
  EXPECT_TRUE(torch::equal(net->forward(ids()), before)) << "B starts at zero";
  std::vector<std::string> trained;
  for (const auto& item : net->named_parameters())
    if (item.value().requires_grad()) trained.push_back(item.key());
  EXPECT_THAT(trained, UnorderedElementsAre("first.lora_A.weight", "first.lora_B.weight", "conv.lora_A.weight",
                                            "conv.lora_B.weight"));
  EXPECT_EQ(net->named_parameters()["conv.lora_A.weight"].sizes(), (std::vector<int64_t>{8, 10}));
  EXPECT_EQ(net->named_parameters()["conv.lora_B.weight"].sizes(), (std::vector<int64_t>{12, 8}));

  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05).weight_decay(0.1));
  const auto weight = net->first->weight.clone();
  double first = 0, last = 0;
  for (int i = 0; i < 30; ++i) {
    optimizer.zero_grad();
    const auto loss = (net->forward(ids()) - 1).square().mean();
    loss.backward();
    optimizer.step();
    (i == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, 0.75 * first);
  EXPECT_TRUE(torch::equal(net->first->weight, weight));
}

TEST(Adapters, DropoutIsBeforeAInTraining) {
  auto net = make_net();
  auto config = config_of({"first"});
  config.lora_dropout = 0.5;
  add_adapter(net, config);
  const auto x = torch::randn({64, 6}, torch::kDouble);
  const auto p = net->named_parameters();
  const auto plain = torch::linear(x, net->first->weight.clone(), net->first->bias);
  const auto part = [&](const at::Tensor& input) {
    return torch::linear(torch::linear(input, p["first.lora_A.weight"]), p["first.lora_B.weight"]) * (7.0 / 3);
  };
  net->eval();
  EXPECT_LT(largest_difference(net->first(x), plain + part(x)), 1e-12);
  net->train();
  torch::manual_seed(9);
  const auto found = net->first(x);
  torch::manual_seed(9);
  EXPECT_LT(largest_difference(found, plain + part(torch::dropout(x, 0.5, true))), 1e-12);
}

TEST(Adapters, ASmallerFormatKeepsThemInFp32) {
  auto net = make_net(at::kBFloat16);
  const auto adapter = add_adapter(net, config_of({"first"}));
  EXPECT_EQ(adapter.parameters()[0].second.scalar_type(), at::kFloat);
  const auto x = torch::randn({4, 6}).to(at::kBFloat16);
  const auto p = net->named_parameters();
  const auto plain = torch::linear(x, net->first->weight.clone(), net->first->bias);
  const auto part = torch::linear(torch::linear(x.to(at::kFloat), p["first.lora_A.weight"]), p["first.lora_B.weight"]);
  const auto found = net->first(x);
  EXPECT_EQ(found.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(torch::equal(found, (plain + part * (7.0 / 3)).to(at::kBFloat16)));
}

TEST(Adapters, AreThereAgainWhenAForwardIsRecomputed) {
  auto net = make_net();
  const auto adapter = add_adapter(net, config_of(kAll));
  const auto expected = written_out(adapter);
  const auto x = net->words(ids()).detach().requires_grad_();
  auto all = [&](const at::Tensor& input) {
    auto y = torch::tanh(net->first(input));
    y = torch::tanh(y.matmul(net->block->weight.t()));
    auto rows = torch::tanh(net->conv(y.reshape({-1, y.size(2)})));
    return net->head(torch::tanh(torch::mm(rows, net->free->weight.t())));
  };
  checkpoint([&] { return all(x); }).square().sum().backward();
  expect_near(gradients_of(adapter), expected.gradients, 1e-12);
}

TEST(Adapters, WorkOnWeightsThatAreElsewhere) {
  auto net = make_net(at::kFloat);
  const auto adapter = add_adapter(net, config_of(kAll));
  const auto expected = written_out(adapter, at::kFloat);
  {
    const auto offloaded = cpu_offload(net);
    expect_near({{"output", offloaded(ids())}}, {{"output", expected.output}}, 2e-6);
  }
}

TEST(Adapters, MergeIntoWeightsAndBack) {
  auto net = make_net();
  const auto adapter = add_adapter(net, config_of(kAll));
  const auto expected = net->forward(ids());
  const auto weight = net->conv->weight.clone();
  adapter.merge(), adapter.merge();
  EXPECT_TRUE(adapter.merged());
  EXPECT_LT(largest_difference(net->forward(ids()), expected), 1e-12);
  EXPECT_GT(largest_difference(net->conv->weight, weight), 0.01);
  adapter.unmerge(), adapter.unmerge();
  EXPECT_LT(largest_difference(net->conv->weight, weight), 1e-15);
  EXPECT_LT(largest_difference(net->forward(ids()), expected), 1e-12);
  adapter.set_enabled(false);
  EXPECT_LT(largest_difference(net->forward(ids()), make_net()->forward(ids())), 1e-12);
  adapter.set_enabled(true);
  EXPECT_LT(largest_difference(net->forward(ids()), expected), 1e-12);
  adapter.merge();
  adapter.remove();
  EXPECT_LT(largest_difference(net->forward(ids()), expected), 1e-12);
  EXPECT_EQ(net->named_parameters().size(), make_net()->named_parameters().size());
  add_adapter(net, config_of({"first"}));  // another one may come
}

TEST(Adapters, MoveWithTheirModel) {
  auto net = make_net(at::kFloat);
  const auto adapter = add_adapter(net, config_of(kAll));
  const auto expected = written_out(adapter, at::kFloat);
  net->to(at::kDouble);
  EXPECT_EQ(net->first->weight.scalar_type(), at::kDouble);
  EXPECT_LT(largest_difference(net->forward(ids()), expected.output), 1e-5);
  net->to(at::kCPU);
  net->to(at::kCPU, at::kDouble);
  EXPECT_LT(largest_difference(net->forward(ids()), expected.output), 1e-5);
  net->forward(ids()).sum().backward();
  for (const auto& [name, parameter] : adapter.parameters()) EXPECT_TRUE(parameter.grad().defined()) << name;
  EXPECT_FALSE(net->first->weight.requires_grad());
}

TEST(Adapters, BelongToTheModelNotToTheHandle) {
  auto net = make_net();
  const auto plain = net->forward(ids());
  add_adapter(net, config_of(kAll));
  EXPECT_GT(largest_difference(net->forward(ids()), plain), 0.01);
  const auto weight = net->first->weight;
  net = Net(nullptr);
  EXPECT_EQ(torch::linear(torch::ones({1, 6}, torch::kDouble), weight).sizes(), (std::vector<int64_t>{1, 8}));
}

TEST(Adapters, TargetsAreChosenByName) {
  const auto names = [](const LoraConfig& config) {
    std::vector<std::string> found;
    auto net = make_net();
    for (const auto& [name, tensor] : add_adapter(net, config).parameters())
      if (name.ends_with(".lora_A.weight"))
        found.push_back(name.substr(0, name.size() - 14) + std::to_string(tensor.size(0)));
    return found;
  };
  EXPECT_THAT(names({.r = 2, .target_modules = {"all-linear"}}),
              ElementsAre("first2", "block2", "conv2", "free2", "head2"));
  EXPECT_THAT(names({.r = 2, .target_modules = {"all-linear"}, .exclude_modules = {"conv", "ree"}}),
              ElementsAre("first2", "block2", "free2", "head2"));
  EXPECT_THAT(names({.r = 2, .target_modules = {"first", "free"}, .rank_pattern = {{"fre+", 5}}}),
              ElementsAre("first2", "free5"));
}

TEST(Adapters, ScalingFollowsTheConfig) {
  const auto scaled = [](LoraConfig config) {
    config.r = 4, config.target_modules = {"first"}, config.init_lora_weights = LoraInit::random;
    auto net = make_net();
    const auto adapter = add_adapter(net, config);
    const auto x = torch::eye(6, torch::kDouble);
    const auto part = net->first(x) - torch::linear(x, net->first->weight.clone(), net->first->bias);
    const auto p = adapter.parameters();
    return (part / p[1].second.mm(p[0].second).t()).mean().item<double>();
  };
  EXPECT_NEAR(scaled({}), 8.0 / 4, 1e-9);
  EXPECT_NEAR(scaled({.lora_alpha = 20}), 5, 1e-9);
  EXPECT_NEAR(scaled({.lora_alpha = 20, .use_rslora = true}), 10, 1e-9);
  EXPECT_NEAR(scaled({.alpha_pattern = {{"fir.t", 12}}}), 3, 1e-9);
  // The first that fits counts, not the first by name.
  EXPECT_NEAR(scaled({.alpha_pattern = {{"first", 12}, {"fir.*", 200}}}), 3, 1e-9);
  EXPECT_NEAR(scaled({.alpha_pattern = {{"other", 1}, {"fir.*", 200}, {"first", 12}}}), 50, 1e-9);
}

/// PEFT's example of why the order matters: "q_proj" fits "a.q_proj", too.
TEST(Adapters, TheFirstPatternCountsNotTheFirstByName) {
  const auto inner = std::make_shared<nn::Module>();
  inner->register_module("q_proj", nn::Linear(4, 4));
  const auto whole = std::make_shared<nn::Module>();
  whole->register_module("a", inner);
  const auto ranks = [&](const LoraConfig& config) {
    const auto adapter = add_adapter(whole, config);
    const auto rank = adapter.parameters()[0].second.size(0);
    adapter.remove();
    return rank;
  };
  EXPECT_EQ(ranks({.target_modules = {"q_proj"}, .rank_pattern = {{"q_proj", 3}, {"a.q_proj", 2}}}), 3);
  EXPECT_EQ(ranks({.target_modules = {"q_proj"}, .rank_pattern = {{"a.q_proj", 2}, {"q_proj", 3}}}), 2);
}

TEST(Adapters, AllLinearLeavesOutTheHeadThatPeftDoes) {
  const auto chosen = [](const std::vector<std::string>& children, const std::string& task = "") {
    const auto net = std::make_shared<nn::Module>();
    for (const auto& name : children) net->register_module(name, nn::Linear(2, 2));
    std::vector<std::string> names;
    for (const auto& [name, tensor] :
         add_adapter(net, {.r = 1, .target_modules = {"all-linear"}, .task_type = task}).parameters())
      if (name.ends_with(".lora_A.weight")) names.push_back(name.substr(0, name.find('.')));
    return names;
  };
  EXPECT_THAT(chosen({"body", "lm_head"}), ElementsAre("body"));
  EXPECT_THAT(chosen({"body", "embed_out"}), ElementsAre("body"));
  EXPECT_THAT(chosen({"body", "output"}), ElementsAre("body", "output"));
  EXPECT_THAT(chosen({"body", "classifier"}), ElementsAre("body", "classifier"));
  EXPECT_THAT(chosen({"body", "classifier"}, "SEQ_CLS"), ElementsAre("body"));
  EXPECT_THAT(chosen({"body", "score", "classifier"}, "SEQ_CLS"), ElementsAre("body")) << "both are saved whole";
  EXPECT_THAT(chosen({"body", "lm_head", "classifier"}, "SEQ_CLS"), ElementsAre("body"));
}

TEST(Adapters, InitialValuesAreThoseOfTheConfig) {
  torch::manual_seed(0);
  const auto values = [](LoraInit init) {
    nn::Sequential net(nn::Linear(400, 300));
    const auto p = add_adapter(net, {.r = 100, .target_modules = {"0"}, .init_lora_weights = init}).parameters();
    return std::pair(p[0].second.detach(), p[1].second.detach());
  };
  const auto [a, b] = values(LoraInit::kaiming);
  EXPECT_EQ(b.abs().max().item<float>(), 0);
  EXPECT_NEAR(a.abs().max().item<double>(), 1 / std::sqrt(400.0), 1e-4);
  EXPECT_NEAR(a.std().item<double>(), 1 / std::sqrt(400.0) / std::sqrt(3.0), 1e-3);
  const auto [normal, zero] = values(LoraInit::gaussian);
  EXPECT_EQ(zero.abs().max().item<float>(), 0);
  EXPECT_NEAR(normal.std().item<double>(), 0.01, 1e-3);
  EXPECT_NEAR(values(LoraInit::random).second.abs().max().item<double>(), 0.1, 1e-3);
}

TEST(Adapters, FanInFanOutSaysHowOtherModulesKeepTheirWeights) {
  struct OddImpl : nn::Module {
    OddImpl() { weight = register_parameter("weight", torch::randn({4, 6})); }
    at::Tensor forward(const at::Tensor& x) { return torch::mm(x, weight); }
    at::Tensor weight;
  };
  const auto net = std::make_shared<nn::Module>();
  const auto odd = std::make_shared<OddImpl>();
  net->register_module("odd", odd);
  auto config = config_of({"odd"});
  auto adapter = add_adapter(net, config);
  EXPECT_THAT(message_of<ConfigError>([&] {
                odd->forward(torch::ones({2, 4}));
              }),
              AllOf(HasSubstr("'odd'"), HasSubstr("fan_in_fan_out")));
  adapter.remove();
  config.fan_in_fan_out = true;
  adapter = add_adapter(net, config);
  const auto p = adapter.parameters();
  EXPECT_LT(
      largest_difference(odd->forward(torch::eye(4)), odd->weight + (p[1].second.mm(p[0].second)).t() * (7.0 / 3)),
      1e-6);
}

/// The zoo's linear layers have a class of their own. A square weight fits either way.
TEST(Adapters, FanInFanOutSaysNothingOfLinearLayers) {
  const auto merged = [](bool fan_in_fan_out) {
    torch::manual_seed(0);
    models::LlamaForCausalLM net(models::LlamaConfig{.vocab_size = 40,
                                                     .hidden_size = 16,
                                                     .intermediate_size = 24,
                                                     .num_hidden_layers = 1,
                                                     .num_attention_heads = 2});
    auto config = config_of({"q_proj"});
    config.fan_in_fan_out = fan_in_fan_out;
    config.init_lora_weights = LoraInit::random;
    add_adapter(net, config).merge();
    return net->named_parameters()["model.layers.0.self_attn.q_proj.weight"];
  };
  EXPECT_TRUE(merged(true).equal(merged(false)));
}

TEST(Adapters, WhatCanNotWorkIsRefusedByName) {
  auto net = make_net();
  const auto refused = [&](const LoraConfig& config) {
    return message_of<ConfigError>([&] { add_adapter(net, config); });
  };
  EXPECT_THAT(refused({.target_modules = {"nobody"}}), HasSubstr("nobody"));
  EXPECT_THAT(refused({.target_modules = {"words"}}), AllOf(HasSubstr("Embedding"), HasSubstr("'words'")));
  EXPECT_THAT(refused({.r = 0, .target_modules = {"first"}}), HasSubstr("r 0"));
  EXPECT_THAT(refused({.lora_alpha = -1, .target_modules = {"first"}}), HasSubstr("lora_alpha"));
  EXPECT_THAT(refused({.lora_dropout = 1, .target_modules = {"first"}}), HasSubstr("lora_dropout"));
  EXPECT_THAT(refused({.target_modules = {"first"}, .rank_pattern = {{"(", 2}}}), HasSubstr("rank_pattern"));
  EXPECT_THAT(refused({.target_modules = {"first"}, .rank_pattern = {{"[[:alpha:]]+", 2}}}),
              HasSubstr("means something else in Python"));
  EXPECT_THAT(refused({.target_modules = {"first"}, .alpha_pattern = {{"first", 0}}}), HasSubstr("alpha_pattern"));
  EXPECT_THAT(refused({.target_modules = {"first"}, .rank_pattern = {{"first", 2}, {"first", 3}}}),
              HasSubstr("'first' twice in rank_pattern"));
  nn::Sequential convolution(nn::Conv2d(1, 2, 3));
  EXPECT_THAT(message_of<ConfigError>([&] { add_adapter(convolution, {.target_modules = {"0"}}); }),
              HasSubstr("Conv2d"));
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(item.value().requires_grad()) << item.key();
  add_adapter(net, config_of({"first"}));
  EXPECT_THAT(refused({.target_modules = {"block"}}), HasSubstr("remove()"));

  nn::Sequential deferred{nullptr};
  {
    const auto scope = init_empty_weights();
    deferred = nn::Sequential(nn::Linear(2, 2));
  }
  EXPECT_THAT(message_of<ConfigError>([&] { add_adapter(deferred, {.target_modules = {"0"}}); }),
              HasSubstr("materialize"));

  // A layer that computes in a way that nobody has said.
  EXPECT_THAT(message_of<ConfigError>([&] {
                torch::einsum("bi,oi->bo", {torch::ones({1, 6}, torch::kDouble), net->first->weight});
              }),
              AllOf(HasSubstr("'first'"), HasSubstr("einsum")));
  EXPECT_THAT(message_of<ConfigError>([&] {
                torch::linear(torch::ones({1, 6}, torch::kDouble), net->first->weight.slice(0, 0, 3));
              }),
              HasSubstr("in part"));
  // And what only looks.
  EXPECT_GT(net->first->weight.norm().item<double>(), 0);
  EXPECT_TRUE(torch::equal(net->first->weight.clone(), net->first->weight));
}

/// The zoo computes one row by kernels of its own, below autograd, where no gradient is needed: the first layer's input
/// needs none, but its adapter does.
TEST(Adapters, OneTokenOfTheZooIsComputedAsMany) {
  models::LlamaConfig config;
  config.vocab_size = 20, config.hidden_size = 16, config.intermediate_size = 24, config.num_hidden_layers = 2;
  config.num_attention_heads = 4, config.initializer_range = 0.3;
  torch::manual_seed(0);
  models::LlamaForCausalLM llama(config);
  const auto adapter = add_adapter(llama, config_of({"all-linear"}));
  const auto token = torch::tensor({{7}}), two = torch::tensor({{7, 7}});
  llama->forward(token).square().sum().backward();
  const auto found = gradients_of(adapter);
  std::map<std::string, at::Tensor> one;
  for (const auto& [name, gradient] : found) {
    ASSERT_TRUE(gradient.defined()) << name;
    one[name] = gradient.clone();
  }
  llama->zero_grad();
  llama->forward(two).slice(1, 0, 1).square().sum().backward();
  for (const auto& [name, gradient] : gradients_of(adapter))
    // One token has no gradient through its attention: the rest is rounding, 4e-6 by AVX-512's kernels.
    EXPECT_LT(largest_difference(one.at(name), gradient), 1e-4 * (0.1 + gradient.abs().max().item<double>())) << name;
  const torch::NoGradGuard no_grad;
  EXPECT_LT(largest_difference(llama->forward(token), llama->forward(two).slice(1, 0, 1)), 1e-5);
}

// ---- with PEFT

class AdaptersOfPeft : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_PYTHON();
    peer({"make", GetParam(), folder()});
    result = load_safetensors(folder() / "result.safetensors");
  }
  static fs::path folder() { return scratch(GetParam()); }
  static void peer(const std::vector<std::string>& arguments) {
    const auto run = support::run_python("tests/unit/adapters_peer.py", arguments);
    ASSERT_EQ(run.exit_code, 0) << run.output;
  }
  std::pair<ModelRef, std::function<at::Tensor(const at::Tensor&)>> model() const {
    if (std::string_view(GetParam()) == "gpt2") {
      auto gpt2 = models::GPT2LMHeadModel::from_pretrained(folder() / "base");
      gpt2->eval();
      return {gpt2, [gpt2](const at::Tensor& tokens) mutable { return gpt2->forward(tokens); }};
    }
    auto llama = models::LlamaForCausalLM::from_pretrained(folder() / "base");
    llama->eval();
    return {llama, [llama](const at::Tensor& tokens) mutable { return llama->forward(tokens); }};
  }
  std::map<std::string, at::Tensor> result;
};
INSTANTIATE_TEST_SUITE_P(Kinds, AdaptersOfPeft, testing::Values("gpt2", "llama"));

TEST_P(AdaptersOfPeft, LoadComputeAndTrain) {
  const auto [net, forward] = model();
  const auto adapter = load_adapter(net, folder() / "adapter", /*is_trainable=*/true);
  const auto logits = forward(result.at("input_ids"));
  EXPECT_LT(largest_difference(logits, result.at("logits")), 2e-5);
  torch::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), result.at("input_ids").slice(1, 1).flatten())
      .backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& [name, tensor] : result)
    if (name.starts_with("grad.")) expected[name.substr(5)] = tensor;
  expect_near(gradients_of(adapter), expected, 1e-4);
  adapter.merge();
  const torch::NoGradGuard no_grad;
  EXPECT_LT(largest_difference(forward(result.at("input_ids")), result.at("merged")), 2e-5);
}

TEST_P(AdaptersOfPeft, SavedOnesAreLoadedByPeft) {
  const auto [net, forward] = model();
  const auto adapter = load_adapter(net, folder() / "adapter");
  for (const auto& [name, tensor] : adapter.parameters()) EXPECT_FALSE(tensor.requires_grad()) << name;
  adapter.save(folder() / "ours");
  peer({"load", GetParam(), folder(), "ours"});
  auto theirs = load_safetensors(folder() / "ours.safetensors");
  EXPECT_LT(largest_difference(theirs.at("logits"), result.at("logits")), 1e-6);
  theirs.erase("logits");
  const auto written = load_safetensors(folder() / "adapter" / "adapter_model.safetensors");
  ASSERT_EQ(theirs.size(), written.size());
  for (const auto& [name, tensor] : written) EXPECT_TRUE(torch::equal(theirs.at(name), tensor)) << name;
  EXPECT_EQ(adapter.config().task_type, "CAUSAL_LM");
}

TEST_P(AdaptersOfPeft, FreshOnesAreLoadedByPeft) {
  const auto [net, forward] = model();
  auto config = config_of({"all-linear"});
  config.exclude_modules = {"c_fc", "up_proj"};
  config.alpha_pattern = {{"(q_proj|c_attn)", 5}, {"(.*q_proj|.*c_attn)", 200}};  // not in alphabetical order
  config.use_rslora = true;
  const auto adapter = add_adapter(net, config);
  adapter.save(folder() / "fresh");
  peer({"load", GetParam(), folder(), "fresh"});
  const torch::NoGradGuard no_grad;
  const auto theirs = load_safetensors(folder() / "fresh.safetensors");
  EXPECT_EQ(theirs.size(), adapter.parameters().size() + 1) << "PEFT has other targets";
  EXPECT_LT(largest_difference(forward(result.at("input_ids")), theirs.at("logits")), 2e-5);
}

/// Things that files have beside A and B.
TEST(AdaptersOfPeftsFiles, HaveWhatTheySayAndGoBack) {
  SKIP_WITHOUT_PYTHON();
  const auto folder = scratch("files");
  fs::create_directories(folder);
  const auto peer = support::run_python("tests/unit/adapters_peer.py", {"files", folder});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const torch::NoGradGuard no_grad;
  std::vector<std::string> kinds;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") kinds.push_back(entry.path().stem());
  EXPECT_EQ(kinds.size(), 14U);
  std::map<std::string, at::Tensor> expected;
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind);
    const auto result = load_safetensors(folder / (kind + ".safetensors"));
    const auto& tokens = result.at("input_ids");
    std::function<at::Tensor()> forward;
    std::optional<ModelRef> net;
    if (kind == "classes") {
      auto bert = models::BertForSequenceClassification::from_pretrained(folder / "bert");
      bert->eval();
      net.emplace(bert);
      forward = [bert, tokens]() mutable { return bert->forward(tokens); };
    } else if (kind.starts_with("neox")) {
      auto neox = models::AutoModelForCausalLM::from_pretrained(folder / "neox");
      neox.module()->eval();
      net.emplace(neox.module());
      forward = [neox, tokens] { return neox(tokens); };
    } else {
      auto llama = models::LlamaForCausalLM::from_pretrained(folder / "base");
      llama->eval();
      net.emplace(llama);
      forward = [llama, tokens]() mutable { return llama->forward(tokens); };
    }
    EXPECT_LT(largest_difference(forward(), result.at("base")), 2e-5);
    const auto adapter = load_adapter(*net, folder / kind);
    for (const auto& [name, parameter] : net->parameters()) EXPECT_FALSE(parameter.requires_grad()) << name;
    expected[kind] = result.at("logits");
    EXPECT_LT(largest_difference(forward(), result.at("logits")), 2e-5);
    adapter.set_enabled(false);
    EXPECT_LT(largest_difference(forward(), result.at("base")), 2e-5) << "off";
    adapter.save(folder / (kind + "-ours"));
    adapter.set_enabled(true);
    EXPECT_LT(largest_difference(forward(), result.at("logits")), 2e-5) << "on again";
  }
  const auto theirs = support::run_python("tests/unit/adapters_peer.py", {"reload", folder});
  ASSERT_EQ(theirs.exit_code, 0) << theirs.output;
  for (const auto& [kind, logits] : expected)
    EXPECT_LT(largest_difference(load_safetensors(folder / (kind + "-ours.safetensors")).at("logits"), logits), 2e-5)
        << kind;
}

// ---- values of the model itself

TEST(AdaptersOwnValues, AreTrainedBesideThemAndSaved) {
  const auto trained = [](const Net& net) {
    std::vector<std::string> names;
    for (const auto& item : net->named_parameters())
      if (item.value().requires_grad()) names.push_back(item.key());
    return names;
  };
  const auto added = [](LoraConfig config) {
    auto net = make_net(at::kFloat);
    return std::pair(add_adapter(net, config), net);
  };
  auto config = config_of({"first", "head"});
  config.modules_to_save = {"head"};
  config.bias = "lora_only";
  const auto [adapter, net] = added(config);
  EXPECT_THAT(trained(net), UnorderedElementsAre("first.bias", "first.lora_A.weight", "first.lora_B.weight",
                                                 "head.weight", "head.bias"))
      << "what is saved whole is no target";
  config.bias = "all";
  EXPECT_THAT(trained(added(config).second), testing::IsSupersetOf({"first.bias", "conv.bias", "head.bias"}));
  const auto untouched = make_net(at::kFloat);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto first = net;
  first->forward(ids()).square().sum().backward();
  optimizer.step();
  EXPECT_FALSE(net->head->weight.equal(untouched->head->weight));
  const auto values = by_name(adapter.parameters());
  EXPECT_TRUE(values.at("head.weight").is_same(net->head->weight));
  adapter.set_enabled(false);
  EXPECT_TRUE(net->head->weight.equal(untouched->head->weight));
  EXPECT_TRUE(net->first->bias.equal(untouched->first->bias));
  adapter.set_enabled(true);
  adapter.save(scratch("own"), by_name(ModelRef(net).state()));
  auto again = make_net(at::kFloat);
  const auto loaded = load_adapter(again, scratch("own"), /*is_trainable=*/true);
  EXPECT_THAT(loaded.config().modules_to_save, ElementsAre("head"));
  EXPECT_EQ(loaded.config().bias, "lora_only");
  EXPECT_THAT(trained(again), UnorderedElementsAre("first.bias", "first.lora_A.weight", "first.lora_B.weight",
                                                   "head.weight", "head.bias"));
  EXPECT_TRUE(again->forward(ids()).equal(first->forward(ids())));
  const auto refused = [&](const char* what, const LoraConfig& wrong) {
    EXPECT_THAT(message_of<ConfigError>([&] { added(wrong); }), HasSubstr(what));
  };
  auto wrong = config_of({"first"});
  wrong.modules_to_save = {"tail"};
  refused("'tail' in modules_to_save", wrong);
  wrong.modules_to_save = {}, wrong.bias = "some";
  refused("bias 'some', expected none, all or lora_only", wrong);
  wrong.bias = "none", wrong.trainable_token_indices = {{"", {1}}};
  refused("trainable_token_indices", wrong);
  // A head that multiplies by the embeddings would change with them, where PEFT's keeps the old ones.
  models::LlamaConfig llama{.vocab_size = 40,
                            .hidden_size = 16,
                            .intermediate_size = 24,
                            .num_hidden_layers = 1,
                            .num_attention_heads = 2,
                            .tie_word_embeddings = true};
  models::LlamaForCausalLM tied(llama);
  auto embeddings = config_of({"q_proj"});
  embeddings.modules_to_save = {"embed_tokens"};
  EXPECT_THAT(message_of<ConfigError>([&] { add_adapter(tied, embeddings); }),
              AllOf(HasSubstr("'model.embed_tokens.weight' is in modules_to_save"), HasSubstr("a copy")));
  llama.tie_word_embeddings = false;
  models::LlamaForCausalLM apart(llama);
  EXPECT_NO_THROW(add_adapter(apart, embeddings));
  auto classes = config_of({"first"});
  classes.task_type = "SEQ_CLS";
  auto named = make_net(at::kFloat);
  named->register_module("classifier", nn::Linear(2, 2));
  add_adapter(named, classes);
  EXPECT_THAT(trained(named), testing::IsSupersetOf({"classifier.weight", "classifier.bias"}));
}

// ---- files

class AdapterFiles : public testing::Test {
 protected:
  void SetUp() override {
    auto net = make_net(at::kFloat);
    add_adapter(net, config_of({"first", "conv"})).save(folder);
  }
  /// The message of loading with a field of the config changed.
  std::string with(const std::string& field, const std::string& value) const {
    const auto file = folder / "adapter_config.json";
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    auto changed = text.str();
    const auto key = changed.find("\"" + field + "\":");
    EXPECT_NE(key, std::string::npos) << field;
    const auto end = changed.find_first_of(",\n", key);
    std::ofstream(file) << changed.replace(key, end - key, "\"" + field + "\": " + value);
    const auto said = message();
    std::ofstream(file) << text.str();
    return said;
  }
  std::string message() const {
    auto net = make_net(at::kFloat);
    const auto before = net->named_parameters().size();
    auto said = message_of<CheckpointError>([&] { load_adapter(net, folder); });
    EXPECT_EQ(net->named_parameters().size(), before);
    EXPECT_TRUE(net->first->weight.requires_grad());
    return said;
  }
  void write(const std::map<std::string, at::Tensor>& tensors) const {
    save_safetensors(folder / "adapter_model.safetensors", tensors);
  }
  fs::path folder = scratch("adapter");
};

TEST_F(AdapterFiles, GoThereAndBack) {
  auto net = make_net(at::kFloat), again = make_net(at::kFloat);
  auto config = config_of({"first", "conv"});
  config.lora_dropout = 0.125;
  config.base_model_name_or_path = "somebody/something";
  config.task_type = "CAUSAL_LM";
  const auto adapter = add_adapter(net, config);
  adapter.save(scratch("other"), by_name(ModelRef(net).state()));
  const auto loaded = load_adapter(again, scratch("other"));
  EXPECT_EQ(loaded.config().target_modules, config.target_modules);
  EXPECT_EQ(loaded.config().lora_dropout, 0.125);
  EXPECT_EQ(loaded.config().base_model_name_or_path, "somebody/something");
  EXPECT_EQ(loaded.config().task_type, "CAUSAL_LM");
  net->eval(), again->eval();
  EXPECT_TRUE(torch::equal(net->forward(ids()), again->forward(ids())));
  EXPECT_THAT(message_of<CheckpointError>([&] { adapter.save(scratch("none"), {}); }),
              HasSubstr("first.lora_A.weight"));
}

TEST_F(AdapterFiles, PatternsKeepTheirOrder) {
  auto net = make_net(at::kFloat), again = make_net(at::kFloat);
  auto config = config_of({"first", "conv"});
  config.rank_pattern = {{"first", 5}, {"con.", 2}, {".*", 4}};
  config.alpha_pattern = {{"first", 16}, {"(fir.*|conv)", 200}};
  const auto adapter = add_adapter(net, config);
  adapter.save(folder);
  const auto loaded = load_adapter(again, folder);
  EXPECT_EQ(loaded.config().rank_pattern, config.rank_pattern);
  EXPECT_EQ(loaded.config().alpha_pattern, config.alpha_pattern);
  EXPECT_EQ(loaded.parameters()[0].second.size(0) + loaded.parameters()[2].second.size(0), 5 + 2);
  EXPECT_TRUE(torch::equal(net->forward(ids()), again->forward(ids())));
}

/// model.layers.0.q, model.layers.1.q, model.h.0.q and top.q.
std::shared_ptr<nn::Module> layered_net() {
  const auto root = std::make_shared<nn::Module>(), model = std::make_shared<nn::Module>();
  const auto with_q = [](nn::Module& parent, const std::string& name) {
    const auto layer = std::make_shared<nn::Module>();
    layer->register_module("q", nn::Linear(4, 4));
    parent.register_module(name, layer);
  };
  for (const char* list : {"layers", "h"}) {
    const auto layers = std::make_shared<nn::Module>();
    with_q(*layers, "0");
    if (list[0] == 'l') with_q(*layers, "1");
    model->register_module(list, layers);
  }
  root->register_module("model", model);
  with_q(*root, "top");
  return root;
}

TEST_F(AdapterFiles, OfSomeLayersAreOfThoseOnly) {
  add_adapter(layered_net(), {.r = 2, .target_modules = {"q"}}).save(folder);
  std::stringstream saved;
  saved << std::ifstream(folder / "adapter_config.json").rdbuf();
  const auto load = [&](const std::string& layers, const std::string& lists, const std::string& targets = "") {
    auto text = saved.str();
    const auto set = [&](const std::string& line, const std::string& other) {
      const auto at = text.find(line);
      EXPECT_NE(at, std::string::npos) << line;
      text.replace(at, line.size(), other);
    };
    set("\"layers_to_transform\": null", "\"layers_to_transform\": " + layers);
    set("\"layers_pattern\": null", "\"layers_pattern\": " + lists);
    if (!targets.empty()) set("\"target_modules\": [\n    \"q\"\n  ]", "\"target_modules\": " + targets);
    std::ofstream(folder / "adapter_config.json") << text;
    const auto net = layered_net();
    return load_adapter(net, folder).config().target_modules;
  };
  EXPECT_THAT(load("[1]", "null"), ElementsAre("model.layers.1.q"));
  EXPECT_THAT(load("0", "null"), ElementsAre("model.h.0.q", "model.layers.0.q"));
  EXPECT_THAT(load("[0, 1]", "\"layers\""), ElementsAre("model.layers.0.q", "model.layers.1.q"));
  EXPECT_THAT(load("[0]", "[\"layers\", \"h\"]"), ElementsAre("model.h.0.q", "model.layers.0.q"));
  EXPECT_THAT(load("[1]", "null", "[\"q\", \"top.q\"]"), ElementsAre("model.layers.1.q", "top.q"))
      << "a whole name is meant whatever its layer is";
  EXPECT_THAT(load("[]", "null"), ElementsAre("q"));
  const auto refused = [&](const std::string& layers, const std::string& lists, const std::string& targets = "") {
    return message_of<CheckpointError>([&] { load(layers, lists, targets); });
  };
  EXPECT_THAT(refused("[7]", "null"), HasSubstr("no tensors of the layers that layers_to_transform names"));
  EXPECT_THAT(refused("[0.5]", "null"), HasSubstr("'layers_to_transform'"));
  EXPECT_THAT(refused("null", "\"layers\""), HasSubstr("without layers_to_transform"));
  EXPECT_THAT(refused("[0]", "\"(layers|h)\""), AllOf(HasSubstr("(layers|h)"), HasSubstr("'layers_pattern'")));
  EXPECT_THAT(refused("[0]", "null", "\".*q\""), HasSubstr("layers_to_transform [0] with target_modules"));
}

// As in PEFT, which leaves fields out that it does not know.
TEST_F(AdapterFiles, FieldsOfANewerPeftAreNamed) {
  const auto file = folder / "adapter_config.json";
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  const auto said_with = [&](const std::string& fields) {
    std::ofstream(file) << "{" + fields + text.str().substr(1);
    auto net = make_net(at::kFloat);
    return support::warnings_of([&] { load_adapter(net, folder); });
  };
  EXPECT_EQ(said_with(""), "");
  EXPECT_EQ(said_with(R"("peft_version": "0.21.2", "qalora_group_size": 16, "of_tomorrow": false,)"), "");
  EXPECT_THAT(said_with(R"("of_tomorrow": [1],)"),
              AllOf(HasSubstr("adapter_config.json': found \"of_tomorrow\" [1]"), HasSubstr("not known here")));
}

TEST_F(AdapterFiles, OfOtherKindsAreRefusedByName) {
  EXPECT_THAT(with("peft_type", "\"LOHA\""), HasSubstr("LOHA"));
  EXPECT_THAT(with("use_dora", "true"), HasSubstr("use_dora"));
  EXPECT_THAT(with("bias", "\"some\""), HasSubstr("bias 'some'"));
  EXPECT_THAT(with("modules_to_save", "[\"head\"]"),
              HasSubstr("found no 'head.weight', which modules_to_save asks for"));
  EXPECT_THAT(with("init_lora_weights", "\"pissa\""), HasSubstr("pissa"));
  EXPECT_THAT(with("r", "\"3\""), HasSubstr("'r'"));
  EXPECT_THAT(with("r", "-1"), HasSubstr("r -1"));
  EXPECT_THAT(with("r", "4"), AllOf(HasSubstr("[3, 10]"), HasSubstr("[4, inputs]")));
  EXPECT_THAT(with("lora_alpha", "null,"), HasSubstr("JSON"));
  EXPECT_THAT(with("rank_pattern", "{\"" + std::string(2000, '(') + "\": 3}"), HasSubstr("2000 bytes"));
  EXPECT_THAT(with("rank_pattern", R"({"(a": 3})"), HasSubstr("no regular expression"));
  EXPECT_THAT(with("alpha_pattern", R"({"(?:.?){20}(?:.?){20}(?:.?){20}[xy]": 3})"),
              HasSubstr("matching 'conv': match limit"));
}

TEST_F(AdapterFiles, ThatAreDamagedAreRefused) {
  const auto good = load_safetensors(folder / "adapter_model.safetensors");
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : good) tensors[name] = tensor.clone();
  auto changed = tensors;
  changed.erase("base_model.model.first.lora_B.weight");
  write(changed);
  EXPECT_THAT(message(), AllOf(HasSubstr("lora_B"), HasSubstr("'first'")));
  changed = tensors;
  for (const char* which : {"A", "B"})
    changed[std::string("base_model.model.nobody.lora_") + which + ".weight"] = torch::ones({3, 3});
  write(changed);
  EXPECT_THAT(message(), HasSubstr("'nobody'"));
  changed = tensors;
  changed["base_model.model.first.lora_embedding_A"] = torch::ones({3, 3});
  write(changed);
  EXPECT_THAT(message(), HasSubstr("lora_embedding_A"));
  changed = tensors;
  changed["base_model.model.first.lora_A.weight"] = torch::ones({3, 7});
  write(changed);
  EXPECT_THAT(message(), AllOf(HasSubstr("[3, 7]"), HasSubstr("expected [3, 6]"), HasSubstr("the weight is [8, 6]")));
  changed = tensors;
  changed["base_model.model.first.lora_A.weight"] = torch::ones({3, 6}, torch::kInt);
  write(changed);
  EXPECT_THAT(message(), AllOf(HasSubstr("Int"), HasSubstr("'first'")));
  changed = tensors;
  changed["base_model.model..lora_A.weight"] = torch::ones({3, 6});
  write(changed);
  EXPECT_THAT(message(), HasSubstr("'base_model.model..lora_A.weight'"));
  changed = tensors;
  changed["base_model.model.head.weight"] = torch::ones({9, 14});
  write(changed);
  EXPECT_THAT(message(),
              AllOf(HasSubstr("found [9, 14] for 'head.weight', expected [5, 14]"), HasSubstr("vocabulary")));
  changed = tensors;
  changed["base_model.model.tail.weight"] = torch::ones({2});
  write(changed);
  EXPECT_THAT(message(), HasSubstr("'tail.weight', which the model does not have"));
  changed = tensors;
  changed["base_model.model.words.token_adapter.trainable_tokens_delta"] = torch::ones({1, 6});
  write(changed);
  EXPECT_THAT(message(), HasSubstr("rows of 'words', and none in trainable_token_indices"));
  EXPECT_THAT(with("trainable_token_indices", "[11]"), HasSubstr("row 11 of 'words.weight'"));
  EXPECT_THAT(with("trainable_token_indices", "{\"words\": 3}"), HasSubstr("expected a list of ids"));
  write({});
  EXPECT_THAT(message(), HasSubstr("no tensors"));
  fs::remove(folder / "adapter_model.safetensors");
  EXPECT_THAT(message(), HasSubstr("adapter_model.safetensors"));
  fs::remove(folder / "adapter_config.json");
  EXPECT_THAT(message(), HasSubstr("adapter_config.json"));
}

}  // namespace
