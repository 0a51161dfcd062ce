/// A model's files in few bits: against bitsandbytes, transformers and gguf, and what is refused. And the perplexity
/// that a report has.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/bigmodel.hpp"
#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/perplexity.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/gguf_writer.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
namespace codes = accelerate::codes;
using accelerate::CheckpointError;
using accelerate::ConfigError;
using accelerate::quantize_files;
using accelerate::models::AutoModelForCausalLM;
using support::scratch;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string text_of(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}
template <class F> std::string message_of(F&& f) { return support::message_of<accelerate::Error>(f); }

constexpr const char* kConfig = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
  "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
  "hidden_act": "silu", "tie_word_embeddings": true, "bos_token_id": null, "eos_token_id": null})";

AutoModelForCausalLM built(const fs::path& folder) {
  const auto empty = accelerate::init_empty_weights();
  auto model = AutoModelForCausalLM::from_config(folder, accelerate::models::Weights::uninitialized);
  model.module()->eval();
  return model;
}

/// A small LLaMA whose logits differ much, as a folder.
std::map<std::string, at::Tensor> make_model(const fs::path& folder) {
  fs::create_directories(folder / "1_Pooling");
  std::ofstream(folder / "config.json") << kConfig;
  std::ofstream(folder / "tokenizer_config.json") << "{\"model_max_length\": 128}";
  std::ofstream(folder / "1_Pooling/config.json") << "{}";
  std::ofstream(folder / "model.onnx") << "weights of another kind";
  torch::manual_seed(11);
  const auto model = AutoModelForCausalLM::from_config(folder);
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model.module()->named_parameters())
    if (item.key() != "lm_head.weight")
      weights.emplace(item.key(), torch::randn_like(item.value()) * (item.value().dim() == 2 ? 0.2 : 0.05) +
                                      (item.value().dim() == 2 ? 0 : 1));
  accelerate::save_safetensors(folder / "model.safetensors", weights, {{"format", "pt"}});
  return weights;
}

std::string text_entry(const std::string& key, const std::string& text) {
  std::string entry = accelerate::formats::gguf_entry(key, 8);  // the type's number stands where a value would
  const uint64_t length = text.size();
  entry.erase(key.size() + 8, 4);
  return entry.append(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

/// Matrices of whole blocks and others, with metadata of a model that nobody knows.
std::map<std::string, at::Tensor> make_gguf(const fs::path& file) {
  torch::manual_seed(12);
  std::map<std::string, at::Tensor> tensors{{"a.weight", torch::randn({40, 64})},
                                            {"b.weight", torch::randn({2, 3, 32})},
                                            {"narrow.weight", torch::randn({5, 40})},
                                            {"norm.weight", torch::randn({64})},
                                            {"position_embd.weight", torch::randn({8, 32})}};
  accelerate::formats::GgufOutline outline;
  outline.entries = {text_entry("general.architecture", "nobody"),
                     accelerate::formats::gguf_entry("general.file_type", 0),
                     text_entry("some.text", "gr\u00fc\u00df")};
  const auto* f32 = accelerate::formats::find_gguf_encoding(0);
  for (const auto& [name, tensor] : tensors) outline.tensors.push_back({name, tensor.sizes().vec(), f32});
  accelerate::formats::GgufWriter writer("test", file, outline);
  for (const auto& [name, tensor] : tensors)
    writer.write({static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.nbytes())});
  writer.finish();
  return tensors;
}

const std::vector<int64_t>& ids() {
  static const auto all = [] {
    std::vector<int64_t> row;
    for (int64_t i = 0; i < 61; ++i) row.push_back((i * i * 7 + i) % 96);
    return row;
  }();
  return all;
}

const std::vector<std::pair<int64_t, int64_t>> kWindows = {{64, 0}, {8, 0}, {8, 3}, {16, 15}, {4096, 4096}};

TEST(QuantizeFiles, BitsandbytesTransformersAndGgufReadThem) {
  SKIP_WITHOUT_PYTHON();
  const fs::path root = scratch("peers");
  make_model(root / "model");
  make_gguf(root / "f32.gguf");
  std::ofstream(root / "ids.json") << nlohmann::json(ids());
  quantize_files(root / "model", root / "nf4", {.to = "nf4", .double_quantize = true});
  quantize_files(root / "model", root / "int8", {.to = "int8"});
  for (const char* to : {"q8_0", "q5_1"})
    quantize_files(root / "f32.gguf", root / (std::string(to) + ".gguf"), {.to = to});
  const auto peer = support::run_python("tests/unit/quantize_files_peer.py", {root.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const auto found = nlohmann::json::parse(text_of(root / "found.json"));

  EXPECT_THAT(found["codes"]["differing"], IsEmpty()) << found["codes"];
  EXPECT_EQ(found["codes"]["compared"], 2 * 2 * 7) << "seven linear layers in a block";
  const auto config = nlohmann::json::parse(text_of(root / "nf4/config.json"));
  const auto four = built(root / "nf4");
  const auto weights = accelerate::load_and_quantize_model(
      accelerate::ModelRef(four.module()), accelerate::BnbQuantizationConfig::from_json(config.dump()), root / "nf4");
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
  const auto theirs = accelerate::load_safetensors(root / "logits.safetensors").at("logits");
  auto exact = accelerate::BnbQuantizationConfig::from_json(config.dump());
  exact.exact_products = true;
  const auto again = built(root / "nf4");
  const auto exact_weights =
      accelerate::load_and_quantize_model(accelerate::ModelRef(again.module()), exact, root / "nf4");
  // Sums in another order, in fp32.
  EXPECT_LT(((again(input) - theirs).norm() / theirs.norm()).item<double>(), 1e-5);
  EXPECT_LT(((four(input) - theirs).norm() / theirs.norm()).item<double>(), 0.03) << "activations in 8 bits";

  for (const auto& [name, type] : {std::pair("q8_0", 7), std::pair("q5_1", 9)}) {
    const auto& blocks = found["blocks"][name];
    EXPECT_EQ(blocks["changed"], nlohmann::json({"general.file_type", "general.quantization_version"}));
    EXPECT_THAT(blocks["differing"], IsEmpty()) << blocks;
    EXPECT_EQ(blocks["file_type"], type);
    EXPECT_EQ(blocks["kinds"]["b.weight"], name == std::string("q8_0") ? "Q8_0" : "Q5_1");
    EXPECT_EQ(blocks["kinds"]["position_embd.weight"], "F32");
  }

  const auto model = AutoModelForCausalLM::from_pretrained(root / "model");
  model.module()->eval();
  for (size_t i = 0; i < kWindows.size(); ++i) {
    const auto ours = accelerate::models::perplexity(model, torch::tensor(ids(), at::kLong),
                                                     {.window = kWindows[i].first, .stride = kWindows[i].second});
    const auto& expected = found["perplexity"][i];
    EXPECT_EQ(ours.tokens, expected["tokens"]) << i;
    EXPECT_NEAR(ours.loss, expected["loss"].get<double>(), 2e-6 * ours.loss) << i << ": means in fp32 there";
    EXPECT_DOUBLE_EQ(ours.value, std::exp(ours.loss));
  }
}

TEST(QuantizeFiles, SaysWhatBecameOfEachTensor) {
  const fs::path root = scratch("said");
  const auto original = make_model(root / "model");
  int64_t calls = 0;
  const auto made = quantize_files(root / "model", root / "fp4",
                                   {.to = "fp4",
                                    .block_size = 32,
                                    .skip_modules = {"k_proj", "model.layers.1"},
                                    .compute_dtype = at::kBFloat16,
                                    .measure_errors = true,
                                    .on_progress = [&](int64_t done, int64_t all) {
                                      EXPECT_EQ(done, calls++);
                                      EXPECT_LT(done, all);
                                    }});
  EXPECT_EQ(calls, 2 * static_cast<int64_t>(original.size()));
  const auto file = accelerate::load_safetensors(root / "fp4/model.safetensors");
  int64_t before = 0, after = 0;
  for (const auto& tensor : made.tensors) {
    before += tensor.bytes_before, after += tensor.bytes_after;
    const bool chosen = tensor.name.find("layers.0") != std::string::npos &&
                        tensor.name.find("proj") != std::string::npos &&
                        tensor.name.find("k_proj") == std::string::npos;
    EXPECT_EQ(tensor.kept.empty(), chosen) << tensor.name << ": " << tensor.kept;
    EXPECT_EQ(tensor.from, "float32");
    const auto& values = original.at(tensor.name);
    if (!chosen) {
      EXPECT_TRUE(torch::equal(file.at(tensor.name), values));
      EXPECT_FALSE(tensor.error);
      continue;
    }
    const auto expected = codes::encode(values, {.encoding = codes::Encoding::fp4, .block_size = 32});
    EXPECT_TRUE(torch::equal(file.at(tensor.name), expected.data)) << tensor.name;
    EXPECT_NEAR(*tensor.error, ((codes::decode(expected) - values).norm() / values.norm()).item<double>(), 1e-6);
    EXPECT_GT(*tensor.error, 0.02);
  }
  EXPECT_EQ(made.bytes_before, before);
  EXPECT_EQ(made.bytes_after, after);
  int64_t stored = 0;
  for (const auto& [name, tensor] : file) stored += static_cast<int64_t>(tensor.nbytes());
  EXPECT_EQ(after, stored);
  EXPECT_EQ(text_of(root / "fp4/tokenizer_config.json"), text_of(root / "model/tokenizer_config.json"));
  EXPECT_TRUE(fs::exists(root / "fp4/1_Pooling/config.json"));
  EXPECT_FALSE(fs::exists(root / "fp4/model.onnx"));
  const auto config = accelerate::BnbQuantizationConfig::from_json(text_of(root / "fp4/config.json"));
  EXPECT_EQ(config.bnb_4bit_quant_type, "fp4");
  EXPECT_EQ(config.bnb_4bit_blocksize, 32);
  EXPECT_EQ(config.bnb_4bit_compute_dtype, at::kBFloat16);
  EXPECT_THAT(*config.skip_modules, testing::Contains("lm_head"));
  EXPECT_THAT(*config.skip_modules, testing::Contains("model.layers.0.self_attn.k_proj"));

  quantize_files(root / "model", root / "fp4", {.to = "int8", .threshold = 4.5, .overwrite = true});
  EXPECT_EQ(accelerate::BnbQuantizationConfig::from_json(text_of(root / "fp4/config.json")).llm_int8_threshold, 4.5);
  for (const auto& entry : fs::directory_iterator(root))
    EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();

  // What lies in the files, layer by layer.
  const auto model = accelerate::find_model((root / "fp4").string());
  ASSERT_TRUE(model.stored);
  EXPECT_EQ(model.stored->encoding, "int8");
  double total = 0, layer = 0;
  for (const auto& [name, tensor] : accelerate::load_safetensors(root / "fp4/model.safetensors")) {
    total += static_cast<double>(tensor.nbytes());
    if (name.starts_with("model.layers.0.")) layer += static_cast<double>(tensor.nbytes());
  }
  EXPECT_EQ(model.stored->total, total);
  EXPECT_EQ(model.stored->largest_layer, layer);
  EXPECT_FALSE(accelerate::find_model((root / "model").string()).stored);
}

TEST(QuantizeFiles, BlocksOfAFile) {
  const fs::path root = scratch("blocks");
  fs::create_directories(root);
  const auto tensors = make_gguf(root / "f32.gguf");
  for (const char* to : {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"}) {
    const fs::path out = root / (std::string(to) + ".gguf");
    const auto made = quantize_files(root / "f32.gguf", out, {.to = to, .skip_modules = {"a"}, .measure_errors = true});
    const accelerate::GgufFile file(out);
    for (const auto& tensor : made.tensors) {
      auto values = torch::empty(file.info(tensor.name).shape);
      file.read(tensor.name, values);
      EXPECT_EQ(file.info(tensor.name).stored_bytes, tensor.bytes_after);
      if (tensor.name != "b.weight") {
        EXPECT_FALSE(tensor.kept.empty()) << tensor.name;
        EXPECT_TRUE(torch::equal(values, tensors.at(tensor.name)));
        continue;
      }
      const auto& original = tensors.at(tensor.name);
      EXPECT_NEAR(*tensor.error, ((values - original).norm() / original.norm()).item<double>(), 1e-6);
      EXPECT_GT(*tensor.error, 0.001);
      EXPECT_LT(*tensor.error, 0.15) << "4 bits of normal numbers: a tenth";
    }
    const auto stored = accelerate::find_model(out.string()).stored;
    ASSERT_TRUE(stored);
    EXPECT_EQ(stored->total, static_cast<double>(made.bytes_after));
    EXPECT_EQ(stored->largest_layer, 40 * 64 * 4) << "a.weight, which stays";
  }
  EXPECT_FALSE(accelerate::find_model((root / "f32.gguf").string()).stored);
  EXPECT_THAT(message_of([&] { quantize_files(root / "f32.gguf", root / "q8_0.gguf", {.to = "q8_0"}); }),
              HasSubstr("--overwrite"));
  const auto again = quantize_files(root / "q8_0.gguf", root / "q4_0.gguf", {.to = "q4_0", .overwrite = true});
  EXPECT_EQ(accelerate::GgufFile(root / "q4_0.gguf").info("a.weight").encoding, "Q4_0");
}

TEST(QuantizeFiles, BlocksOfTheKFamily) {
  const fs::path root = scratch("k_blocks");
  fs::create_directories(root);
  torch::manual_seed(13);
  const auto values = torch::randn({6, 512});
  try {
    codes::encode(values, {.encoding = codes::Encoding::q4_k});
  } catch (const ConfigError& error) {
    GTEST_SKIP() << "there is no encoder: " << error.what();
  }
  accelerate::formats::GgufOutline outline{
      .tensors = {{"k.weight", values.sizes().vec(), accelerate::formats::find_gguf_encoding(0)}}};
  accelerate::formats::GgufWriter writer("test", root / "f32.gguf", outline);
  writer.write({static_cast<const char*>(values.const_data_ptr()), static_cast<size_t>(values.nbytes())});
  writer.finish();
  double before = 1;
  for (const char* to : {"q4_k", "q5_k", "q6_k"}) {
    const fs::path out = root / (std::string(to) + ".gguf");
    const auto made = quantize_files(root / "f32.gguf", out, {.to = to, .measure_errors = true});
    auto read = torch::empty_like(values);
    accelerate::GgufFile(out).read("k.weight", read);
    const auto expected = codes::encode(values, {.encoding = *codes::encoding_named(to)});
    EXPECT_TRUE(torch::equal(read, codes::decode(expected))) << to;
    EXPECT_LT(*made.tensors.at(0).error, before) << "a bit more than before";
    before = *made.tensors.at(0).error;
  }
}

TEST(QuantizeFiles, WhatCantBeIsNamedAndLeavesNothing) {
  const fs::path root = scratch("refused");
  auto weights = make_model(root / "model");
  make_gguf(root / "f32.gguf");
  const auto refused = [&](const fs::path& in, const char* out, accelerate::QuantizeFilesOptions options) {
    return message_of([&] { quantize_files(root / in, root / out, options); });
  };
  EXPECT_THAT(refused("model", "x", {.to = "q2_k"}), HasSubstr("'q2_k', expected nf4"));
  EXPECT_THAT(refused("model", "x.gguf", {.to = "q8_0"}), HasSubstr("made from .gguf files only"));
  EXPECT_THAT(refused("f32.gguf", "x", {.to = "q8_0"}), HasSubstr("a name that ends in .gguf"));
  EXPECT_THAT(refused("model", "x.gguf", {.to = "nf4"}), HasSubstr("does not end in .gguf"));
  EXPECT_THAT(refused("nowhere", "x", {}), HasSubstr("does not exist"));
  EXPECT_THAT(refused("model", "x", {.block_size = 48}), HasSubstr("bnb_4bit_blocksize = 48"));
  EXPECT_THAT(refused("model", "model", {}), HasSubstr("two places"));
  fs::create_directories(root / "mine");
  EXPECT_THAT(refused("model", "mine", {.overwrite = true}), HasSubstr("nothing else is overwritten"));
  struct Stop {};
  for (const auto& [in, out, to] : {std::tuple("model", "x", "nf4"), std::tuple("f32.gguf", "x.gguf", "q8_0")})
    for (const int64_t after : {0, 3, 20}) {
      if (after == 20 && std::string(to) != "nf4") continue;
      EXPECT_THROW(quantize_files(root / in, root / out,
                                  {.to = to,
                                   .on_progress =
                                       [&](int64_t done, int64_t) {
                                         if (done == after) throw Stop();
                                       }}),
                   Stop);
    }
  auto& broken = weights.at("model.layers.1.mlp.up_proj.weight");
  broken = broken.clone();
  broken[3][4] = std::numeric_limits<float>::quiet_NaN();
  accelerate::save_safetensors(root / "model/model.safetensors", weights);
  for (const char* to : {"nf4", "int8"})
    EXPECT_THAT(refused("model", "x", {.to = to}), HasSubstr("model.layers.1.mlp.up_proj.weight"));
  std::ofstream(root / "model/config.json") << R"({"model_type": "gpt2", "n_embd": 64, "n_layer": 1})";
  EXPECT_THAT(refused("model", "x", {}), HasSubstr("GPT-2's are transposed"));
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(root)) left.push_back(entry.path().filename().string());
  EXPECT_THAT(left, testing::UnorderedElementsAre("model", "f32.gguf", "mine"));
}

TEST(Perplexity, OfAModelThatKnows) {
  // Gives the next of four tokens the odds of e to 3 others of 1.
  const AutoModelForCausalLM model(nullptr, [](const at::Tensor& tokens, const at::Tensor&, const at::Tensor&,
                                               accelerate::models::KeyValueCache*, int64_t keep) {
    return torch::one_hot((tokens + 1) % 4, 4).to(at::kFloat).slice(1, tokens.size(1) - keep);
  });
  const auto text = torch::arange(10) % 4;
  std::vector<int64_t> seen;
  const auto found = accelerate::models::perplexity(
      model, text, {.window = 4, .stride = 2, .on_window = [&](int64_t done) { seen.push_back(done); }});
  EXPECT_NEAR(found.value, (std::exp(1) + 3) / std::exp(1), 1e-6);
  EXPECT_EQ(found.tokens, 9) << "all but the first";
  EXPECT_EQ(found.windows, 4);
  EXPECT_THAT(seen, ElementsAre(0, 4, 6, 8));
  EXPECT_EQ(accelerate::models::perplexity(model, text, {.window = 5}).tokens, 8);
  EXPECT_EQ(accelerate::models::perplexity(model, text, {.window = 3}).tokens, 6) << "the last one is alone";
  using accelerate::models::perplexity;
  EXPECT_THAT(message_of([&] { perplexity(model, text, {.window = 4, .stride = 5}); }), HasSubstr("stride = 5"));
  EXPECT_THAT(message_of([&] { perplexity(model, text.slice(0, 0, 1)); }), HasSubstr("2 or more int64"));
  EXPECT_THAT(message_of([&] { perplexity({nullptr, {}, 6}, text, {.window = 8}); }), HasSubstr("6 positions"));
}

}  // namespace
