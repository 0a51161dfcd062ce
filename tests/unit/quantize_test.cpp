/// Models in few bits: against transformers with bitsandbytes in both directions, operators on codes, and what is
/// refused.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/wait.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/adapters.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/codes/kernels.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/model/tie.hpp"
#include "accelerate/models/bert.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerate/utils/memory.hpp"
#include "formats/gguf_writer.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
namespace codes = accelerate::codes;
using accelerate::BnbQuantizationConfig;
using accelerate::CheckpointError;
using accelerate::ConfigError;
using accelerate::load_and_quantize_model;
using accelerate::quantized_state_dict;
using accelerate::models::BertConfig;
using accelerate::models::BertModel;
using accelerate::models::LlamaConfig;
using accelerate::models::LlamaForCausalLM;
using accelerate::models::Weights;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

fs::path scratch(const std::string& name) { return fs::path(support::scratch_dir()) / name; }
template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", torch::nn::Linear(64, 128))),
        second(register_module("second", torch::nn::Linear(128, 64))),
        head(register_module("head", torch::nn::Linear(64, 10))) {}
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(second(torch::relu(first(x))))); }
  torch::nn::Linear first, second, head;
};
TORCH_MODULE(Net);

Net empty_net() {
  const auto empty = accelerate::init_empty_weights();
  return Net();
}

/// The net's weights as a file.
fs::path saved_net(const Net& net, const std::string& name = "net.safetensors") {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [key, tensor] : accelerate::ModelRef(net).state()) tensors.emplace(key, tensor.detach().clone());
  accelerate::save_safetensors(scratch(name), tensors);
  return scratch(name);
}

/// Exact, so that results are those of decoded weights to the bit.
BnbQuantizationConfig nf4() {
  return {
      .load_in_4bit = true, .bnb_4bit_quant_type = "nf4", .bnb_4bit_compute_dtype = at::kFloat, .exact_products = true};
}

// --- Hugging Face
// ------------------------------------------------------------------------------------------------------

BertModel empty_minilm(const fs::path& folder) {
  const auto empty = accelerate::init_empty_weights();
  return BertModel(BertConfig::from_pretrained(folder), accelerate::models::BertModelOptions{}, Weights::uninitialized);
}

std::pair<at::Tensor, at::Tensor> run(BertModel& model) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const auto out = model(torch::arange(1000, 1012).view({2, 6}));
  return {out.last_hidden_state, out.pooler_output};
}

void expect_near(const std::pair<at::Tensor, at::Tensor>& ours, const fs::path& file, double most) {
  const auto theirs = accelerate::load_safetensors(file);
  EXPECT_LT((ours.first - theirs.at("hidden")).abs().max().item<double>(), most);
  EXPECT_LT((ours.second - theirs.at("pooled")).abs().max().item<double>(), most);
}

struct Quantization {
  std::string kind;
  BnbQuantizationConfig config;
  double most;  ///< difference of results: of the order of the rounding of products
};

class WithTransformers : public ::testing::TestWithParam<Quantization> {};

TEST_P(WithTransformers, FilesAndResultsAreTheSameInBothDirections) {
  SKIP_WITHOUT_PYTHON();
  SKIP_WITHOUT_DATA();
  const auto& [kind, config, most] = GetParam();
  const fs::path minilm = *support::data_dir() / "minilm", theirs = scratch("theirs_" + kind),
                 ours = scratch("ours_" + kind);
  const auto peer = support::run_python("tests/unit/quantize_peer.py", {"save", kind, minilm.string(), theirs.string(),
                                                                        scratch("theirs.safetensors").string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;

  // Ours, quantized while it is loaded: their bits.
  auto model = empty_minilm(minilm);
  const auto quantized =
      load_and_quantize_model(model, config, minilm / "model.safetensors", {.device_map = "auto", .strict = false});
  const auto result = run(model);
  expect_near(result, scratch("theirs.safetensors"), most);
  const auto state = quantized_state_dict(model);
  const auto expected = accelerate::load_safetensors(theirs / "model.safetensors");
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(state.contains(name)) << name;
    if (name.find("quant_state") == std::string::npos) {  // the same JSON, but for spaces
      EXPECT_TRUE(tensor.equal(state.at(name).view(tensor.sizes()))) << name;
    }
  }
  for (const auto& [name, tensor] : state)
    EXPECT_TRUE(expected.contains(name) || name.find("position_ids") != std::string::npos) << name;

  // They load ours.
  fs::create_directories(ours);
  fs::copy_file(minilm / "config.json", ours / "config.json", fs::copy_options::overwrite_existing);
  accelerate::save_quantized_model(model, config, ours);
  const auto loaded = support::run_python("tests/unit/quantize_peer.py",
                                          {"load", ours.string(), scratch("loaded.safetensors").string()});
  ASSERT_EQ(loaded.exit_code, 0) << loaded.output;
  expect_near(result, scratch("loaded.safetensors"), most);

  // We load theirs, with the configuration that the folder says: the codes as they are.
  std::ifstream text(theirs / "config.json");
  const auto read = BnbQuantizationConfig::from_json({std::istreambuf_iterator<char>(text), {}});
  EXPECT_EQ(read.load_in_8bit, config.load_in_8bit);
  EXPECT_EQ(read.bnb_4bit_use_double_quant, config.bnb_4bit_use_double_quant);
  auto again = empty_minilm(minilm);
  auto config_again = read;
  config_again.torch_dtype = at::kFloat;
  config_again.exact_products = config.exact_products;
  const auto kept = load_and_quantize_model(again, config_again, theirs, {.strict = false});
  EXPECT_EQ(kept.code_bytes(), quantized.code_bytes());
  const auto repeated = run(again);
  EXPECT_LT((repeated.first - result.first).abs().max().item<double>(), most);

  // Without quantization the same folder is decoded.
  auto plain = empty_minilm(minilm);
  accelerate::load_checkpoint_in_model(plain, theirs, {.dtype = at::kFloat, .strict = false});
  EXPECT_LT((run(plain).first - result.first).abs().max().item<double>(), kind == "int8" ? 0.5 : 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Quantize, WithTransformers,
    ::testing::Values(
        Quantization{"nf4",
                     {.load_in_4bit = true,
                      .bnb_4bit_quant_type = "nf4",
                      .bnb_4bit_use_double_quant = true,
                      .bnb_4bit_compute_dtype = at::kFloat,
                      .exact_products = true},
                     2e-5},
        Quantization{"fp4", {.load_in_4bit = true, .bnb_4bit_compute_dtype = at::kFloat, .exact_products = true}, 2e-5},
        // A rounding of an activation that falls the other way is a step of 1/127 of its row's largest.
        Quantization{"int8", {.load_in_8bit = true, .torch_dtype = at::kFloat}, 2e-2}),
    [](const auto& info) { return info.param.kind; });

TEST(QuantizeInt8, IsBitsandbytesLayerWithOutliersAndWithout) {
  SKIP_WITHOUT_PYTHON();
  const auto file = scratch("int8.safetensors");
  const auto peer = support::run_python("tests/unit/quantize_peer.py", {"int8", file.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const auto expected = accelerate::load_safetensors(file);
  for (const double threshold : {0.0, 6.0}) {
    torch::nn::Sequential net(torch::nn::Linear(64, 48));
    {
      const torch::NoGradGuard no_grad;
      net[0]->as<torch::nn::LinearImpl>()->weight.copy_(expected.at("weight"));
      net[0]->as<torch::nn::LinearImpl>()->bias.copy_(expected.at("bias"));
    }
    const auto model = load_and_quantize_model(net, {.load_in_8bit = true,
                                                     .llm_int8_threshold = threshold,
                                                     .torch_dtype = at::kFloat,
                                                     .skip_modules = std::vector<std::string>{}});
    const torch::NoGradGuard no_grad;
    const auto& x = expected.at("x");
    const std::string y = "y." + std::to_string(static_cast<int>(threshold)) + ".";
    EXPECT_TRUE(torch::allclose(net->forward(x), expected.at(y + "all"), 1e-6, 1e-6));
    EXPECT_TRUE(torch::allclose(net->forward(x[1].slice(0, 2, 3)), expected.at(y + "one"), 1e-6, 1e-6));
    // bitsandbytes rounds the bias to fp16 first, which may be a last digit of fp16.
    EXPECT_TRUE(torch::allclose(net->forward(x.to(at::kHalf)), expected.at(y + "half"), 1e-3, 1e-2));
    EXPECT_EQ(net->forward(x.to(at::kHalf)).scalar_type(), at::kHalf);
  }
  EXPECT_FALSE(torch::allclose(expected.at("y.0.all"), expected.at("y.6.all"), 1e-2, 1e-2));
}

// --- operators
// ---------------------------------------------------------------------------------------------------------

TEST(QuantizeOperators, ComputeOnCodesWhereTheyCanAndDecodeWhereNot) {
  torch::manual_seed(4);
  Net net;
  const auto x = torch::randn({5, 64}), second = torch::randn({5, 128});
  const auto original = net->first->weight.detach().clone();
  const auto model = load_and_quantize_model(net, nf4());
  const auto w = codes::decode(codes::encode(original, {.encoding = codes::Encoding::nf4}));
  const auto& weight = net->first->weight;
  const auto& bias = net->first->bias;
  EXPECT_EQ(weight.sizes(), original.sizes());
  EXPECT_FALSE(weight.requires_grad());
  EXPECT_TRUE(bias.requires_grad());
  EXPECT_EQ(model.code_bytes(), 2 * (64 * 128 / 2 + 64 * 128 / 64 * 4));  // the head stays
  EXPECT_TRUE(net->head->weight.requires_grad());
  const torch::NoGradGuard no_grad;
  const auto products = [](const auto& f) {
    const auto before = accelerate::residency::stats();
    f();
    const auto after = accelerate::residency::stats();
    return std::pair(after.products_on_codes - before.products_on_codes, after.faults - before.faults);
  };
  const std::pair<int64_t, int64_t> on_codes(1, 0), decoded(0, 1);
  EXPECT_EQ(products([&] { EXPECT_TRUE(torch::linear(x, weight, bias).equal(torch::linear(x, w, bias))); }), on_codes);
  EXPECT_EQ(products([&] { EXPECT_TRUE(torch::linear(x, weight).equal(torch::linear(x, w))); }), on_codes);
  EXPECT_EQ(products([&] { EXPECT_TRUE(torch::matmul(x, weight.t()).equal(torch::matmul(x, w.t()))); }), on_codes);
  EXPECT_EQ(products([&] { EXPECT_TRUE(torch::mm(x, weight.t()).equal(torch::mm(x, w.t()))); }), on_codes);
  EXPECT_EQ(products([&] { EXPECT_TRUE(torch::addmm(bias, x, weight.t()).equal(torch::addmm(bias, x, w.t()))); }),
            on_codes);
  const auto indices = torch::tensor({{3, 127}, {0, 3}});
  EXPECT_EQ(products([&] { EXPECT_TRUE(torch::embedding(weight, indices).equal(torch::embedding(w, indices))); }),
            on_codes);
  EXPECT_EQ(products([&] { EXPECT_TRUE((weight * 2).equal(w * 2)); }), decoded);
  // While it is present, there is no fault; products with another part of it are not computed from codes.
  EXPECT_TRUE(torch::matmul(second, weight).equal(torch::matmul(second, w)));
  EXPECT_TRUE(torch::linear(x, weight.slice(0, 4, 9)).equal(torch::linear(x, w.slice(0, 4, 9))));
  EXPECT_TRUE(torch::addmm(bias, x, weight.t(), 2).equal(torch::addmm(bias, x, w.t(), 2)));
  EXPECT_TRUE(weight.t().contiguous().equal(w.t()));
  // One leaves when another comes.
  EXPECT_EQ(products([&] { net->second->weight.sum(); }), decoded);
  EXPECT_EQ(products([&] { weight.sum(); }), decoded);
  EXPECT_LE(accelerate::residency::stats().resident_bytes, 64 * 128 * 4);
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/// The memory of this process, without pages of files.
int64_t memory_in_use() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) * 1024;
  throw std::runtime_error("no RssAnon in /proc/self/status");
}

TEST(Quantize, ValuesThatAreEncodedLeaveNoHolesInMemory) {
  static constexpr int64_t kLayers = 16, kSize = 1024;
  const auto path = scratch("no_holes.safetensors");
  const auto model = [] {
    torch::nn::Sequential net;
    for (int64_t i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(kSize, kSize));
    return net;
  };
  {
    std::map<std::string, at::Tensor> values;
    for (const auto& weight : model()->named_parameters()) values.emplace(weight.key(), weight.value().detach());
    accelerate::save_safetensors(path, values);
  }
  for (const bool eight : {true, false}) {
    auto net = [&] {
      const auto empty = accelerate::init_empty_weights();
      return model();
    }();
    accelerate::return_freed_memory();
    const int64_t before = memory_in_use();
    BnbQuantizationConfig config{.load_in_8bit = eight, .load_in_4bit = !eight, .torch_dtype = at::kBFloat16};
    config.skip_modules.emplace();
    const auto weights = load_and_quantize_model(net, config, path);
    // A value is 4 MB in fp32 and 2 MB in bf16: places of a few of them would be more than is allowed.
    EXPECT_LE(memory_in_use() - before, weights.code_bytes() + (8 << 20)) << (eight ? "int8" : "nf4");
  }
  fs::remove(path);
}
#endif

/// As torch.jit.script makes them.
torch::jit::Module scripted_linear(int64_t inputs, int64_t outputs) {
  torch::jit::Module module("__torch__.torch.nn.modules.linear.Linear");
  module.register_parameter("weight", torch::randn({outputs, inputs}), false);
  module.register_parameter("bias", torch::randn({outputs}), false);
  module.define("def forward(self, x):\n  return torch.linear(x, self.weight, self.bias)\n");
  return module;
}

TEST(QuantizeOperators, ScriptModulesComputeOnCodes) {
  torch::manual_seed(15);
  torch::jit::Module net("__torch__.Net");
  net.register_module("first", scripted_linear(64, 128));
  net.register_module("last", scripted_linear(128, 64));
  net.define("def forward(self, x):\n  return self.last.forward(torch.relu(self.first.forward(x)))\n");
  const auto x = torch::randn({3, 64}).requires_grad_();
  const auto value = [&](const char* module, const char* name) {
    return net.attr(module).toModule().attr(name).toTensor();
  };
  const auto decoded = [&](const char* module) {
    return codes::decode(codes::encode(value(module, "weight").detach().clone(), {.encoding = codes::Encoding::nf4}));
  };
  const auto first = decoded("first"), last = decoded("last");
  auto config = nf4();
  config.skip_modules.emplace();
  const auto model = load_and_quantize_model(accelerate::ModelRef(net), config);
  const auto expected =
      torch::linear(torch::relu(torch::linear(x, first, value("first", "bias"))), last, value("last", "bias"));
  const auto of_x = torch::autograd::grad({expected.sum()}, {x}).at(0);
  const auto before = accelerate::residency::stats();
  constexpr int64_t kCalls = 4;  // the executor optimizes what it has seen a few times
  for (int64_t i = 0; i < kCalls; ++i) {
    const auto y = net.forward({x}).toTensor();
    EXPECT_TRUE(y.equal(expected)) << i;
    EXPECT_TRUE(torch::autograd::grad({y.sum()}, {x}).at(0).equal(of_x)) << i;
  }
  EXPECT_EQ(accelerate::residency::stats().products_on_codes - before.products_on_codes, 2 * kCalls);
}

struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl()
      : table(register_module("table", torch::nn::Embedding(80, 64))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(64, 80).bias(false)))) {
    accelerate::tie(table, "weight", head, "weight");
  }
  at::Tensor forward(const at::Tensor& ids) { return head(table(ids)); }
  torch::nn::Embedding table;
  torch::nn::Linear head;
};
TORCH_MODULE(TiedNet);

/// GPT-2's layers: weights are [inputs, outputs].
struct Conv1DImpl : torch::nn::Module {
  Conv1DImpl(int64_t inputs, int64_t outputs) : torch::nn::Module("Conv1DImpl") {
    weight = register_parameter("weight", torch::randn({inputs, outputs}));
    bias = register_parameter("bias", torch::randn({outputs}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::addmm(bias, x, weight); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Conv1D);

struct TurnedNetImpl : torch::nn::Module {
  Conv1D square = register_module("square", Conv1D(64, 64)), wide = register_module("wide", Conv1D(64, 128));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(128, 10));
};
TORCH_MODULE(TurnedNet);

TEST(QuantizeOperators, LayersThatStoreTheirTransposeHaveItsCodes) {
  torch::manual_seed(21);
  const auto x = torch::randn({5, 64}), y = torch::randn({5, 128});
  const torch::NoGradGuard no_grad;
  for (auto config : {nf4(), BnbQuantizationConfig{.load_in_8bit = true, .torch_dtype = at::kFloat}}) {
    config.exact_products = true;
    const auto encoding = config.load_in_8bit ? codes::Encoding::int8_rowwise : codes::Encoding::nf4;
    const auto encoded = [&](const at::Tensor& weight) {
      const auto turned = weight.t().contiguous();
      return codes::encode(config.load_in_8bit ? turned.to(at::kHalf) : turned, {.encoding = encoding});
    };
    TurnedNet net;
    const auto of_square = encoded(net->square->weight.detach()), of_wide = encoded(net->wide->weight.detach());
    const auto out_in = codes::decode(of_wide, at::kFloat);
    const auto square = codes::decode(of_square, at::kFloat).t().contiguous(), wide = out_in.t().contiguous();
    const auto check = [&](TurnedNet loaded, int64_t codes) {
      EXPECT_EQ(codes, of_square.bytes() + of_wide.bytes());
      const auto& weight = loaded->wide->weight;
      EXPECT_EQ(weight.sizes(), wide.sizes());
      const auto before = accelerate::residency::stats();
      EXPECT_TRUE(torch::allclose(loaded->square(x), torch::addmm(loaded->square->bias, x, square), 1e-4, 1e-4));
      EXPECT_TRUE(torch::matmul(x, weight).equal(torch::linear(x, out_in)));
      EXPECT_TRUE(torch::linear(x, weight.t()).equal(torch::linear(x, out_in)));
      const auto after = accelerate::residency::stats();
      EXPECT_EQ(after.products_on_codes - before.products_on_codes, 3);
      EXPECT_EQ(after.faults - before.faults, 0);
      EXPECT_TRUE((weight * 1).equal(wide)) << "decoded for what has no codes";
      EXPECT_TRUE(torch::matmul(y, weight.t()).equal(torch::matmul(y, wide.t())));
      EXPECT_TRUE(torch::embedding(weight, torch::tensor({3, 1})).equal(wide.index_select(0, torch::tensor({3, 1}))));
    };
    const auto model = load_and_quantize_model(net, config);
    check(net, model.code_bytes());
    const auto state = quantized_state_dict(net);
    EXPECT_TRUE(state.at("wide.weight").equal(of_wide.data)) << "as transformers saves them";
    accelerate::save_safetensors(scratch("turned.safetensors"), state);

    TurnedNet again, plain, on_disk;
    EXPECT_TRUE(accelerate::check_state_dict(again, scratch("turned.safetensors")).fits());
    const auto loaded = load_and_quantize_model(again, config, scratch("turned.safetensors"));
    check(again, loaded.code_bytes());
    accelerate::load_checkpoint_in_model(plain, scratch("turned.safetensors"));
    // Files in 8 bits don't say what the weights were: they are read as fp16.
    const auto as_read = config.load_in_8bit ? at::kHalf : at::kFloat;
    EXPECT_TRUE(plain->square->weight.equal(square.to(as_read).to(at::kFloat)));
    EXPECT_TRUE(plain->wide->weight.equal(wide.to(as_read).to(at::kFloat)));
    const auto offloaded = accelerate::load_checkpoint_and_dispatch(
        on_disk, scratch("turned.safetensors"), {.device_map = accelerate::DeviceMap{{"", "disk"}}});
    EXPECT_TRUE((on_disk->wide->weight * 1).equal(wide));

    auto leaf = x.clone().requires_grad_();
    {
      const at::AutoGradMode with_gradients(true);
      again->wide(leaf).sum().backward();
    }
    EXPECT_LT((leaf.grad() - torch::ones({5, 128}).matmul(wide.t())).abs().max().item<double>(), 1e-4);
  }
}

TEST(QuantizeOperators, TiedWeightsShareTheirCodes) {
  torch::manual_seed(16);
  TiedNet net;
  const auto w = codes::decode(codes::encode(net->table->weight.detach().clone(), {.encoding = codes::Encoding::nf4}));
  auto config = nf4();
  config.skip_modules.emplace();  // by default what is tied stays as it is
  const auto model = load_and_quantize_model(net, config);
  EXPECT_EQ(model.code_bytes(), 80 * 64 / 2 + 80 * 64 / 64 * 4);
  const auto ids = torch::tensor({{3, 79}, {0, 3}});
  const torch::NoGradGuard no_grad;
  const auto before = accelerate::residency::stats();
  EXPECT_TRUE(net(ids).equal(torch::linear(torch::embedding(w, ids), w)));
  const auto after = accelerate::residency::stats();
  EXPECT_EQ(after.products_on_codes - before.products_on_codes, 2);
  EXPECT_EQ(after.faults - before.faults, 0);
}

TEST(QuantizeOperators, GradientsFlowThroughFrozenCodes) {
  torch::manual_seed(5);
  for (auto config : {nf4(), BnbQuantizationConfig{.load_in_8bit = true, .torch_dtype = at::kFloat}}) {
    Net net, twin;
    for (auto& parameter : net->named_parameters()) {
      const torch::NoGradGuard no_grad;
      twin->named_parameters()[parameter.key()].copy_(parameter.value());
    }
    config.exact_products = config.load_in_8bit;  // 4 bits: in training they are without asking
    const auto model = load_and_quantize_model(net, config);
    {
      const torch::NoGradGuard no_grad;
      for (const char* name : {"first.weight", "second.weight"})
        twin->named_parameters()[name].copy_(net->named_parameters()[name].clone());
    }
    auto x = torch::randn({3, 2, 64}).requires_grad_();
    auto x_of_twin = x.detach().clone().requires_grad_();
    net->forward(x).square().sum().backward();
    twin->forward(x_of_twin).square().sum().backward();
    EXPECT_LT((x.grad() - x_of_twin.grad()).abs().max().item<double>(), 1e-5);
    for (const auto& parameter : twin->named_parameters()) {
      const auto ours = net->named_parameters()[parameter.key()].grad();
      if (parameter.key() == "first.weight" || parameter.key() == "second.weight") EXPECT_FALSE(ours.defined());
      else EXPECT_LT((ours - parameter.value().grad()).abs().max().item<double>(), 1e-5) << parameter.key();
    }
  }
}

/// Rows are whole blocks of every encoding.
struct WideNetImpl : torch::nn::Module {
  WideNetImpl()
      : first(register_module("first", torch::nn::Linear(256, 512))),
        second(register_module("second", torch::nn::Linear(512, 256))) {}
  at::Tensor forward(const at::Tensor& x) { return second(torch::silu(first(x))); }
  torch::nn::Linear first, second;
};
TORCH_MODULE(WideNet);

/// As a file of GGUF's blocks, whose tensors have the module's own names.
fs::path in_gguf(const WideNet& net, const std::string& encoding) {
  namespace formats = accelerate::formats;
  const auto tensors = accelerate::ModelRef(net).state();
  formats::GgufOutline outline;
  outline.entries = {formats::gguf_entry("general.file_type", 0U)};
  for (const auto& [name, tensor] : tensors)
    outline.tensors.push_back({name, tensor.sizes().vec(), formats::find_gguf_encoding(0)});
  formats::GgufWriter writer("test", scratch("f32.gguf"), outline);
  for (const auto& [name, tensor] : tensors)
    writer.write({static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.nbytes())});
  writer.finish();
  accelerate::quantize_files(scratch("f32.gguf"), scratch(encoding + ".gguf"), {.to = encoding});
  return scratch(encoding + ".gguf");
}

/// QLoRA: adapters learn beside codes what they learn beside the weights that these stand for.
class AdaptersOnCodes : public ::testing::TestWithParam<std::string> {
 protected:
  accelerate::DispatchedModel encode(WideNet& net) {
    const std::string& name = GetParam();
    if (name.starts_with("q"))
      return accelerate::load_checkpoint_and_dispatch(
          net, in_gguf(net, name), {.device_map = accelerate::DeviceMap{{"", "cpu"}}, .keep_codes = true});
    BnbQuantizationConfig config{.torch_dtype = at::kFloat, .skip_modules = std::vector<std::string>{}};
    if (name == "int8") {
      config.load_in_8bit = config.exact_products = true;  // LLM.int8() rounds activations in training, too
    } else {
      config.load_in_4bit = true;
      config.bnb_4bit_compute_dtype = at::kFloat;
      config.bnb_4bit_quant_type = name.substr(0, 3);
      config.bnb_4bit_use_double_quant = name == "nf4_nested";
    }
    return load_and_quantize_model(net, config);
  }
};

TEST_P(AdaptersOnCodes, LearnAsBesideDecodedWeights) {
  torch::manual_seed(7);
  WideNet net, twin;
  const auto model = encode(net);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : twin->named_parameters())
      parameter.value().copy_(net->named_parameters()[parameter.key()].clone());
  }
  const auto adapt = [](WideNet& to) {
    torch::manual_seed(8);
    return accelerate::add_adapter(to, {.r = 4,
                                        .lora_alpha = 8,
                                        .target_modules = {"first", "second"},
                                        .init_lora_weights = accelerate::LoraInit::random});
  };
  const auto adapter = adapt(net), of_twin = adapt(twin);
  const auto expect_near = [](const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
    ASSERT_TRUE(found.defined()) << what;
    EXPECT_LT(((found - expected).norm() / expected.norm()).item<double>(), 1e-5) << what;
  };
  const auto x = torch::randn({3, 2, 256}).requires_grad_(), x_of_twin = x.detach().clone().requires_grad_();
  {
    const torch::NoGradGuard no_grad;
    net->forward(x);  // leaves codes in the order of products, where there is one
  }
  const auto before = accelerate::residency::stats();
  const auto y = net->forward(x), y_of_twin = twin->forward(x_of_twin);
  expect_near(y, y_of_twin, "forward");
  y.square().sum().backward();
  y_of_twin.square().sum().backward();
  const auto after = accelerate::residency::stats();
  EXPECT_EQ(after.products_on_codes - before.products_on_codes, 2);
  EXPECT_EQ(after.faults, before.faults) << "a weight was decoded as a whole";
  expect_near(x.grad(), x_of_twin.grad(), "x");
  const auto parameters = adapter.parameters(), twins = of_twin.parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    expect_near(parameters[i].second.grad(), twins[i].second.grad(), parameters[i].first);
  EXPECT_FALSE(net->first->weight.grad().defined());
  EXPECT_THAT(message_of([&] { adapter.merge(); }), HasSubstr("are kept by a residency"));
  adapter.set_enabled(false);
  EXPECT_GT((net->forward(x) - y).abs().max().item<double>(), 1e-2) << "the adapter does nothing";
}

INSTANTIATE_TEST_SUITE_P(Encodings, AdaptersOnCodes,
                         ::testing::Values("nf4", "nf4_nested", "fp4", "int8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",
                                           "q4_k", "q5_k", "q6_k"),
                         [](const auto& info) { return info.param; });

TEST(QuantizeOperators, GradientsHaveGradients) {
  torch::manual_seed(5);
  for (auto config : {nf4(), BnbQuantizationConfig{.load_in_8bit = true, .torch_dtype = at::kFloat}}) {
    Net net, twin;
    config.exact_products = true;
    const auto model = load_and_quantize_model(net, config, saved_net(net));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : twin->named_parameters())
        parameter.value().copy_(net->named_parameters()[parameter.key()].clone());
    }
    const auto adapter = accelerate::add_adapter(net, {.r = 2, .target_modules = {"first"}});
    const auto penalty = [](Net& of) {
      auto x = torch::linspace(-1, 1, 2 * 64).view({2, 64}).requires_grad_();
      const auto g = torch::autograd::grad({torch::sigmoid(of->forward(x)).sum()}, {x}, {}, true, true)[0];
      g.square().sum().backward();
      return std::pair(g.detach(), x.grad());
    };
    const auto [first, second] = penalty(net);
    const auto [first_of_twin, second_of_twin] = penalty(twin);
    EXPECT_LT(((first - first_of_twin).norm() / first_of_twin.norm()).item<double>(), 1e-5);
    EXPECT_LT(((second - second_of_twin).norm() / second_of_twin.norm()).item<double>(), 1e-5);
    EXPECT_GT(adapter.parameters()[1].second.grad().abs().max().item<double>(), 0);
  }
}

TEST(QuantizeOperators, InferenceIsNearExactProductsAndNotThem) {
  torch::manual_seed(9);
  const auto x = torch::randn({5, 64});
  const Net plain;
  const auto file = saved_net(plain);
  const auto result = [&](bool exact) {
    auto config = nf4();
    config.exact_products = exact;
    auto net = empty_net();
    const auto model = load_and_quantize_model(net, config, file);
    const torch::NoGradGuard no_grad;
    return net->forward(x);
  };
  const auto exact = result(true), quick = result(false);
  const double difference = ((quick - exact).norm() / exact.norm()).item<double>();
  EXPECT_LT(difference, 0.02) << "each of two products rounds by about half a percent of its norm";
  if (__builtin_cpu_supports("avx2")) {
    EXPECT_GT(difference, 1e-4) << "no kernel computed on the codes";
  }
}

std::atomic<int> kernel_calls{0};
at::Tensor counting_kernel(const at::Tensor& x, const codes::Codes& w, const std::optional<at::Tensor>& bias) {
  ++kernel_calls;
  if (x.size(0) == 7) return {};  // nothing better to offer
  return torch::linear(x, codes::decode(w, x.scalar_type()), bias) + 1;
}

TEST(QuantizeOperators, AskTheRegistryUnlessProductsAreToBeExact) {
  torch::manual_seed(6);
  const auto before = codes::exchange_kernels(codes::Encoding::nf4, {.linear = &counting_kernel});
  for (const bool exact : {false, true}) {
    Net net;
    auto config = nf4();
    config.exact_products = exact;
    const auto model = load_and_quantize_model(net, config);
    const torch::NoGradGuard no_grad;
    kernel_calls = 0;
    const auto x = torch::randn({2, 64});
    const auto difference = net->first->forward(x) - torch::linear(x, net->first->weight.clone(), net->first->bias);
    EXPECT_NEAR(difference.mean().item<double>(), exact ? 0 : 1, 1e-5);
    EXPECT_EQ(kernel_calls, exact ? 0 : 1);
    const auto seven = torch::randn({7, 64});
    EXPECT_TRUE(torch::allclose(net->first->forward(seven),
                                torch::linear(seven, net->first->weight.clone(), net->first->bias)));
  }
  codes::exchange_kernels(codes::Encoding::nf4, before);
}

TEST(QuantizeOperators, RefuseToWriteAndSayWhenTheCodesHaveGone) {
  Net net;
  {
    const auto model = load_and_quantize_model(net, nf4());
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(message_of([&] { net->first->weight.mul_(2); }),
                AllOf(HasSubstr("'first.weight'"), HasSubstr("nf4"), HasSubstr("frozen")));
    EXPECT_THAT(message_of([&] { net->first->weight.copy_(torch::ones({128, 64})); }), HasSubstr("first.weight"));
    EXPECT_THAT(message_of([&] { (void)accelerate::residency::summon(net); }), HasSubstr("writeback = false"));
    {
      const auto present = accelerate::residency::summon(net, {.writeback = false});
      EXPECT_NE(net->first->weight.const_data_ptr(), nullptr);
    }
    EXPECT_NO_THROW(model.check_intact());
  }
  EXPECT_ANY_THROW(net->forward(torch::ones({1, 64})));
}

// --- configuration
// -----------------------------------------------------------------------------------------------------

TEST(QuantizeConfig, DtypesAndNamesDecideWhatBecomesOfEachWeight) {
  torch::manual_seed(7);
  const Net source;
  const auto file = saved_net(source);
  const auto dtypes = [&](const BnbQuantizationConfig& config) {
    auto net = empty_net();
    const auto model = load_and_quantize_model(net, config, file);
    std::map<std::string, std::string> found;
    for (const auto& [name, tensor] : quantized_state_dict(net)) found[name] = c10::toString(tensor.scalar_type());
    if (config.keep_in_fp32_modules.empty()) {  // else products meet two dtypes
      EXPECT_EQ(net->forward(torch::ones({2, 64}, found.at("head.weight") == "Half" ? at::kHalf : at::kFloat)).sizes(),
                (std::vector<int64_t>{2, 10}));
    }
    return found;
  };
  const auto eight = dtypes({.load_in_8bit = true});
  EXPECT_EQ(eight.at("first.weight"), "Char");
  EXPECT_EQ(eight.at("first.SCB"), "Float");
  EXPECT_EQ(eight.at("first.weight_format"), "Byte");
  EXPECT_EQ(eight.at("first.bias"), "Half");  // torch_dtype's default
  EXPECT_EQ(eight.at("head.weight"), "Half");
  const auto four = dtypes(
      {.load_in_4bit = true, .bnb_4bit_compute_dtype = at::kFloat, .skip_modules = std::vector<std::string>{"second"}});
  EXPECT_EQ(four.at("first.weight"), "Byte");
  EXPECT_TRUE(four.contains("first.weight.quant_state.bitsandbytes__fp4"));
  EXPECT_EQ(four.at("second.weight"), "Float");
  EXPECT_EQ(four.at("head.weight"), "Byte");
  const auto kept = dtypes({.load_in_8bit = true, .keep_in_fp32_modules = {"second"}});
  EXPECT_EQ(kept.at("second.weight"), "Float");
  EXPECT_EQ(kept.at("head.weight"), "Half");
}

TEST(QuantizeConfig, ScalesBlocksAndStorageAreAsTheySay) {
  torch::manual_seed(8);
  auto config = nf4();
  config.bnb_4bit_blocksize = 128;
  config.bnb_4bit_use_double_quant = true;
  config.bnb_4bit_quant_storage = at::kBFloat16;
  Net net;
  const auto original = net->first->weight.detach().clone();
  const auto model = load_and_quantize_model(net, config);
  const auto state = quantized_state_dict(net, config.bnb_4bit_quant_storage);
  const auto expected =
      codes::encode(original, {.encoding = codes::Encoding::nf4, .block_size = 128, .double_quantize = true});
  EXPECT_EQ(state.at("first.weight").scalar_type(), at::kBFloat16);
  EXPECT_EQ(state.at("first.weight").sizes(), (std::vector<int64_t>{64 * 128 / 4, 1}));
  EXPECT_TRUE(state.at("first.weight").view(at::kByte).view(-1).equal(expected.data.view(-1)));
  EXPECT_TRUE(state.at("first.weight.absmax").equal(expected.scales));
  EXPECT_TRUE(state.at("first.weight.nested_absmax").equal(expected.nested->absmax));
  accelerate::save_quantized_model(net, config, scratch("stored"));
  const auto stored = accelerate::load_safetensors(scratch("stored") / "model.safetensors");
  EXPECT_EQ(stored.at("first.weight").scalar_type(), at::kBFloat16);
  auto again = empty_net();
  const auto loaded = load_and_quantize_model(again, config, scratch("stored"));
  const auto x = torch::randn({3, 64});
  EXPECT_TRUE(torch::allclose(again->forward(x), net->forward(x), 1e-6, 1e-6));
  std::ifstream text(scratch("stored") / "config.json");
  const std::string json(std::istreambuf_iterator<char>(text), {});
  const auto read = BnbQuantizationConfig::from_json(json);
  EXPECT_EQ(read.bnb_4bit_blocksize, 128);
  EXPECT_EQ(read.bnb_4bit_quant_storage, at::kBFloat16);
  EXPECT_EQ(read.bnb_4bit_compute_dtype, at::kFloat);
  EXPECT_EQ(read.to_json(), config.to_json());
}

TEST(QuantizeConfig, ComputesInTheDtypeThatItSays) {
  torch::manual_seed(9);
  Net net;
  const auto x = torch::randn({4, 64});
  auto config = nf4();
  config.bnb_4bit_compute_dtype = at::kBFloat16;
  config.torch_dtype = at::kFloat;
  const auto model = load_and_quantize_model(net, config);
  EXPECT_EQ(net->first->bias.scalar_type(), at::kFloat);
  const torch::NoGradGuard no_grad;
  const auto y = net->first->forward(x);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_TRUE(y.equal(
      torch::linear(x.to(at::kBFloat16), net->first->weight.to(at::kBFloat16), net->first->bias.to(at::kBFloat16))
          .to(at::kFloat)));
}

TEST(QuantizeConfig, WhatCanNotBeIsRefusedByName) {
  const auto says = [](const BnbQuantizationConfig& config) { return message_of([&] { config.validate(); }); };
  EXPECT_THAT(says({}), HasSubstr("load_in_8bit"));
  EXPECT_THAT(says({.load_in_8bit = true, .load_in_4bit = true}), HasSubstr("expected one of them"));
  EXPECT_THAT(says({.llm_int8_threshold = 5, .load_in_4bit = true}), HasSubstr("llm_int8_threshold = 5"));
  EXPECT_THAT(says({.load_in_8bit = true, .llm_int8_threshold = -1}), HasSubstr("-1"));
  EXPECT_THAT(says({.load_in_4bit = true, .bnb_4bit_quant_type = "np4"}), HasSubstr("'np4'"));
  EXPECT_THAT(says({.load_in_4bit = true, .bnb_4bit_compute_dtype = at::kDouble}), HasSubstr("bnb_4bit_compute_dtype"));
  EXPECT_THAT(says({.load_in_4bit = true, .bnb_4bit_quant_storage = at::kBool}), HasSubstr("bnb_4bit_quant_storage"));
  EXPECT_THAT(says({.load_in_4bit = true, .bnb_4bit_blocksize = 48}), HasSubstr("48"));
  EXPECT_THAT(says({.load_in_8bit = true, .torch_dtype = at::kInt}), HasSubstr("torch_dtype"));
  const auto reads = [](const std::string& json) {
    return message_of([&] { BnbQuantizationConfig::from_json(json); });
  };
  EXPECT_THAT(reads("{"), HasSubstr("quantization_config"));
  EXPECT_THAT(reads(R"({"model_type": "bert"})"), HasSubstr("there is none"));
  EXPECT_THAT(reads(R"({"quantization_config": {"quant_method": "gptq"}})"), HasSubstr("gptq"));
  EXPECT_THAT(reads(R"({"load_in_8bit": true, "llm_int8_has_fp16_weight": true})"), HasSubstr("has_fp16_weight"));
  EXPECT_THAT(reads(R"({"load_in_4bit": "yes"})"), HasSubstr("load_in_4bit is \"yes\""));
}

TEST(QuantizeConfig, HeadsAndTiedWeightsStayByDefault) {
  LlamaConfig config;
  config.vocab_size = 8, config.hidden_size = 4, config.intermediate_size = 4, config.num_hidden_layers = 1;
  config.num_attention_heads = 1;
  EXPECT_THAT(accelerate::get_keys_to_not_convert(LlamaForCausalLM(config)), ElementsAre("lm_head"));
  config.tie_word_embeddings = true;
  EXPECT_THAT(accelerate::get_keys_to_not_convert(LlamaForCausalLM(config)), IsEmpty()) << "no module is the head";
  EXPECT_THAT(accelerate::get_keys_to_not_convert(Net()), ElementsAre("head"));
  struct Tied : torch::nn::Module {
    Tied() {
      register_module("embed", embed);
      register_module("body", body);
      register_module("out", out);
      accelerate::tie(embed, "weight", out, "weight");
    }
    torch::nn::Embedding embed{10, 64};
    torch::nn::Linear body{64, 64};
    torch::nn::Linear out{torch::nn::LinearOptions(64, 10).bias(false)};
  };
  EXPECT_THAT(accelerate::get_keys_to_not_convert(std::shared_ptr<torch::nn::Module>(std::make_shared<Tied>())),
              UnorderedElementsAre("embed", "out"));
}

TEST(QuantizeOperators, NumbersOnDiskOfAModelWithValuesAreInTheDtypeThatTheyGet) {
  auto config = nf4();
  config.torch_dtype = config.bnb_4bit_compute_dtype = at::kBFloat16;
  const auto build = [] {
    torch::manual_seed(12);
    return Net();
  };
  const auto x = torch::randn({3, 64}).to(at::kBFloat16);
  Net in_memory = build();
  const auto kept = load_and_quantize_model(in_memory, config);
  const auto expected = in_memory->forward(x);
  for (int run = 0; run < 2; ++run) {  // the second one finds the files of the first
    Net net = build();
    const auto model = load_and_quantize_model(
        net, config, {}, {.device_map = accelerate::DeviceMap{{"", "disk"}}, .offload_folder = scratch("numbers")});
    EXPECT_EQ(net->first->bias.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(torch::equal(net->forward(x), expected));
  }
}

// --- files
// -------------------------------------------------------------------------------------------------------------

TEST(QuantizeFiles, OfAllKindsGiveTheSameModelInMemoryAndOnDisk) {
  torch::manual_seed(10);
  const Net source;
  const auto file = saved_net(source);
  const auto x = torch::randn({3, 64});
  Net reference;
  for (auto& parameter : reference->named_parameters()) {
    const torch::NoGradGuard no_grad;
    parameter.value().copy_(source->named_parameters()[parameter.key()]);
  }
  const auto kept = load_and_quantize_model(reference, nf4());
  const auto expected = reference->forward(x);
  const auto loads = [&](const fs::path& from, const accelerate::LoadAndQuantizeOptions& options = {}) {
    auto net = empty_net();
    const auto model = load_and_quantize_model(net, nf4(), from, options);
    EXPECT_EQ(model.code_bytes(), kept.code_bytes());
    EXPECT_TRUE(torch::allclose(net->forward(x), expected, 1e-6, 1e-6));  // mapped biases lie on other addresses
    return model.hf_device_map();
  };
  loads(file);
  // Shards with an index.
  fs::create_directories(scratch("shards"));
  auto tensors = accelerate::load_safetensors(file);
  nlohmann::json index;
  for (const auto& [name, tensor] : tensors) {
    const std::string shard = name.starts_with("first") ? "a.safetensors" : "b.safetensors";
    index["weight_map"][name] = shard;
  }
  for (const char* shard : {"a.safetensors", "b.safetensors"}) {
    std::map<std::string, at::Tensor> part;
    for (const auto& [name, tensor] : tensors)
      if (index["weight_map"][name] == shard) part.emplace(name, tensor);
    accelerate::save_safetensors(scratch("shards") / shard, part);
  }
  std::ofstream(scratch("shards") / "model.safetensors.index.json") << index.dump();
  loads(scratch("shards"));
  // Codes on disk are written once and mapped.
  loads(file, {.device_map = accelerate::DeviceMap{{"", "disk"}}, .offload_folder = scratch("codes")});
  EXPECT_TRUE(fs::exists(scratch("codes") / "second.weight.safetensors"));
  EXPECT_THAT(message_of([&] {
                loads(file, {.device_map = accelerate::DeviceMap{{"", "disk"}}});
              }),
              HasSubstr("offload_folder"));
  // A map that is worked out counts codes: 2 x 4096 bytes, and what stays; as fp32 it would take 68 KB.
  const auto map = loads(file, {.device_map = "auto",
                                .no_split_module_classes = {"Linear"},
                                .max_memory = accelerate::MaxMemory{{"cpu", "60KB"}},
                                .offload_folder = scratch("codes")});
  EXPECT_EQ(map, (accelerate::DeviceMap{{"", "cpu"}}));
  // One weight's codes at a time, besides what stays, are more than this.
  EXPECT_THAT(message_of([&] {
                loads(file, {.device_map = "auto",
                             .no_split_module_classes = {"Linear"},
                             .max_memory = accelerate::MaxMemory{{"cpu", "8KB"}},
                             .offload_folder = scratch("codes")});
              }),
              HasSubstr("'first.weight' needs to compute, 4608 bytes"));
  EXPECT_THAT(message_of([&] { loads(file, {.device_map = "auto", .no_split_module_classes = {"Block"}}); }),
              HasSubstr("'Block'"));
  EXPECT_THAT(message_of([&] {
                loads(file, {.device_map = accelerate::DeviceMap{{"", "disk"}},
                             .offload_folder = scratch("codes"),
                             .offload = {.budget_bytes = 16, .always_read = true}});
              }),
              HasSubstr("budget_bytes"));
  auto more = tensors;
  more["third.weight"] = torch::ones({2, 2});
  accelerate::save_safetensors(scratch("more.safetensors"), more);
  loads(scratch("more.safetensors"), {.strict = false});
  EXPECT_THAT(message_of([&] { loads(scratch("more.safetensors")); }), HasSubstr("third.weight"));
  if (support::python()) {
    const auto peer = support::run_python("tests/unit/quantize_peer.py",
                                          {"torch", file.string(), scratch("pytorch_model.bin").string()});
    ASSERT_EQ(peer.exit_code, 0) << peer.output;
    loads(scratch("pytorch_model.bin"));
  }
}

using State = std::map<std::string, at::Tensor>;

State state_of(const BnbQuantizationConfig& config) {
  torch::manual_seed(11);
  Net net;
  const auto model = load_and_quantize_model(net, config);
  State state;  // of its own: the model's codes end here
  for (const auto& [name, tensor] : quantized_state_dict(net)) state.emplace(name, tensor.clone());
  return state;
}

at::Tensor bytes_of(const std::string& text) {
  return torch::tensor(std::vector<uint8_t>(text.begin(), text.end()), torch::kByte);
}

/// The error of loading the file into a model without values, and into one with values, which stay.
std::string refusal(const fs::path& file, const BnbQuantizationConfig& config) {
  auto empty = empty_net();
  const auto says = support::message_of<CheckpointError>([&] { (void)load_and_quantize_model(empty, config, file); });
  for (const auto& [name, tensor] : accelerate::ModelRef(empty).state())
    EXPECT_TRUE(accelerate::is_deferred(tensor)) << name << " was loaded";
  torch::manual_seed(12);
  Net net;
  State before;
  for (const auto& [name, tensor] : accelerate::ModelRef(net).state()) before.emplace(name, tensor.detach().clone());
  EXPECT_EQ(support::message_of<CheckpointError>([&] { (void)load_and_quantize_model(net, config, file); }), says);
  for (const auto& [name, tensor] : accelerate::ModelRef(net).state())
    EXPECT_TRUE(tensor.scalar_type() == at::kFloat && tensor.equal(before.at(name))) << name << " was changed";
  return says;
}

struct Damage {
  const char* name;
  std::function<void(State&)> make;
  std::vector<std::string> says;  ///< beside the weight
};

void expect_refusals(const BnbQuantizationConfig& config, c10::ArrayRef<Damage> damages) {
  const auto good = state_of(config);
  for (const auto& damage : damages) {
    SCOPED_TRACE(damage.name);
    auto state = good;
    damage.make(state);
    const auto file = scratch(std::string(damage.name) + ".safetensors");
    accelerate::save_safetensors(file, state);
    const auto says = refusal(file, config);
    EXPECT_THAT(says, HasSubstr("first."));
    for (const auto& part : damage.says) EXPECT_THAT(says, HasSubstr(part));
  }
}

/// As message_of, of what may also work.
template <class F> std::string outcome_of(F&& f) {
  try {
    f();
  } catch (const accelerate::Error& error) {
    return error.what();
  }
  return "it works";
}

const std::string kFirst = "first.weight", kText = kFirst + ".quant_state.bitsandbytes__nf4";

/// Another text of the state: a value of a key, or none.
std::function<void(State&)> with(const std::string& key, const nlohmann::json& value) {
  return [=](State& state) {
    const auto& text = state.at(kText);
    auto json = nlohmann::json::parse(text.const_data_ptr<uint8_t>(), text.const_data_ptr<uint8_t>() + text.numel());
    if (value.is_null()) json.erase(key);
    else json[key] = value;
    state[kText] = bytes_of(json.dump());
  };
}
std::function<void(State&)> without(const std::string& name) {
  return [=](State& state) { ASSERT_EQ(state.erase(name), 1U); };
}
std::function<void(State&)> instead(const std::string& name, const std::function<at::Tensor(const at::Tensor&)>& f) {
  return [=](State& state) { state[name] = f(state.at(name)).contiguous(); };
}
at::Tensor half_of(const at::Tensor& tensor) { return tensor.slice(0, 0, tensor.size(0) / 2).clone(); }
at::Tensor one_nan(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  copy.view(-1)[copy.numel() - 1] = std::numeric_limits<float>::quiet_NaN();
  return copy;
}
at::Tensor changed(const at::Tensor& tensor) { return tensor + 0.1; }

TEST(QuantizeFiles, DamagedInFourBitsAreRefusedByNameAndNothingIsLoaded) {
  auto config = nf4();
  config.bnb_4bit_use_double_quant = true;
  const Damage damages[] = {
        Damage{"no_codes", without(kFirst), {"no 'first.weight'"}},
        Damage{"no_absmax", without(kFirst + ".absmax"), {".absmax' is missing"}},
        Damage{"no_quant_map", without(kFirst + ".quant_map"), {".quant_map' is missing"}},
        Damage{"no_nested_absmax", without(kFirst + ".nested_absmax"), {".nested_absmax' is missing"}},
        Damage{"no_nested_map", without(kFirst + ".nested_quant_map"), {".nested_quant_map' is missing"}},
        Damage{"no_state", without(kText), {"uint8 in the checkpoint", "description are missing"}},
        Damage{"short_codes", instead(kFirst, half_of), {"the codes", "[2048, 1]", "[4096, 1]"}},
        Damage{"short_absmax", instead(kFirst + ".absmax", half_of), {"the scales", "[64]", "[128]"}},
        Damage{"long_nested_absmax",
               instead(kFirst + ".nested_absmax", [](const at::Tensor& t) { return t.repeat({2}); }),
               {"the scales' scales", "[2]", "[1]"}},
        Damage{"half_nested_absmax",
               instead(kFirst + ".nested_absmax", [](const at::Tensor& t) { return t.to(at::kHalf); }),
               {"Half"}},
        Damage{"nan_nested_absmax", instead(kFirst + ".nested_absmax", one_nan), {"nested_absmax' has nan at 0"}},
        Damage{"other_map", instead(kFirst + ".quant_map", changed), {"quant_map is another table"}},
        Damage{"other_nested_map", instead(kFirst + ".nested_quant_map", changed), {"nested_quant_map is another table"}},
        Damage{"text_cut", instead(kText, half_of), {"quant_state", "JSON"}},
        Damage{"text_of_floats", instead(kText, [](const at::Tensor& t) { return t.to(at::kFloat); }), {"no text"}},
        Damage{"text_no_object", [](State& s) { s[kText] = bytes_of("[1]"); }, {"no JSON object"}},
        Damage{"no_shape", with("shape", nullptr), {"has no shape"}},
        Damage{"other_shape", with("shape", {64, 128}), {"[64, 128]", "[128, 64]", "another model"}},
        Damage{"larger_shape", with("shape", {256, 64}), {"the codes", "[8192, 1]"}},
        Damage{"endless_shape", with("shape", {int64_t{1} << 40, int64_t{1} << 40}), {"1099511627776"}},
        Damage{"negative_shape", with("shape", {-128, -64}), {"-128"}},
        Damage{"no_dtype", with("dtype", nullptr), {"has no dtype"}},
        Damage{"odd_dtype", with("dtype", "int64"), {"'int64'"}},
        Damage{"no_blocksize", with("blocksize", nullptr), {"'blocksize'"}},
        Damage{"odd_blocksize", with("blocksize", 63), {"63"}},
        Damage{"other_blocksize", with("blocksize", 128), {"the scales", "[64]"}},
        Damage{"other_type", with("quant_type", "fp4"), {"quant_type \"fp4\"", "\"nf4\""}},
        Damage{"no_nested_offset", with("nested_offset", nullptr), {"'nested_offset'"}},
        Damage{"odd_nested_blocksize", with("nested_blocksize", 0), {"nested_blocksize 0"}},
        Damage{"unknown_type",
               [](State& s) {
                 s[kFirst + ".quant_state.bitsandbytes__af4"] = s.at(kText).clone();
                 s.erase(kText);
               },
               {"'af4'"}},
        Damage{"two_types",
               [](State& s) { s[kFirst + ".quant_state.bitsandbytes__fp4"] = s.at(kText).clone(); },
               {"__fp4' and", "__nf4' say what it is"}},
        Damage{"int8_scales_too", [](State& s) { s["first.SCB"] = torch::ones({128}); }, {"first.SCB' and"}}};
  expect_refusals(config, damages);
}

at::Tensor number(double value, at::ScalarType dtype) { return torch::full({}, value, dtype); }

TEST(QuantizeFiles, DamagedInEightBitsAreRefusedByNameAndNothingIsLoaded) {
  const BnbQuantizationConfig config{.load_in_8bit = true, .torch_dtype = at::kFloat};
  const Damage damages[] = {
      Damage{"no_SCB",
             [](State& s) { s.erase("first.SCB"), s.erase("first.weight_format"); },
             {"int8 in the checkpoint", "scales and description are missing"}},
      Damage{"no_SCB_but_format", without("first.SCB"), {"first.weight"}},
      Damage{"no_weight", without(kFirst), {"no 'first.weight'"}},
      Damage{"short_SCB", instead("first.SCB", half_of), {"the scales", "[64]", "[128]"}},
      Damage{"half_SCB", instead("first.SCB", [](const at::Tensor& t) { return t.to(at::kHalf); }), {"Half"}},
      Damage{"nan_SCB", instead("first.SCB", one_nan), {"SCB' has nan at 127"}},
      Damage{"plain_weight",
             instead(kFirst, [](const at::Tensor& t) { return t.to(at::kFloat); }),
             {"the codes is Float", "expected Char"}},
      Damage{"other_shape", instead(kFirst, [](const at::Tensor& t) { return t.t(); }), {"[64]", "[128]"}},
      Damage{"for_old_gpus", [](State& s) { s["first.weight_format"] = number(2, at::kByte); }, {"weight_format"}},
      Damage{
          "format_of_floats", [](State& s) { s["first.weight_format"] = number(NAN, at::kFloat); }, {"weight_format"}}};
  expect_refusals(config, damages);
}

TEST(QuantizeFiles, WithNumbersThatHaveNoCodeAreRefusedByName) {
  auto with_nan = accelerate::load_safetensors(saved_net(Net(), "nan.safetensors"));
  with_nan["second.weight"] = with_nan["second.weight"].clone();
  with_nan["second.weight"][3][4] = std::numeric_limits<float>::quiet_NaN();
  accelerate::save_safetensors(scratch("with_nan.safetensors"), with_nan);
  EXPECT_THAT(message_of([&] {
                auto other = empty_net();
                (void)load_and_quantize_model(other, nf4(), scratch("with_nan.safetensors"));
              }),
              AllOf(HasSubstr("'second.weight'"), HasSubstr("nan"), HasSubstr("388")));
}

TEST(QuantizeFiles, OfOtherMethodsAreRefusedByTheirNames) {
  const auto folder = scratch("other_method");
  fs::create_directories(folder);
  fs::copy_file(saved_net(Net()), folder / "model.safetensors", fs::copy_options::overwrite_existing);
  const auto says = [&](const std::string& config) {
    std::ofstream(folder / "config.json") << config;
    return outcome_of([&] {
      auto net = empty_net();
      (void)load_and_quantize_model(net, nf4(), folder);
    });
  };
  for (const std::string method : {"gptq", "awq", "fp8", "compressed-tensors", "hqq", "unfinished_save"})
    EXPECT_THAT(says(R"({"quantization_config": {"quant_method": ")" + method + "\"}}"),
                AllOf(HasSubstr("\"" + method + "\""), HasSubstr("quant_method")));
  EXPECT_THAT(says(R"({"quantization_config": {"quant_method": 7}})"), HasSubstr("quant_method is 7"));
  for (const char* fine : {"{}", "no json", R"({"quantization_config": null})",
                           R"({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}})"})
    EXPECT_EQ(says(fine), "it works") << fine;
}

/// A GGUF file with the net's weights, in blocks of an encoding or fp32.
std::string gguf_net(uint32_t encoding, int64_t block, int64_t block_bytes) {
  std::string head, data;
  const auto number = [&](auto value) { head.append(reinterpret_cast<const char*>(&value), sizeof value); };
  const auto text = [&](const std::string& value) { number(uint64_t{value.size()}), head += value; };
  const auto state = accelerate::ModelRef(Net()).state();
  number(uint32_t{0x46554747}), number(uint32_t{3}), number(uint64_t{state.size()}), number(uint64_t{1});
  text("general.architecture"), number(uint32_t{8}), text("mine");
  for (const auto& [name, tensor] : state) {
    const bool in_blocks = tensor.dim() == 2;
    text(name), number(static_cast<uint32_t>(tensor.dim()));
    for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) number(static_cast<uint64_t>(tensor.size(dim)));
    number(in_blocks ? encoding : 0U), number(uint64_t{data.size()});
    const int64_t bytes = in_blocks ? tensor.numel() / block * block_bytes : tensor.numel() * 4;
    data.resize((data.size() + static_cast<size_t>(bytes) + 31) / 32 * 32, '\0');
  }
  head.resize((head.size() + 31) / 32 * 32, '\0');
  return head + data;
}

TEST(QuantizeFiles, OfGgufThatAreDamagedAreRefusedByName) {
  const auto says = [&](const std::string& bytes) {
    std::ofstream(scratch("net.gguf"), std::ios::binary) << bytes;
    auto net = empty_net();
    const auto message = outcome_of([&] {
      (void)accelerate::load_checkpoint_and_dispatch(
          net, scratch("net.gguf"), {.device_map = accelerate::DeviceMap{{"", "cpu"}}, .keep_codes = true});
    });
    for (const auto& [name, tensor] : accelerate::ModelRef(net).state())
      EXPECT_EQ(accelerate::is_deferred(tensor), message != "it works") << name;
    return message;
  };
  const auto good = gguf_net(2, 32, 18);  // q4_0
  EXPECT_EQ(says(good), "it works");
  EXPECT_THAT(says(good.substr(0, good.size() - 40)), HasSubstr("net.gguf"));
  EXPECT_THAT(says(good.substr(0, 100)), HasSubstr("net.gguf"));
  EXPECT_THAT(says(gguf_net(99, 32, 18)), AllOf(HasSubstr("net.gguf"), HasSubstr("99")));
  EXPECT_THAT(says(gguf_net(20, 32, 18)), HasSubstr("IQ4_NL"));
  EXPECT_THAT(says(gguf_net(12, 256, 144)), HasSubstr("64"));  // rows of 64 are no blocks of 256
  auto version = good;
  version[4] = 9;
  EXPECT_THAT(says(version), HasSubstr("version"));
}

// --- a process that is killed while the two files of a folder are replaced

/// Which call of rename() from now on is not reached.
int renames_to_live = -1;

}  // namespace

// The library is linked into this program, so that its calls come here.
extern "C" int rename(const char* from, const char* to) {
  if (renames_to_live >= 0 && renames_to_live-- == 0) ::raise(SIGKILL);
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}

namespace {

TEST(QuantizeFiles, AKilledSaveLeavesWhatIsWholeOrIsRefused) {
  torch::manual_seed(12);
  const auto folder = scratch("killed");
  const auto read = [&](const char* file) {
    std::ifstream in(folder / file);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const BnbQuantizationConfig int8{.load_in_8bit = true};
  const std::string fields = R"({"model_type": "mine", "note": "kept"})";
  struct Left {
    bool new_weights;
    const char* method;  ///< what the description says
  };
  // The renames: the weights' file within its folder, a description that is refused, the weights, the description.
  const Left states[] = {
      {false, "before"}, {false, "before"}, {false, "unfinished_save"}, {true, "unfinished_save"}, {true, "after"}};
  Net old, net;
  const auto old_model = load_and_quantize_model(old, nf4()), model = load_and_quantize_model(net, int8);
  for (int renames = 0; renames < 5; ++renames) {
    SCOPED_TRACE(renames);
    fs::remove_all(folder);
    fs::create_directories(folder);
    std::ofstream(folder / "config.json") << fields;
    accelerate::save_quantized_model(old, nf4(), folder);
    const auto weights = read("model.safetensors"), description = read("config.json");
    // gtest's child; this process goes on.
    EXPECT_EXIT(
        {
          renames_to_live = renames;
          accelerate::save_quantized_model(net, int8, folder);
          std::_Exit(renames_to_live == 0 ? 0 : 1);
        },
        [&](int status) { return renames < 4 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0; }, "");
    const auto config = nlohmann::json::parse(read("config.json"));
    EXPECT_EQ(config.at("note"), "kept");
    EXPECT_EQ(config.at("model_type"), "mine");
    EXPECT_EQ(read("model.safetensors") != weights, states[renames].new_weights);
    EXPECT_NO_THROW(accelerate::load_safetensors(folder / "model.safetensors"));
    const std::string method = states[renames].method;
    if (method == "before") {
      EXPECT_EQ(read("config.json"), description);
    } else if (method == "after") {
      EXPECT_TRUE(BnbQuantizationConfig::from_json(read("config.json")).load_in_8bit);
    } else {
      EXPECT_THAT(message_of([&] { BnbQuantizationConfig::from_json(read("config.json")); }),
                  AllOf(HasSubstr("interrupted"), HasSubstr("Save the model again")));
      EXPECT_EQ(config.at("quantization_config").at("before"),
                nlohmann::json::parse(description).at("quantization_config"));
      accelerate::save_quantized_model(net, int8, folder);  // mends it
      EXPECT_TRUE(BnbQuantizationConfig::from_json(read("config.json")).load_in_8bit);
      EXPECT_EQ(read("config.json").find("unfinished_save"), std::string::npos);
    }
  }
}

TEST(QuantizeFiles, GgufBlocksStayAsTheyAre) {
  SKIP_WITHOUT_DATA();
  const auto path = *support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf";
  LlamaForCausalLM net{nullptr};
  {
    const auto empty = accelerate::init_empty_weights();
    net = LlamaForCausalLM(LlamaConfig::from_pretrained(path), Weights::uninitialized);
  }
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, path,
      {.device_map = accelerate::DeviceMap{{"", "cpu"}}, .keep_codes = true, .exact_products = true, .strict = false});
  EXPECT_GT(model.code_bytes(), 80'000'000);
  EXPECT_LT(model.code_bytes(), static_cast<int64_t>(fs::file_size(path)));
  auto plain = LlamaForCausalLM::from_pretrained(path);
  const torch::NoGradGuard no_grad;
  net->eval(), plain->eval();
  const auto tokens = torch::arange(400, 412).view({1, 12});
  const auto before = accelerate::residency::stats();
  const auto logits = net->forward(tokens);
  EXPECT_LT((logits - plain->forward(tokens)).abs().max().item<double>(), 1e-4);
  const auto after = accelerate::residency::stats();
  EXPECT_EQ(after.faults, before.faults);  // the embedding's rows, 30 layers with 7 products, the head
  EXPECT_EQ(after.products_on_codes - before.products_on_codes, 1 + 30 * 7 + 1);
  EXPECT_THAT(message_of([&] { (void)accelerate::load_checkpoint_and_dispatch(net, path, {.exact_products = true}); }),
              HasSubstr("keep_codes"));
}

TEST(QuantizeFiles, GgufBlocksDecodeTokenByTokenInOneCopy) {
  SKIP_WITHOUT_DATA();
  const auto path = *support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf";
  LlamaForCausalLM net{nullptr};
  {
    const auto empty = accelerate::init_empty_weights();
    net = LlamaForCausalLM(LlamaConfig::from_pretrained(path), Weights::uninitialized);
  }
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, path, {.device_map = accelerate::DeviceMap{{"", "cpu"}}, .keep_codes = true, .strict = false});
  net->eval();
  const torch::NoGradGuard no_grad;
  const auto tokens = torch::arange(400, 408).view({1, 8});
  accelerate::models::KeyValueCache cache;
  net->forward(tokens.narrow(1, 0, 7), {}, {}, &cache, 1);
  const auto before = accelerate::residency::stats();
  const auto logits = net->forward(tokens.narrow(1, 7, 1), {}, {}, &cache, 1);
  const auto after = accelerate::residency::stats();
  EXPECT_EQ(after.products_on_codes - before.products_on_codes, 1 + 30 * 7 + 1);
  EXPECT_EQ(after.decodes, before.decodes);
  // All tokens at once round the same inputs; those that come out differently by fp32's last bits may fall to the next
  // of 127 steps, which moves logits by some thousandths.
  const auto whole = net->forward(tokens, {}, {}, nullptr, 1);
  EXPECT_LT(((logits - whole).norm() / whole.norm()).item<double>(), 0.01);
}

}  // namespace
