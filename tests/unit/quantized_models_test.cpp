/// Whatever programs do with a model in few bits besides running it: operators of any form, saving it, preparing it,
/// adapting it, failing and trying again.

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/accelerator.hpp"
#include "accelerate/adapters.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/precision/fp8.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::BnbQuantizationConfig;
using accelerate::ConfigError;
using accelerate::load_and_quantize_model;
using ::testing::AllOf;
using ::testing::HasSubstr;

fs::path scratch(const std::string& name) {
  const fs::path path = fs::path(support::scratch_dir()) / name;
  fs::create_directories(path.parent_path());
  return path;
}
template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }

struct PairImpl : torch::nn::Module {
  PairImpl()
      : a(register_module("a", torch::nn::Linear(64, 128))), b(register_module("b", torch::nn::Linear(128, 64))) {}
  at::Tensor forward(const at::Tensor& x) { return b(torch::relu(a(x))); }
  torch::nn::Linear a, b;
};
TORCH_MODULE(Pair);

BnbQuantizationConfig four_bits(bool exact = true) {
  return {.load_in_4bit = true,
          .bnb_4bit_quant_type = "nf4",
          .bnb_4bit_compute_dtype = at::kFloat,
          .skip_modules = std::vector<std::string>(),
          .exact_products = exact};
}
BnbQuantizationConfig eight_bits(double threshold = 6) {
  return {.load_in_8bit = true,
          .llm_int8_threshold = threshold,
          .torch_dtype = at::kFloat,
          .skip_modules = std::vector<std::string>()};
}

double relative(const at::Tensor& found, const at::Tensor& expected) {
  return ((found - expected).norm() / expected.norm()).item<double>();
}

/// 8 bits of activations cost 0.6 %; a layout that is read wrongly is off by the whole result.
constexpr double kRounded = 0.03;

TEST(QuantizedModels, TakeInputsOfAnyStrides) {
  torch::manual_seed(0);
  for (const auto& config : {eight_bits(6), eight_bits(0), four_bits(), four_bits(false)}) {
    Pair net;
    const auto model = load_and_quantize_model(net, config);
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& x :
         {torch::randn({64, 3}).t(), torch::randn({1, 64, 5}).transpose(1, 2), torch::randn({2, 64, 5}).transpose(1, 2),
          torch::randn({6, 128}).slice(1, 0, 128, 2), torch::randn({64}).expand({4, 64})}) {
      EXPECT_LT(relative(net->a(x), net->a(x.contiguous())), 1e-6) << x.sizes() << " " << x.strides();
      EXPECT_LT(relative(net->a(x), torch::linear(x, net->a->weight.clone(), net->a->bias)), kRounded) << x.sizes();
    }
  }
}

TEST(QuantizedModels, WriteWhereOperatorsAreTold) {
  torch::manual_seed(1);
  const torch::NoGradGuard no_grad;
  for (const auto& config : {eight_bits(), four_bits(), four_bits(false)}) {
    Pair net;
    const auto model = load_and_quantize_model(net, config);
    const at::Tensor x = torch::randn({3, 64}), &w = net->a->weight, &bias = net->a->bias;
    const auto expected = torch::mm(x, w.clone().t());
    const auto out = [] { return torch::full({3, 128}, 7.0); };
    auto to = out();
    EXPECT_LT(relative(at::mm_out(to, x, w.t()), expected), kRounded);
    EXPECT_LT(relative(to, expected), kRounded);
    at::matmul_out(to = out(), x, w.t());
    EXPECT_LT(relative(to, expected), kRounded);
    at::linear_out(to = out(), x, w, bias);
    EXPECT_LT(relative(to, expected + bias), kRounded);
    at::addmm_out(to = out(), bias, x, w.t());
    EXPECT_LT(relative(to, expected + bias), kRounded);
    auto rows = torch::full({2, 64}, 7.0);
    at::embedding_out(rows, w, torch::tensor({5, 0}));
    EXPECT_TRUE(torch::equal(rows, w.clone().index_select(0, torch::tensor({5, 0}))));
  }
}

TEST(QuantizedModels, RefuseInputsOfAnotherWidth) {
  torch::manual_seed(2);
  for (const auto& config : {eight_bits(), four_bits(), four_bits(false)}) {
    Pair net;
    const auto model = load_and_quantize_model(net, config);
    for (const bool trains : {false, true})
      for (const at::Tensor& x : {torch::randn({2, 32}), torch::randn({2, 128}), torch::randn({128}),
                                  torch::randn({3, 4, 16}), torch::empty({0, 32})})
        EXPECT_THAT(message_of([&] { net->a(x.clone().set_requires_grad(trains)); }), HasSubstr("expected [.., 64]"))
            << x.sizes() << trains;
  }
}

TEST(QuantizedModels, AddBiasesThatLibTorchBroadcasts) {
  torch::manual_seed(3);
  const torch::NoGradGuard no_grad;
  for (const auto& config : {eight_bits(), four_bits(), four_bits(false)}) {
    Pair net;
    const auto model = load_and_quantize_model(net, config);
    const auto x = torch::randn({3, 64});
    for (const at::Tensor& bias : {torch::randn({1}), torch::randn({1, 128})})
      EXPECT_LT(relative(torch::linear(x, net->a->weight, bias), torch::linear(x, net->a->weight) + bias), 1e-6);
  }
}

TEST(QuantizedModels, ChooseTypesThemselvesUnderAutocast) {
  torch::manual_seed(4);
  Pair net;
  const auto model = load_and_quantize_model(net, eight_bits());
  const torch::NoGradGuard no_grad;
  auto x = torch::randn({4, 64});
  x[1][3] = 50;  // a column that is multiplied in full precision
  const auto expected = net->a(x);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto found = net->a(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(found.scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(found, expected));
}

TEST(QuantizedModels, AreSavedAsOrdinaryTensors) {
  torch::manual_seed(5);
  accelerate::Accelerator accelerator;
  for (const auto& config : {eight_bits(), four_bits()}) {
    Pair net;
    const auto model = load_and_quantize_model(net, config);
    const fs::path folder = scratch("saved") / (config.load_in_8bit ? "int8" : "nf4");
    const auto warnings = support::warnings_of([&] { accelerator.save_model(model, folder); });
    EXPECT_NE(warnings.find("save_model: 2 weights that are kept in few bits are written decoded"), std::string::npos)
        << warnings;
    const auto saved = accelerate::load_safetensors(folder / "model.safetensors");
    const auto state = accelerator.get_state_dict(model);
    ASSERT_EQ(saved.size(), 4u);
    for (const auto& [name, tensor] : accelerate::ModelRef(net).state()) {
      EXPECT_TRUE(torch::equal(saved.at(name), tensor.detach().clone())) << name;
      EXPECT_TRUE(torch::equal(state.at(name), saved.at(name))) << name;
    }
    accelerator.save(state, folder / "state.bin", /*safe_serialization=*/false);
  }
}

TEST(QuantizedModels, KeepTheirValuesWhereQuantizingIsRefused) {
  torch::manual_seed(6);
  Pair net;
  const auto a = net->a->weight.detach().clone();
  {
    const torch::NoGradGuard no_grad;
    net->b->weight[3][4] = std::numeric_limits<float>::quiet_NaN();
  }
  EXPECT_THAT(message_of([&] { (void)load_and_quantize_model(net, four_bits()); }),
              AllOf(HasSubstr("'b.weight'"), HasSubstr("expected finite values")));
  EXPECT_TRUE(torch::equal(net->a->weight, a));
  auto without = four_bits();
  without.skip_modules = std::vector<std::string>{"b"};
  const auto model = load_and_quantize_model(net, without);
  EXPECT_GT(model.code_bytes(), 0);
  EXPECT_THAT(message_of([&] { (void)load_and_quantize_model(net, without); }),
              AllOf(HasSubstr("'a.weight'"), HasSubstr("in few bits already")));
  EXPECT_NO_THROW(model(torch::randn({2, 64})));

  Pair large;
  {
    const torch::NoGradGuard no_grad;
    large->a->weight[3][4] = 1e6;
  }
  EXPECT_THAT(message_of([&] { (void)load_and_quantize_model(large, eight_bits()); }),
              AllOf(HasSubstr("'a.weight'"), HasSubstr("magnitude 1000000"), HasSubstr("float16")));
}

/// The same from files, where the model has taken some weights when another is refused.
TEST(QuantizedModels, MayBeLoadedAgainAfterAFileWasRefused) {
  torch::manual_seed(7);
  Pair good;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : accelerate::ModelRef(good).state()) tensors.emplace(name, tensor.detach().clone());
  const auto file = scratch("refused.safetensors");
  accelerate::save_safetensors(file, tensors);
  auto bad = tensors;
  bad["b.weight"] = tensors["b.weight"].clone();
  bad["b.weight"][0][0] = std::numeric_limits<float>::infinity();
  accelerate::save_safetensors(scratch("bad.safetensors"), bad);
  Pair net, other;
  EXPECT_THAT(message_of([&] { (void)load_and_quantize_model(net, four_bits(), scratch("bad.safetensors")); }),
              HasSubstr("'b.weight'"));
  const auto model = load_and_quantize_model(net, four_bits(), file),
             same = load_and_quantize_model(other, four_bits(), file);
  const auto x = torch::randn({2, 64});
  EXPECT_TRUE(torch::equal(model(x), same(x)));
}

TEST(QuantizedModels, KeepTheAdaptersThatTheyHadBefore) {
  torch::manual_seed(8);
  const auto x = torch::randn({3, 64});
  const auto differs = [&](Pair& net, accelerate::LoraAdapter& adapter) {
    const torch::NoGradGuard no_grad;
    const auto with = net(x);
    adapter.set_enabled(false);
    const auto without = net(x);
    adapter.set_enabled(true);
    return relative(with, without);
  };
  const accelerate::LoraConfig lora{.target_modules = {"a", "b"}, .init_lora_weights = accelerate::LoraInit::random};
  {
    Pair net;
    auto adapter = accelerate::add_adapter(net, lora);
    const auto model = load_and_quantize_model(net, four_bits());
    EXPECT_GT(differs(net, adapter), 1e-3);
    net(x).sum().backward();
    for (const auto& item : net->named_parameters())
      if (item.key().find("lora_") != std::string::npos) {
        EXPECT_TRUE(item.value().grad().defined()) << item.key();
      }
  }
  Pair net;
  std::map<std::string, at::Tensor> base;
  for (const auto& [name, tensor] : accelerate::ModelRef(net).state()) base.emplace(name, torch::randn_like(tensor));
  accelerate::save_safetensors(scratch("base.safetensors"), base);
  auto adapter = accelerate::add_adapter(net, lora);
  accelerate::load_checkpoint_in_model(net, scratch("base.safetensors"), {.strict = false});
  EXPECT_GT(differs(net, adapter), 1e-3);
  // Not by linear, which names the weight itself, but by a view of it.
  const torch::NoGradGuard no_grad;
  EXPECT_GT(relative(x.mm(net->a->weight.t()), x.mm(base.at("a.weight").t())), 1e-3);
  const auto dispatched = accelerate::dispatch_model(net, {{"", "disk"}}, {.offload_dir = scratch("offloaded")});
  EXPECT_GT(differs(net, adapter), 1e-3);
}

TEST(QuantizedModels, ArePreparedAsTheirModels) {
  torch::manual_seed(9);
  accelerate::Accelerator accelerator({.mixed_precision = "bf16"});
  Pair net;
  auto config = four_bits();
  config.skip_modules = std::vector<std::string>{"b"};
  const auto x = torch::randn({3, 64});
  {
    auto prepared = accelerator.prepare(load_and_quantize_model(net, config));
    static_assert(std::is_same_v<decltype(prepared), accelerate::Prepared<Pair>>);
    const torch::NoGradGuard no_grad;
    const auto plain = net(x), found = prepared(x);
    EXPECT_EQ(found.scalar_type(), at::kFloat);
    EXPECT_FALSE(torch::equal(plain, found)) << "not under autocast";
    EXPECT_LT(relative(found, plain), 0.02);
  }
  accelerator.free_memory();
}

// Norms and biases are left, which nobody means by "the model".
TEST(QuantizedModels, AreTrainedWithAnAdapterOrInAPart) {
  torch::manual_seed(12);
  accelerate::Accelerator accelerator;
  const auto refusal = AllOf(HasSubstr("'a.weight' and 1 more weights are in few bits"), HasSubstr("add_adapter"));
  for (const bool whole_list : {true, false}) {
    Pair net;
    const auto model = load_and_quantize_model(net, four_bits());
    std::vector<at::Tensor> parameters;
    for (const auto& parameter : net->parameters())
      if (whole_list || parameter.requires_grad()) parameters.push_back(parameter);
    torch::optim::SGD optimizer(parameters, 0.1);
    EXPECT_THAT(message_of([&] { accelerator.prepare(model, optimizer); }), refusal);
    accelerator.free_memory();
    const auto prepared = accelerator.prepare(model);
    EXPECT_THAT(message_of([&] { accelerator.prepare(optimizer); }), refusal) << "one after the other";
    accelerator.free_memory();

    const auto adapter =
        accelerate::add_adapter(accelerate::ModelRef(net), {.target_modules = {"a", "b"}, .bias = "all"});
    torch::optim::SGD adapted(net->parameters(), 0.1);
    EXPECT_NO_THROW(accelerator.prepare(model, adapted));
    accelerator.free_memory();
  }
  Pair net;
  const auto model = load_and_quantize_model(net, four_bits());
  torch::optim::SGD of_a_part({net->b->bias}, 0.1), of_all(net->parameters(), 0.1);
  EXPECT_NO_THROW(accelerator.prepare(model, of_a_part));
  accelerator.free_memory();
  net->a->bias.set_requires_grad(false);
  EXPECT_NO_THROW(accelerator.prepare(model, of_all)) << "the rest is frozen";
  accelerator.free_memory();
}

TEST(QuantizedModels, AreDescribedAsTheyAre) {
  torch::manual_seed(10);
  Pair net;
  auto config = four_bits();
  config.keep_in_fp32_modules = {"b"};
  const auto model = load_and_quantize_model(net, config);
  const fs::path folder = scratch("described") / "folder";
  EXPECT_THAT(message_of([&] { accelerate::save_quantized_model(model, eight_bits(), folder); }),
              AllOf(HasSubstr("'a.weight' is in nf4"), HasSubstr("int8")));
  auto doubled = config;
  doubled.bnb_4bit_use_double_quant = true;
  EXPECT_THAT(message_of([&] { accelerate::save_quantized_model(model, doubled, folder); }),
              HasSubstr("with scales in 8 bits"));
  EXPECT_THAT(message_of([&] { accelerate::save_quantized_model(Pair(), config, folder); }),
              HasSubstr("no weights in few bits"));
  EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
  accelerate::save_quantized_model(model, config, folder);

  std::ifstream file(folder / "config.json");
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json["quantization_config"]["llm_int8_skip_modules"], nlohmann::json({"b"}));
  Pair again;
  const auto loaded = load_and_quantize_model(again, BnbQuantizationConfig::from_json(json.dump()), folder);
  EXPECT_EQ(loaded.code_bytes(), model.code_bytes());
  EXPECT_TRUE(torch::equal(again->b->weight, net->b->weight));
  EXPECT_THAT(message_of([&] { accelerate::quantized_state_dict(net, at::kLong); }), HasSubstr("int64"));
}

}  // namespace
