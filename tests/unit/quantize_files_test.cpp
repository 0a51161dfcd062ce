/// A model's files in few bits: against bitsandbytes, transformers and gguf, and what is refused. And the perplexity
/// that a report has.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>

#include "accelerate/bigmodel.hpp"
#include "accelerate/bigmodel/convert_files.hpp"
#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/perplexity.hpp"
#include "accelerate/models/tokenizer.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/gguf_vocabulary.hpp"
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
using ::testing::AllOf;
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

constexpr const char* kGpt2 = R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96,
  "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5, "bos_token_id": 90,
  "eos_token_id": 91, "activation_function": "gelu_new", "tie_word_embeddings": true})";

constexpr const char* kChatMl =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

constexpr const char* kText = "abc ab 42<s>a. zz<tool>x</s>abcab a";

AutoModelForCausalLM built(const fs::path& folder) {
  const auto empty = accelerate::init_empty_weights();
  auto model = AutoModelForCausalLM::from_config(folder, accelerate::models::Weights::uninitialized);
  model.module()->eval();
  return model;
}

/// 96 ids of which some have no token, special tokens of two kinds, and a template.
void make_vocabulary(const fs::path& folder, const nlohmann::json& pre_tokenizer, bool adds_bos = false) {
  nlohmann::json vocab;
  for (char c = 'a'; c <= 'z'; ++c) vocab[std::string(1, c)] = c - 'a';
  for (char c = '0'; c <= '9'; ++c) vocab[std::string(1, c)] = 26 + c - '0';
  vocab["\u0120"] = 36, vocab["."] = 37, vocab["ab"] = 39, vocab["abc"] = 40, vocab["\u0120a"] = 41;
  vocab["<s>"] = 90, vocab["</s>"] = 91, vocab["<tool>"] = 92;
  const auto added = [](int id, const char* content, bool special) {
    return nlohmann::json{{"id", id}, {"content", content}, {"special", special}, {"normalized", false}};
  };
  nlohmann::json tokenizer{
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"\u0120 a", "a b", "ab c"}}}},
      {"added_tokens", {added(90, "<s>", true), added(91, "</s>", true), added(92, "<tool>", false)}},
      {"pre_tokenizer", pre_tokenizer},
      {"decoder", {{"type", "ByteLevel"}}}};
  if (adds_bos)
    tokenizer["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", nlohmann::json::array()},
        {"special_tokens",
         {{"<s>", {{"id", "<s>"}, {"ids", nlohmann::json::array({90})}, {"tokens", nlohmann::json::array({"<s>"})}}}}}};
  std::ofstream(folder / "tokenizer.json") << tokenizer;
  std::ofstream(folder / "tokenizer_config.json")
      << R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "model_max_length": 128})";
  std::ofstream(folder / "chat_template.jinja") << kChatMl;
}

/// A small model whose logits differ much, as a folder.
std::map<std::string, at::Tensor> make_model(const fs::path& folder, const std::string& config = kConfig) {
  fs::create_directories(folder / "1_Pooling");
  std::ofstream(folder / "config.json") << config;
  std::ofstream(folder / "1_Pooling/config.json") << "{}";
  std::ofstream(folder / "model.onnx") << "weights of another kind";
  make_vocabulary(folder, {{"type", "ByteLevel"}, {"add_prefix_space", false}});
  torch::manual_seed(11);
  const auto model = AutoModelForCausalLM::from_config(folder);
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model.module()->named_parameters()) {
    const bool norm = item.key().ends_with("weight") && item.value().dim() == 1;
    if (item.key() != "lm_head.weight" || nlohmann::json::parse(config)["tie_word_embeddings"] == false)
      weights.emplace(item.key(),
                      torch::randn_like(item.value()) * (item.value().dim() == 2 ? 0.2 : 0.05) + (norm ? 1 : 0));
  }
  accelerate::save_safetensors(folder / "model.safetensors", weights, {{"format", "pt"}});
  return weights;
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
  outline.entries = {accelerate::formats::gguf_entry("general.architecture", "nobody"),
                     accelerate::formats::gguf_entry("general.file_type", 0U),
                     accelerate::formats::gguf_entry("some.text", "gr\u00fc\u00df")};
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

TEST(QuantizeFiles, NumbersStayNumbersInAGgufFile) {
  const auto weights = make_model(scratch("model"));
  const std::pair<std::optional<at::ScalarType>, int64_t> kDtypes[] = {
      {std::nullopt, 0}, {at::kHalf, 1}, {at::kBFloat16, 32}};
  for (const auto& [dtype, file_type] : kDtypes) {
    const auto made =
        accelerate::convert_files(scratch("model"), scratch("numbers.gguf"), {.dtype = dtype, .overwrite = true});
    EXPECT_EQ(made.tensors, static_cast<int64_t>(weights.size()));
    const accelerate::GgufFile file(scratch("numbers.gguf"));
    EXPECT_EQ(file.metadata().integer("general.file_type"), file_type);
    EXPECT_FALSE(file.metadata().contains("general.quantization_version"));
    for (const auto& [name, weight] : weights) {
      at::Tensor found = torch::empty_like(weight);
      file.read(name, found);
      const bool in_dtype = dtype && weight.dim() == 2;
      EXPECT_TRUE(found.equal(in_dtype ? weight.to(*dtype).to(torch::kFloat) : weight)) << name;
    }
  }
}

TEST(QuantizeFiles, BitsandbytesTransformersAndGgufReadThem) {
  SKIP_WITHOUT_PYTHON();
  const fs::path root = scratch("peers");
  make_model(root / "model");
  make_model(root / "gpt2", kGpt2);
  make_gguf(root / "f32.gguf");
  std::ofstream(root / "ids.json") << nlohmann::json(ids());
  std::ofstream(root / "text.txt") << kText;
  for (const std::string name : {"model", "gpt2"}) {
    quantize_files(root / name, root / (name + "_nf4"),
                   {.to = "nf4", .double_quantize = true, .max_shard_size = "12KB"});
    quantize_files(root / name, root / (name + "_int8"), {.to = "int8"});
    quantize_files(root / name, root / (name + ".gguf"), {.to = "q8_0"});
    quantize_files(root / (name + ".gguf"), root / (name + "_back"), {.to = "nf4"});
  }
  for (const char* to : {"q8_0", "q5_1"})
    quantize_files(root / "f32.gguf", root / (std::string(to) + ".gguf"), {.to = to});
  const auto peer = support::run_python("tests/unit/quantize_files_peer.py", {root.string()});
  ASSERT_EQ(peer.exit_code, 0) << peer.output;
  const auto found = nlohmann::json::parse(text_of(root / "found.json"));

  for (const auto& [name, layers] : {std::pair("model", 7), std::pair("gpt2", 4)}) {
    EXPECT_THAT(found["codes"][name]["differing"], IsEmpty()) << found["codes"];
    EXPECT_EQ(found["codes"][name]["compared"], 2 * 2 * layers) << "linear layers in a block of " << name;
  }
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
  /// The difference between transformers' results from a folder and ours.
  const auto difference = [&](const std::string& name, bool exact) {
    const auto theirs = accelerate::load_safetensors(root / (name + "_logits.safetensors")).at("logits");
    auto config = accelerate::BnbQuantizationConfig::from_json(text_of(root / name / "config.json"));
    config.exact_products = exact;
    config.torch_dtype = at::kFloat;
    const auto model = built(root / name);
    const auto weights = accelerate::load_and_quantize_model(accelerate::ModelRef(model.module()), config, root / name);
    EXPECT_GT(weights.code_bytes(), 0);
    return ((model(input) - theirs).norm() / theirs.norm()).item<double>();
  };
  // Sums in another order, in fp32.
  EXPECT_LT(difference("model_nf4", true), 1e-5);
  EXPECT_LT(difference("gpt2_nf4", true), 1e-5);
  EXPECT_LT(difference("model_nf4", false), 0.03) << "activations in 8 bits";
  EXPECT_LT(difference("gpt2_nf4", false), 0.03);
  EXPECT_LT(difference("gpt2_int8", false), 1e-3) << "both round activations in the same way, but sums differ";
  for (const std::string name : {"model", "gpt2"}) {
    const auto& converted = found["converted"][name];
    const auto tokenizer = accelerate::models::Tokenizer::from_pretrained(root / name);
    EXPECT_EQ(converted["ids"], nlohmann::json(tokenizer.encode(kText))) << name;
    EXPECT_EQ(converted["chat"], tokenizer.apply_chat_template({{"user", "a"}})) << name;
    EXPECT_EQ(converted["eos"], 91) << name;
    for (const auto& [tensor, kind] : converted["kinds"].items()) {
      const bool numbers = tensor.ends_with("bias") || tensor.find("norm") != tensor.npos || tensor.starts_with("pos");
      EXPECT_EQ(kind, numbers ? "F32" : "Q8_0") << name << ' ' << tensor;
    }
  }
  const auto theirs = accelerate::load_safetensors(root / "model_gguf_logits.safetensors").at("logits");
  const auto ours = AutoModelForCausalLM::from_pretrained(root / "model.gguf");
  ours.module()->eval();
  EXPECT_LT(((ours(input) - theirs).norm() / theirs.norm()).item<double>(), 1e-5);
  const auto& fields = found["converted"]["model"]["fields"];
  const nlohmann::json expected{{"general.architecture", "llama"},
                                {"general.name", "model"},
                                {"general.file_type", 7},
                                {"llama.vocab_size", 96},
                                {"llama.block_count", 2},
                                {"llama.context_length", 128},
                                {"llama.embedding_length", 64},
                                {"llama.feed_forward_length", 128},
                                {"llama.attention.head_count", 4},
                                {"llama.attention.head_count_kv", 2},
                                {"llama.rope.dimension_count", 16},
                                {"llama.rope.freq_base", 10000.0},
                                {"tokenizer.ggml.model", "gpt2"},
                                {"tokenizer.ggml.pre", "gpt-2"},
                                {"tokenizer.ggml.bos_token_id", 90},
                                {"tokenizer.ggml.eos_token_id", 91},
                                {"tokenizer.ggml.add_bos_token", false},
                                {"tokenizer.chat_template", kChatMl}};
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(fields[key], value) << key;
  EXPECT_EQ(fields["tokenizer.ggml.tokens"][38], "[PAD38]");
  for (const auto& [id, kind] : {std::pair(40, 1), {38, 5}, {91, 3}, {92, 4}})
    EXPECT_EQ(fields["tokenizer.ggml.token_type"][id], kind) << id;

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

  // The contents of the files, layer by layer.
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

std::vector<std::string> weights_files(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto name = entry.path().filename().string(); name.find("safetensors") != name.npos)
      names.push_back(name);
  std::ranges::sort(names);
  return names;
}

TEST(QuantizeFiles, LargeFoldersAreInShardsWithAnIndex) {
  const fs::path root = scratch("shards");
  make_model(root / "model");
  const auto made = quantize_files(root / "model", root / "one", {.to = "nf4", .double_quantize = true});
  EXPECT_THAT(weights_files(root / "one"), ElementsAre("model.safetensors")) << "up to 50GB";
  quantize_files(root / "model", root / "many", {.to = "nf4", .double_quantize = true, .max_shard_size = "12KB"});
  const auto names = weights_files(root / "many");
  ASSERT_GT(names.size(), 4u);
  EXPECT_EQ(names.back(), "model.safetensors.index.json");
  EXPECT_THAT(names.front(), testing::StartsWith("model-00001-of-000"));
  const auto index = nlohmann::json::parse(text_of(root / "many/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], made.bytes_after);
  std::map<std::string, at::Tensor> all;
  for (const auto& name : names) {
    if (name.ends_with(".json")) continue;
    const auto file = accelerate::load_safetensors(root / "many" / name);
    int64_t bytes = 0;
    for (const auto& [tensor, value] : file) {
      EXPECT_EQ(index["weight_map"][tensor], name);
      bytes += static_cast<int64_t>(value.nbytes());
      const auto weight =
          tensor.substr(0, tensor.find(".weight.") == tensor.npos ? tensor.npos : tensor.find(".weight.") + 7);
      EXPECT_TRUE(file.contains(weight)) << tensor << " is of a weight in another file";
    }
    EXPECT_TRUE(bytes <= 12000 || file.size() == 1) << name << " has " << bytes;
    all.insert(file.begin(), file.end());
  }
  const auto expected = accelerate::load_safetensors(root / "one/model.safetensors");
  ASSERT_EQ(all.size(), expected.size());
  EXPECT_EQ(index["weight_map"].size(), expected.size());
  for (const auto& [name, tensor] : expected) EXPECT_TRUE(torch::equal(all.at(name), tensor)) << name;
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
  EXPECT_TRUE(torch::equal(AutoModelForCausalLM::from_pretrained(root / "many")(input),
                           AutoModelForCausalLM::from_pretrained(root / "one")(input)));
  EXPECT_EQ(accelerate::find_model((root / "many").string()).stored->total,
            accelerate::find_model((root / "one").string()).stored->total);

  quantize_files(root / "model", root / "many", {.to = "int8", .overwrite = true});
  EXPECT_THAT(weights_files(root / "many"), ElementsAre("model.safetensors"));
  const auto refusal = [&](const char* to, const char* out, const char* size) {
    const auto said =
        message_of([&] { quantize_files(root / "model", root / out, {.to = to, .max_shard_size = size}); });
    EXPECT_FALSE(fs::exists(root / out));
    return said;
  };
  EXPECT_THAT(refusal("nf4", "none", "large"), HasSubstr("found 'large', expected a positive number and a unit"));
  EXPECT_THAT(refusal("q8_0", "none.gguf", "1GB"), HasSubstr("max_shard_size was given with the encoding q8_0"));
}

TEST(AutoLoad, ReadsWhatQuantizeWrites) {
  const fs::path root = scratch("auto");
  make_model(root / "model");
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
  for (const char* to : {"nf4", "int8"}) {
    SCOPED_TRACE(to);
    const fs::path folder = root / to;
    quantize_files(root / "model", folder, {.to = to});
    auto config = accelerate::BnbQuantizationConfig::from_json(text_of(folder / "config.json"));
    config.torch_dtype = at::kFloat;
    const auto module = built(folder);
    const auto weights = accelerate::load_and_quantize_model(accelerate::ModelRef(module.module()), config, folder);
    const auto expected = module(input);

    accelerate::models::LoadReport report{.missing_keys = {"x"}, .unexpected_keys = {"x"}, .mismatched_keys = {}};
    const auto copy = [&] { return AutoModelForCausalLM::from_pretrained(folder, {}, &report); }();
    EXPECT_THAT(report.missing_keys, IsEmpty());
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    EXPECT_FALSE(copy.module()->is_training());
    ASSERT_TRUE(copy.dispatched());
    EXPECT_EQ(copy.dispatched()->code_bytes(), weights.code_bytes());
    EXPECT_TRUE(torch::equal(copy(input), expected));
    const auto any = accelerate::models::AutoModel::from_pretrained(folder);
    EXPECT_EQ(any.dispatched()->code_bytes(), weights.code_bytes());
    EXPECT_TRUE(torch::equal(any({{"input_ids", input}}).at("logits"), expected));
    EXPECT_THAT(message_of([&] {
                  AutoModelForCausalLM::from_pretrained(
                      folder, {.quantization = accelerate::BnbQuantizationConfig{.load_in_8bit = true}});
                }),
                AllOf(HasSubstr("quantization was asked for"), HasSubstr("in few bits already")));
    const auto half = AutoModelForCausalLM::from_pretrained(folder, {.dtype = at::kBFloat16});
    EXPECT_EQ(half(input).scalar_type(), at::kBFloat16);
    EXPECT_LT(((half(input).to(at::kFloat) - expected).norm() / expected.norm()).item<double>(), 0.05);
  }
  // The forward owns the codes, the module does not.
  std::shared_ptr<torch::nn::Module> module;
  AutoModelForCausalLM::Forward forward;
  {
    const auto model = AutoModelForCausalLM::from_pretrained(root / "nf4");
    module = model.module();
    forward = [model](const auto&... inputs) { return model(inputs...); };
    EXPECT_TRUE(torch::equal(forward(input, {}, {}, nullptr, 0), model(input)));
  }
  EXPECT_EQ(forward(input, {}, {}, nullptr, 0).size(1), input.size(1));
  forward = nullptr;
  const auto weight = module->named_parameters()["model.layers.0.mlp.up_proj.weight"];
  EXPECT_THAT(message_of([&] { torch::sum(weight); }), HasSubstr("has been destroyed"));
}

TEST(AutoLoad, PutsWeightsWhereTheyAreWanted) {
  const fs::path root = scratch("places");
  make_model(root / "model");
  quantize_files(root / "model", root / "q8.gguf", {.to = "q8_0"});
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
  const auto load = [&](const char* name, const accelerate::models::AutoLoadOptions& options) {
    return AutoModelForCausalLM::from_pretrained(root / name, options);
  };
  const auto plain = load("model", {});
  EXPECT_FALSE(plain.dispatched());
  EXPECT_TRUE(plain.module()->parameters().front().requires_grad());
  const auto expected = plain(input);
  const auto difference = [&](const AutoModelForCausalLM& model) {
    return ((model(input) - expected).norm() / expected.norm()).item<double>();
  };

  const auto disk = load("model", {.device_map = "disk"});
  EXPECT_EQ(disk.dispatched()->hf_device_map(), (accelerate::DeviceMap{{"", "disk"}}));
  EXPECT_TRUE(torch::equal(disk(input), expected));
  const auto parts = load("model", {.device_map = accelerate::DeviceMap{{"model.layers.1", "disk"}, {"", "cpu"}}});
  EXPECT_EQ(parts.dispatched()->hf_device_map().at("model.layers.1"), accelerate::Place("disk"));
  EXPECT_TRUE(torch::equal(parts(input), expected));
  // A block is in one place, and the strategy is chosen by the limit alone.
  const auto limited = load("model", {.max_memory = accelerate::MaxMemory{{"cpu", 250000}}});
  EXPECT_GT(limited.dispatched()->streamed_bytes(), 0);
  for (const auto& [name, place] : limited.dispatched()->hf_device_map())
    EXPECT_EQ(name.find("self_attn"), name.npos) << name;
  EXPECT_TRUE(torch::equal(limited(input), expected));
  EXPECT_THAT(message_of([&] { load("model", {.device_map = "cpus"}); }), HasSubstr("cpus"));

  const accelerate::BnbQuantizationConfig nf4{
      .load_in_4bit = true, .bnb_4bit_quant_type = "nf4", .bnb_4bit_compute_dtype = at::kFloat};
  const auto small = load("model", {.quantization = nf4, .exact_products = true});
  ASSERT_TRUE(small.dispatched());
  EXPECT_GT(small.dispatched()->code_bytes(), 0);
  EXPECT_GT(difference(small), 1e-3);
  const auto rounded = load("model", {.quantization = nf4});
  EXPECT_FALSE(torch::equal(small(input), rounded(input))) << "activations in 8 bits";
  rounded.module()->to(torch::kDouble);
  EXPECT_THAT(message_of([&] { rounded(input); }), HasSubstr("was moved or replaced after the model was dispatched"));
  const fs::path room = root / "room";
  fs::create_directories(room);
  const auto before = std::getenv("TMPDIR") ? std::optional<std::string>(std::getenv("TMPDIR")) : std::nullopt;
  ::setenv("TMPDIR", room.c_str(), 1);
  const auto small_on_disk = load("model", {.device_map = "disk", .quantization = nf4, .exact_products = true});
  EXPECT_TRUE(fs::is_empty(room));
  EXPECT_TRUE(torch::equal(small_on_disk(input), small(input)));
  before ? ::setenv("TMPDIR", before->c_str(), 1) : ::unsetenv("TMPDIR");

  const auto decoded = load("q8.gguf", {}), kept = load("q8.gguf", {.keep_codes = true, .exact_products = true});
  EXPECT_FALSE(decoded.dispatched());
  EXPECT_GT(kept.dispatched()->code_bytes(), 0);
  EXPECT_LT(((kept(input) - decoded(input)).norm() / decoded(input).norm()).item<double>(), 1e-5);
  EXPECT_FALSE(torch::equal(load("q8.gguf", {.keep_codes = true})(input), kept(input)));
  EXPECT_THAT(message_of([&] { load("q8.gguf", {.quantization = nf4}); }), HasSubstr("in few bits already"));
}

// Codes come and go where memory is limited, and no number changes.
TEST(AutoLoad, LimitsOfMemoryLeaveFewBitsAsTheyAre) {
  const fs::path root = scratch("limits");
  make_model(root / "model");
  quantize_files(root / "model", root / "q8.gguf", {.to = "q8_0"});
  quantize_files(root / "model", root / "nf4", {.to = "nf4"});
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
  accelerate::models::AutoLoadOptions nf4, int8, codes{.keep_codes = true};
  nf4.quantization = {.load_in_4bit = true, .bnb_4bit_quant_type = "nf4", .bnb_4bit_compute_dtype = at::kFloat};
  int8.quantization = {.load_in_8bit = true};
  struct Case {
    const char* name;
    accelerate::models::AutoLoadOptions options;
    int64_t more_than_codes;  ///< what the limit leaves to the rest: embeddings stay in fp32 (24 kB), but not in GGUF
  };
  for (const auto& [name, options, more] :
       {Case{"model", nf4, 10000}, {"model", int8, 10000}, {"nf4", {}, 10000}, {"q8.gguf", codes, -20000}}) {
    const auto whole = AutoModelForCausalLM::from_pretrained(root / name, options);
    auto limit = options;
    limit.max_memory = accelerate::MaxMemory{{"cpu", whole.dispatched()->code_bytes() + more}};
    const auto limited = AutoModelForCausalLM::from_pretrained(root / name, limit);
    const std::string which = std::string(name) + (options.quantization ? " quantized" : "");
    EXPECT_EQ(whole.dispatched()->streamed_bytes(), 0) << which;
    EXPECT_GT(limited.dispatched()->streamed_bytes(), 0) << which;
    EXPECT_GT(limited.dispatched()->code_bytes(), 0) << which;
    EXPECT_TRUE(torch::equal(limited(input), whole(input))) << which;
  }
}

TEST(AutoLoad, TakesTheDtypeOfTheFiles) {
  const fs::path root = scratch("dtypes");
  make_model(root / "model");
  const auto dtype_with = [&](const char* field, const accelerate::models::AutoLoadOptions& options) {
    auto json = nlohmann::json::parse(kConfig);
    if (*field) json.update(nlohmann::json::parse(field));
    std::ofstream(root / "model/config.json") << json;
    return AutoModelForCausalLM::from_pretrained(root / "model", options).module()->parameters().front().scalar_type();
  };
  for (const bool dispatches : {false, true}) {
    accelerate::models::AutoLoadOptions options{.dtype = "auto"};
    if (dispatches) options.device_map = "cpu";
    EXPECT_EQ(dtype_with("", options), at::kFloat);
    EXPECT_EQ(dtype_with(R"({"dtype": "bfloat16"})", options), at::kBFloat16);
    EXPECT_EQ(dtype_with(R"({"torch_dtype": "float16"})", options), at::kHalf);
    options.dtype = at::kBFloat16;
    EXPECT_EQ(dtype_with(R"({"torch_dtype": "float16"})", options), at::kBFloat16);
    options.dtype.reset();
    EXPECT_EQ(dtype_with(R"({"torch_dtype": "float16"})", options), at::kFloat);
  }
  EXPECT_THAT(message_of([&] { dtype_with("", {.dtype = "half"}); }), HasSubstr("dtype is 'half', expected \"auto\""));
  EXPECT_THAT(message_of([&] { dtype_with(R"({"dtype": "int8"})", {.dtype = "auto"}); }),
              HasSubstr("dtype is \"int8\""));
  auto tensors = accelerate::load_safetensors(root / "model/model.safetensors");
  for (auto& [name, tensor] : tensors) tensor = tensor.to(at::kHalf);
  accelerate::save_safetensors(root / "model/model.safetensors", tensors, {{"format", "pt"}});
  EXPECT_EQ(dtype_with("", {.dtype = "auto"}), at::kHalf) << "as the files have them";
  quantize_files(root / "model", root / "q8.gguf", {.to = "q8_0"});
  EXPECT_EQ(AutoModelForCausalLM::from_pretrained(root / "q8.gguf", {.dtype = "auto"})
                .module()
                ->parameters()
                .front()
                .scalar_type(),
            at::kFloat);
}

TEST(AutoLoad, EncodersWithDecodersGoToTheirPlaces) {
  const fs::path folder = scratch("t5");
  fs::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "t5", "vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
             "num_heads": 4, "decoder_start_token_id": 0})";
  torch::manual_seed(21);
  using accelerate::models::AutoModelForSeq2SeqLM;
  std::map<std::string, at::Tensor> tensors;
  const auto fresh = AutoModelForSeq2SeqLM::from_config(folder);
  for (const auto& item : fresh.module()->named_parameters()) tensors.emplace(item.key(), item.value().detach());
  accelerate::save_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
  const torch::NoGradGuard no_grad;
  const auto input = torch::tensor({{3, 4, 5}}), answer = torch::tensor({{0, 7}});
  const auto logits = [&](const AutoModelForSeq2SeqLM& model) { return model.encode(input)(answer); };
  const auto on_disk = AutoModelForSeq2SeqLM::from_pretrained(folder, {.device_map = "disk"});
  ASSERT_TRUE(on_disk.dispatched());
  EXPECT_TRUE(torch::equal(logits(on_disk), logits(AutoModelForSeq2SeqLM::from_pretrained(folder))));
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

TEST(QuantizeFiles, WholeNumbersStay) {
  const fs::path root = scratch("whole_numbers");
  fs::create_directories(root);
  const auto places = torch::arange(64, torch::kInt).view({2, 32});
  constexpr uint32_t kI32 = 26;
  const accelerate::formats::GgufOutline outline{
      .entries = {accelerate::formats::gguf_entry("general.architecture", "nobody")},
      .tensors = {{"places.weight", places.sizes().vec(), accelerate::formats::find_gguf_encoding(kI32)}}};
  accelerate::formats::GgufWriter writer("test", root / "in.gguf", outline);
  writer.write({static_cast<const char*>(places.const_data_ptr()), static_cast<size_t>(places.nbytes())});
  writer.finish();
  const auto made = quantize_files(root / "in.gguf", root / "out.gguf", {.to = "q4_0"});
  EXPECT_EQ(made.tensors.at(0).kept, "whole numbers");
  EXPECT_EQ(accelerate::GgufFile(root / "out.gguf").info("places.weight").encoding, "I32");
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
  const auto* f32 = accelerate::formats::find_gguf_encoding(0);
  accelerate::formats::GgufOutline outline{.tensors = {{"k.weight", values.sizes().vec(), f32},
                                                       {"narrow.weight", {32, 96}, f32},
                                                       {"odd.weight", {3, 10}, f32}}};
  accelerate::formats::GgufWriter writer("test", root / "f32.gguf", outline);
  const auto bytes = [&](int64_t count) {
    return std::string_view(static_cast<const char*>(values.const_data_ptr()), static_cast<size_t>(count) * 4);
  };
  for (const int64_t count : {6 * 512, 32 * 96, 3 * 10}) writer.write(bytes(count));
  writer.finish();
  double before = 1;
  for (const auto& [to, narrow] : {std::pair("q4_k", "Q5_0"), {"q5_k", "Q5_1"}, {"q6_k", "Q8_0"}}) {
    const fs::path out = root / (std::string(to) + ".gguf");
    const auto made = quantize_files(root / "f32.gguf", out, {.to = to, .measure_errors = true});
    auto read = torch::empty_like(values);
    accelerate::GgufFile(out).read("k.weight", read);
    const auto expected = codes::encode(values, {.encoding = *codes::encoding_named(to)});
    EXPECT_TRUE(torch::equal(read, codes::decode(expected))) << to;
    EXPECT_EQ(made.tensors.at(1).to, narrow) << "as llama.cpp has it";
    EXPECT_EQ(accelerate::GgufFile(out).info("narrow.weight").encoding, narrow);
    EXPECT_LT(*made.tensors.at(1).error, 0.06) << "5 bits of normal numbers";
    EXPECT_THAT(made.tensors.at(2).kept, HasSubstr("rows of 10"));
    EXPECT_THAT(made.notes,
                ElementsAre(AllOf(HasSubstr("1 matrices are in"), HasSubstr("rows are no whole blocks of 256"),
                                  HasSubstr("1 matrices of 3 stay as they are"))));
    EXPECT_LT(*made.tensors.at(0).error, before) << "a bit more than before";
    before = *made.tensors.at(0).error;
  }
}

nlohmann::json with(const char* config, const nlohmann::json& changes) {
  auto result = nlohmann::json::parse(config);
  result.update(changes);
  return result;
}

struct Conversion {
  std::string name;
  nlohmann::json config;
  std::string cuts;  ///< tokenizer.ggml.pre
};

const std::vector<Conversion>& conversions() {
  static const std::vector<Conversion> all{
      {"llama", with(kConfig, {{"attention_bias", true}, {"tie_word_embeddings", false}, {"head_dim", 32}}), "smollm"},
      {"llama3",
       with(kConfig, {{"rope_theta", 500000.0},
                      {"rope_scaling",
                       {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}}}}),
       "llama-bpe"},
      {"mistral",
       with(kConfig, {{"model_type", "mistral"},
                      {"architectures", {"MistralForCausalLM"}},
                      {"sliding_window", nullptr},
                      {"rope_parameters",
                       {{"rope_type", "yarn"},
                        {"rope_theta", 5000.0},
                        {"factor", 4.0},
                        {"original_max_position_embeddings", 32}}}}),
       "gpt-2"},
      {"mixtral",
       with(kConfig, {{"model_type", "mixtral"},
                      {"architectures", {"MixtralForCausalLM"}},
                      {"tie_word_embeddings", false},
                      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
                      {"num_local_experts", 4},
                      {"num_experts_per_tok", 2}}),
       "gpt-2"},
      {"qwen2", with(kConfig, {{"model_type", "qwen2"}, {"architectures", {"Qwen2ForCausalLM"}}}), "qwen2"},
      {"gpt2", with(kGpt2, nlohmann::json::object()), "gpt-2"}};
  return all;
}

TEST(QuantizeFiles, AFolderBecomesAFileOfBlocksAndAFolderAgain) {
  const fs::path root = scratch("converted");
  const torch::NoGradGuard no_grad;
  for (const auto& [name, config, cuts] : conversions()) {
    const fs::path folder = root / name, out = root / (name + ".gguf"), back = root / (name + "_back");
    const auto weights = make_model(folder, config.dump());
    const auto* known = accelerate::formats::find_gguf_pre_tokenizer(cuts);
    make_vocabulary(folder, known->pre_tokenizer, /*adds_bos=*/cuts == "llama-bpe");
    auto tokenizer_json = nlohmann::json::parse(text_of(folder / "tokenizer.json"));
    tokenizer_json["normalizer"] = known->normalizer;
    tokenizer_json["model"]["ignore_merges"] = known->whole_words;
    std::ofstream(folder / "tokenizer.json") << tokenizer_json;
    std::vector<std::string> skipped;
    if (name != "gpt2") skipped = {"v_proj"};  // which it has not
    const auto made = quantize_files(folder, out, {.to = "q8_0", .skip_modules = skipped, .measure_errors = true});
    EXPECT_THAT(made.notes, IsEmpty()) << name;

    const accelerate::GgufFile file(out);
    std::set<std::string> names(file.names().begin(), file.names().end()), expected;
    names.erase("rope_freqs.weight");
    int64_t coded = 0;
    for (const auto& [key, values] : weights) {
      expected.insert(key);
      ASSERT_TRUE(file.contains(key)) << name << ' ' << key;
      auto read = torch::empty(file.info(key).shape);
      file.read(key, read);
      const bool matrix = values.dim() == 2 && key.find("wpe") == key.npos && key.find("v_proj") == key.npos &&
                          !key.ends_with("block_sparse_moe.gate.weight");
      const bool turned = key.find(".c_") != key.npos;
      coded += matrix;
      EXPECT_EQ(file.info(key).encoding, matrix ? "Q8_0" : "F32") << name << ' ' << key;
      auto decoded = values;
      if (matrix)
        decoded = codes::decode(
            codes::encode(turned ? values.t().contiguous() : values, {.encoding = codes::Encoding::q8_0}));
      if (matrix && turned) decoded = decoded.t();
      EXPECT_TRUE(torch::equal(read, decoded)) << name << ' ' << key;
    }
    EXPECT_EQ(names, expected) << name;
    EXPECT_GE(coded, 9) << name;
    for (const auto& tensor : made.tensors) EXPECT_EQ(tensor.error.has_value(), tensor.kept.empty()) << tensor.name;

    // With the same numbers the folder's model gives the same: so sizes, positions and norms are those of its config.
    const auto input = torch::tensor(ids(), at::kLong).unsqueeze(0);
    const auto of_folder = AutoModelForCausalLM::from_pretrained(folder),
               of_blocks = AutoModelForCausalLM::from_pretrained(out);
    for (auto& parameter : of_folder.module()->named_parameters())
      if (file.contains(parameter.key())) file.read(parameter.key(), parameter.value());
    of_folder.module()->eval(), of_blocks.module()->eval();
    const auto expected_logits = of_folder(input);
    EXPECT_LT(((of_blocks(input) - expected_logits).norm() / expected_logits.norm()).item<double>(), 1e-5) << name;

    using accelerate::models::Tokenizer;
    const auto ours = Tokenizer::from_pretrained(folder), of_file = Tokenizer::from_pretrained(out);
    EXPECT_EQ(of_file.encode(kText), ours.encode(kText)) << name;
    EXPECT_EQ(of_file.encode(kText)[0], cuts == "llama-bpe" ? 90 : 40) << name;
    EXPECT_EQ(of_file.bos_token_id(), 90);
    EXPECT_EQ(of_file.eos_token_id(), 91);

    const auto notes = quantize_files(out, back, {.to = "nf4"}).notes;
    if (name == "mixtral") EXPECT_THAT(notes, ElementsAre(HasSubstr("of experts")));
    else EXPECT_THAT(notes, IsEmpty());
    const auto again = Tokenizer::from_pretrained(back);
    EXPECT_EQ(again.encode(kText), ours.encode(kText)) << name;
    EXPECT_EQ(again.apply_chat_template({{"user", "a"}}), ours.apply_chat_template({{"user", "a"}})) << name;
    EXPECT_EQ(again.eos_token_id(), 91);
    EXPECT_TRUE(again.is_special(91) && !again.is_special(92) && again.token_to_id("<tool>") == 92);
    EXPECT_EQ(nlohmann::json::parse(text_of(back / "generation_config.json"))["eos_token_id"], 91);
  }
}

TEST(QuantizeFiles, WhatAFileOfBlocksCanNotSayIsRefusedByName) {
  const fs::path root = scratch("unsayable"), folder = root / "model";
  const auto weights = make_model(folder);
  const auto refused = [&] { return message_of([&] { quantize_files(folder, root / "x.gguf", {.to = "q8_0"}); }); };
  const std::pair<nlohmann::json, const char*> configs[] = {
      {{{"model_type", "bert"}}, "\"bert\", expected llama"},
      {{{"hidden_act", "gelu"}}, "hidden_act is \"gelu\", expected \"silu\""},
      {{{"rms_norm_eps", nullptr}}, "rms_norm_eps is null"},
      {{{"hidden_size", "x"}}, "hidden_size is \"x\", expected a size"},
      {{{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}}, "type is \"dynamic\""},
      {{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 16}}}}, "beta_fast is 16, expected 32"},
      {{{"num_hidden_layers", 1}}, "is of layer 1, and config.json says that there are 1"},
      {{{"num_hidden_layers", 3}}, "lacks the tensor 'model.layers.2."},
      {{{"tie_word_embeddings", false}}, "lacks the tensor 'lm_head.weight'"},
      {{{"vocab_size", 95}}, "the embeddings have 96 rows"},
      {{{"num_attention_heads", 12}}, "expected an even number of rows for each of the 12 heads"}};
  for (const auto& [changes, message] : configs) {
    std::ofstream(folder / "config.json") << with(kConfig, changes);
    EXPECT_THAT(refused(), HasSubstr(message));
  }
  std::ofstream(folder / "config.json") << kConfig;
  const auto tokenizer = nlohmann::json::parse(text_of(folder / "tokenizer.json"));
  const auto with_tokenizer = [&](const char* pointer, const nlohmann::json& value) {
    auto changed = tokenizer;
    changed[nlohmann::json::json_pointer(pointer)] = value;
    std::ofstream(folder / "tokenizer.json") << changed;
    return refused();
  };
  EXPECT_THAT(with_tokenizer("/model/type", "Unigram"), HasSubstr("of the kind Unigram, expected byte-level BPE"));
  EXPECT_THAT(with_tokenizer("/model/byte_fallback", true), HasSubstr("SentencePiece"));
  EXPECT_THAT(with_tokenizer("/model/unk_token", "a"), HasSubstr("unk_token is \"a\""));
  EXPECT_THAT(with_tokenizer("/model/vocab/zz", 96), HasSubstr("'zz' has the id 96, and the embeddings have 96 rows"));
  EXPECT_THAT(with_tokenizer("/model/merges/0", "a"), HasSubstr("the merge 'a'"));
  EXPECT_THAT(with_tokenizer("/model/merges", 3), HasSubstr("not of the form"));
  EXPECT_THAT(with_tokenizer("/model/ignore_merges", true), HasSubstr("no name in .gguf files"));
  EXPECT_THAT(with_tokenizer("/normalizer", {{"type", "Lowercase"}}), HasSubstr("no name in .gguf files"));
  EXPECT_THAT(with_tokenizer("/pre_tokenizer", {{"type", "Digits"}}), HasSubstr("no name in .gguf files"));
  EXPECT_THAT(with_tokenizer("/post_processor", {{"type", "RobertaProcessing"}}), HasSubstr("post_processor is"));
  fs::remove(folder / "tokenizer.json");
  EXPECT_THAT(refused(), HasSubstr("has no tokenizer.json"));
  std::ofstream(folder / "tokenizer.model") << "x";
  EXPECT_THAT(refused(), HasSubstr("SentencePiece's"));
  make_vocabulary(folder, tokenizer["pre_tokenizer"]);
  auto more = weights;
  more.emplace("model.layers.0.self_attn.q_norm.weight", torch::ones(16));
  accelerate::save_safetensors(folder / "model.safetensors", more);
  EXPECT_THAT(refused(), HasSubstr("'model.layers.0.self_attn.q_norm.weight' has no name in a .gguf file"));
  EXPECT_FALSE(fs::exists(root / "x.gguf"));

  accelerate::save_safetensors(folder / "model.safetensors", weights);
  std::ofstream(folder / "config.json") << with(kConfig, {{"model_type", "mistral"}, {"sliding_window", 64}});
  auto flags = tokenizer;
  flags["added_tokens"][2]["lstrip"] = true;
  std::ofstream(folder / "tokenizer.json") << flags;
  EXPECT_THAT(quantize_files(folder, root / "x.gguf", {.to = "q8_0"}).notes,
              ElementsAre(HasSubstr("sliding_window, 64"), HasSubstr("lstrip of '<tool>'")));
}

TEST(QuantizeFiles, WhatCantBeIsNamedAndLeavesNothing) {
  const fs::path root = scratch("refused");
  auto weights = make_model(root / "model");
  make_gguf(root / "f32.gguf");
  const auto refused = [&](const fs::path& in, const char* out, accelerate::QuantizeFilesOptions options) {
    return message_of([&] { quantize_files(root / in, root / out, options); });
  };
  EXPECT_THAT(refused("model", "x", {.to = "q2_k"}), HasSubstr("'q2_k', expected nf4"));
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
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(root)) left.push_back(entry.path().filename().string());
  EXPECT_THAT(left, testing::UnorderedElementsAre("model", "f32.gguf", "mine"));
}

/// The new folder may be published.
TEST(QuantizeFiles, LinksLeadNowhereElse) {
  const fs::path root = scratch("links"), model = root / "model";
  make_model(model);
  fs::create_directory_symlink(".", model / "a");
  fs::create_directory_symlink(".", model / "b");
  fs::create_directory_symlink("..", model / "up");
  std::ofstream(model / "notes.txt") << "ours";
  fs::create_symlink("notes.txt", model / "same.txt");
  const auto result = quantize_files(model, root / "nf4", {.to = "nf4"});
  EXPECT_THAT(result.notes, testing::IsSupersetOf({HasSubstr("a' is a link to a folder and was not copied"),
                                                   HasSubstr("b' is a link"), HasSubstr("up' is a link")}));
  for (const char* name : {"a", "b", "up"}) EXPECT_FALSE(fs::exists(root / "nf4" / name)) << name;
  EXPECT_EQ(text_of(root / "nf4/same.txt"), "ours");
  std::ofstream(root / "secret") << "of somebody";
  fs::create_symlink("../secret", model / "vocab.json");
  EXPECT_THAT(message_of([&] { quantize_files(model, root / "other", {.to = "nf4"}); }),
              testing::AllOf(HasSubstr("vocab.json' leads to"), HasSubstr("Put the file itself there")));
  EXPECT_FALSE(fs::exists(root / "other"));
}

/// Git LFS leaves these where a file was not fetched.
TEST(QuantizeFiles, PointersAreNoFiles) {
  const fs::path root = scratch("pointers"), model = root / "model";
  make_model(model);
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n";
  std::ofstream(model / "picture.png") << pointer;
  const auto result = quantize_files(model, root / "nf4", {.to = "nf4"});
  EXPECT_THAT(result.notes,
              testing::Contains(testing::AllOf(HasSubstr("picture.png' was not copied"), HasSubstr("git lfs pull"))));
  EXPECT_FALSE(fs::exists(root / "nf4/picture.png"));
  std::ofstream(model / "tokenizer_config.json") << pointer;
  EXPECT_THAT(message_of([&] { quantize_files(model, root / "other", {.to = "nf4"}); }),
              testing::AllOf(HasSubstr("tokenizer_config.json"), HasSubstr("a pointer of Git LFS")));
}

TEST(QuantizeFiles, NothingOfTheUsersIsReplaced) {
  const fs::path root = scratch("places"), model = root / "model", out = root / "out";
  make_model(model);
  quantize_files(model, out, {.to = "nf4"});
  const auto refused = [&](const fs::path& in, const fs::path& to) {
    return message_of([&] { quantize_files(in, to, {.to = "int8", .overwrite = true}); });
  };
  fs::rename(model, out / "model");
  EXPECT_THAT(refused(out / "model", out), HasSubstr("would be replaced as a whole, expected two places"));
  fs::rename(out / "model", model);
  for (const char* name : {"notes.txt", "a", "b", "c", "d", "e"}) std::ofstream(out / name) << "mine";
  std::ofstream(out / "1_Pooling/mine.json") << "{}";
  EXPECT_THAT(refused(model, out), HasSubstr("will not have: 1_Pooling/mine.json, a, b, c, d and 2 more"));
  EXPECT_EQ(text_of(out / "notes.txt"), "mine");
  for (const char* name : {"notes.txt", "a", "b", "c", "d", "e", "1_Pooling/mine.json"}) fs::remove(out / name);
  std::ofstream(out / "adapter_model.safetensors") << "weights that were trained beside them";
  EXPECT_THAT(refused(model, out), HasSubstr("will not have: adapter_model.safetensors."));
  EXPECT_TRUE(fs::exists(out / "adapter_model.safetensors"));
  EXPECT_THAT(refused(model, ""), HasSubstr("found ''"));
  // A result within what it is made of is no part of its next version.
  for (int round = 0; round < 2; ++round) quantize_files(model, model / "nf4", {.to = "nf4", .overwrite = true});
  EXPECT_TRUE(fs::exists(model / "nf4/1_Pooling/config.json"));
  EXPECT_FALSE(fs::exists(model / "nf4/nf4"));
  // A folder that has come meanwhile is not replaced either, and the work is not lost.
  const auto message = message_of([&] {
    quantize_files(model, root / "late",
                   {.on_progress = [&](int64_t, int64_t) { fs::create_directories(root / "late/of/another"); }});
  });
  const fs::path kept = (root / "late").string() + ".finished-" + std::to_string(::getpid());
  EXPECT_THAT(message, HasSubstr("It is kept as '" + kept.string()));
  EXPECT_TRUE(fs::exists(kept / "config.json"));
  EXPECT_TRUE(fs::exists(root / "late/of/another"));
}

TEST(QuantizeFiles, TensorsAreThoseOfConfigJson) {
  const fs::path root = scratch("compared"), folder = root / "model";
  const auto weights = make_model(folder);
  const auto with_changes = [&](const auto& change) {
    auto changed = weights;
    change(changed);
    accelerate::save_safetensors(folder / "model.safetensors", changed);
  };
  const auto refused = [&](const char* to) {
    return message_of([&] { quantize_files(folder, root / (*to == 'q' ? "y.gguf" : "y"), {.to = to}); });
  };
  const std::string up = "model.layers.1.mlp.up_proj.weight";
  with_changes([&](auto& all) {
    all.erase("model.norm.weight");
    all["model.extra.weight"] = torch::ones({2, 2}), all["foo.bar"] = torch::ones({2, 2});
    all.at(up) = torch::ones({127, 64});
  });
  EXPECT_THAT(refused("nf4"),
              AllOf(HasSubstr("missing in the checkpoint:\n  model.norm.weight\n"),
                    HasSubstr("not in the model:\n  foo.bar\n  model.extra.weight\n"),
                    HasSubstr(up + ": [127, 64] float32 in the checkpoint, [128, 64] float32 in the model")));
  for (const auto& wrong : {torch::ones({127, 64}), torch::ones({128, 64}, at::kInt)}) {
    with_changes([&](auto& all) { all.at(up) = wrong; });
    for (const char* to : {"int8", "q8_0"}) EXPECT_THAT(refused(to), HasSubstr(up)) << to;
  }
  // A .gguf file has the same.
  with_changes([](auto&) {});
  quantize_files(folder, root / "whole.gguf", {.to = "q8_0"});
  EXPECT_THAT(message_of([&] {
                std::ifstream in(root / "whole.gguf", std::ios::binary);
                std::string bytes{std::istreambuf_iterator<char>(in), {}};
                bytes.replace(bytes.find("blk.1.ffn_up"), 12, "blk.1.ffn_xp");
                std::ofstream(root / "renamed.gguf", std::ios::binary) << bytes;
                quantize_files(root / "renamed.gguf", root / "x", {.to = "nf4"});
              }),
              AllOf(HasSubstr(up), HasSubstr("blk.1.ffn_xp.weight")));

  // Tensors that transformers ignores may be there, and a head that is the embeddings is left out.
  with_changes([](auto& all) {
    all["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch::ones(8);
    all["lm_head.weight"] = all.at("model.embed_tokens.weight").clone();
  });
  for (const auto& [to, out] : {std::pair("nf4", "x"), {"q8_0", "x.gguf"}})
    EXPECT_THAT(quantize_files(folder, root / out, {.to = to}).notes, ElementsAre(HasSubstr("is a copy"))) << to;
  EXPECT_FALSE(accelerate::SafetensorsFile(root / "x/model.safetensors").contains("lm_head.weight"));
  with_changes([](auto& all) { all["lm_head.weight"] = all.at("model.embed_tokens.weight") + 1; });
  for (const char* to : {"nf4", "q8_0"}) EXPECT_THAT(refused(to), HasSubstr("lm_head.weight differs from")) << to;
  std::ofstream(folder / "config.json") << with(kConfig, {{"tie_word_embeddings", false}});
  quantize_files(folder, root / "own_head", {.to = "nf4"});
  std::ofstream(folder / "config.json") << with(kConfig, {{"hidden_size", "x"}});
  EXPECT_THAT(refused("nf4"), HasSubstr((folder / "config.json").string() + "': hidden_size is \"x\""));
  std::ofstream(folder / "config.json") << "{";
  EXPECT_THAT(refused("nf4"), HasSubstr("config.json' is not valid JSON"));

  make_model(root / "gpt2", kGpt2);
  auto old = accelerate::load_safetensors(root / "gpt2/model.safetensors");
  old["transformer.h.0.attn.bias"] = torch::ones({1, 1, 128, 128});
  old["transformer.h.1.attn.masked_bias"] = torch::tensor(-1e4);
  accelerate::save_safetensors(root / "gpt2/model.safetensors", old);
  quantize_files(root / "gpt2", root / "gpt2_nf4", {.to = "nf4"});

  make_model(root / "mixtral", conversions()[3].config.dump());
  const auto made = quantize_files(root / "mixtral", root / "mixtral_nf4", {.to = "nf4"});
  EXPECT_THAT(made.notes, ElementsAre(HasSubstr("24 tensors of " + std::to_string(made.tensors.size()) + " stay")));
}

/// T5's `wo`: transformers makes no layer in few bits of it, and would not know what to do with codes.
TEST(QuantizeFiles, WhatTransformersKeepsInFp32Stays) {
  const fs::path folder = scratch("t5") / "model", made = scratch("t5") / "nf4";
  fs::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"architectures":["T5ForConditionalGeneration"],"model_type":"t5","vocab_size":32,"d_model":32,"d_kv":8,)"
         R"("d_ff":64,"num_layers":1,"num_heads":4})";
  torch::manual_seed(12);
  const auto model = accelerate::models::AutoModelForSeq2SeqLM::from_config(folder);
  accelerate::checkpointing::save_model(accelerate::ModelRef(model.module()), folder, int64_t{1} << 30, true);
  quantize_files(folder, made, {.to = "nf4"});
  const auto weights = accelerate::load_safetensors(made / "model.safetensors");
  const std::string layer = "decoder.block.0.layer.2.DenseReluDense.";
  EXPECT_EQ(weights.at(layer + "wi.weight").scalar_type(), at::kByte);
  EXPECT_EQ(weights.at(layer + "wo.weight").scalar_type(), at::kFloat);
  const auto config = nlohmann::json::parse(text_of(made / "config.json"));
  EXPECT_THAT(config["quantization_config"]["llm_int8_skip_modules"].get<std::vector<std::string>>(),
              testing::IsSupersetOf({layer + "wo", std::string("lm_head")}));
}

TEST(QuantizeFiles, OptionsWithoutEffectAreRefusedBeforeTheWork) {
  const fs::path root = scratch("effects");
  make_model(root / "model");
  make_gguf(root / "f32.gguf");
  const auto refused = [&](const char* in, const char* out, accelerate::QuantizeFilesOptions options) {
    options.on_progress = [](int64_t, int64_t) { FAIL() << "work before the check"; };
    const auto message = message_of([&] { quantize_files(root / in, root / out, options); });
    EXPECT_EQ(message_of([&] { accelerate::check_quantize_files(root / in, root / out, options); }), message);
    return message;
  };
  EXPECT_THAT(refused("model", "x", {.to = "int8", .block_size = 64}), HasSubstr("block_size was given"));
  EXPECT_THAT(refused("model", "x", {.to = "int8", .double_quantize = true}), HasSubstr("double_quantize was given"));
  EXPECT_THAT(refused("model", "x.gguf", {.to = "q4_0", .double_quantize = true}), HasSubstr("double_quantize"));
  EXPECT_THAT(refused("model", "x.gguf", {.to = "q8_0", .block_size = 128}), HasSubstr("block_size was given"));
  EXPECT_THAT(refused("model", "x", {.to = "nf4", .threshold = 3}), HasSubstr("threshold was given"));
  EXPECT_THAT(refused("model", "x.gguf", {.to = "q4_0", .threshold = 6}), HasSubstr("threshold was given"));
  EXPECT_THAT(refused("model", "x.gguf", {.to = "q4_0", .compute_dtype = at::kHalf}), HasSubstr("compute_dtype was"));
  EXPECT_THAT(refused("model", "x", {.to = "int8", .compute_dtype = at::kHalf}), HasSubstr("compute_dtype was given"));
  for (const char* name : {"nosuch", "k_proj,q_proj", ""})
    for (const auto& [in, out, to] : {std::tuple("model", "x", "nf4"), std::tuple("model", "x.gguf", "q8_0"),
                                      std::tuple("f32.gguf", "x.gguf", "q8_0")})
      EXPECT_THAT(refused(in, out, {.to = to, .skip_modules = {name}}),
                  HasSubstr("skip_modules has '" + std::string(name) + "', which names nothing"));
  EXPECT_THAT(refused("f32.gguf", "x.gguf", {.to = "q8_0", .skip_modules = {"weight"}}), HasSubstr("names nothing"));
  accelerate::check_quantize_files(root / "model", root / "x", {.to = "nf4", .skip_modules = {"lm_head", "k_proj"}});
  EXPECT_FALSE(fs::exists(root / "x"));

  quantize_files(root / "model", root / "q8_0.gguf", {.to = "q8_0"});
  const auto made = quantize_files(root / "q8_0.gguf", root / "q4_0.gguf",
                                   {.to = "q4_0", .skip_modules = {"attn_q", "blk.0.ffn_down.weight"}});
  for (const auto& tensor : made.tensors) {
    const bool skipped = tensor.name.ends_with("attn_q.weight") || tensor.name == "blk.0.ffn_down.weight";
    EXPECT_EQ(tensor.kept == "to be left alone", skipped) << tensor.name;
    EXPECT_EQ(tensor.to, tensor.from == "F32" ? "F32" : skipped ? "Q8_0" : "Q4_0") << tensor.name;
  }
}

TEST(QuantizeFiles, WhatKilledRunsLeftIsRemoved) {
  const fs::path root = scratch("left");
  make_model(root / "model");
  constexpr int kNobody = 4194305;  // beyond the largest process id
  const std::string of_nobody = std::to_string(kNobody), of_others = ".x.tmp-" + std::to_string(::getppid());
  fs::create_directories(root / (".x.tmp-" + of_nobody) / ".codes");
  fs::create_directories(root / of_others);
  for (const std::string& name :
       {".x.gguf.tmp-" + of_nobody + "-0", ".x.tmp-" + of_nobody + "x", ".y.tmp-" + of_nobody})
    std::ofstream(root / name) << "left";
  quantize_files(root / "model", root / "x", {.to = "nf4"});
  quantize_files(root / "model", root / "x.gguf", {.to = "q8_0"});
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(root))
    if (entry.path().filename().string().starts_with(".")) left.push_back(entry.path().filename().string());
  EXPECT_THAT(left, testing::UnorderedElementsAre(of_others, ".x.tmp-" + of_nobody + "x", ".y.tmp-" + of_nobody));
}

/// In a folder of several users: whose it is could change or take what is written into it.
TEST(QuantizeFiles, AFolderThatWasMadeInAdvanceIsNotUsed) {
  const fs::path root = scratch("in_advance");
  make_model(root / "model");
  const fs::path in_advance = root / (".x.tmp-" + std::to_string(::getpid()));
  fs::create_directories(in_advance);
  std::ofstream(in_advance / "theirs") << "theirs";
  quantize_files(root / "model", root / "x", {.to = "nf4"});
  EXPECT_EQ(text_of(in_advance / "theirs"), "theirs");
  EXPECT_FALSE(fs::exists(root / "x/theirs"));
  EXPECT_TRUE(fs::exists(root / "x/config.json"));
}

/// For this thread: what NFS answers. @return false where the system has no such filters
bool refuse_flags_of_renames() {
  sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 3),
                        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args) + 4 * sizeof(uint64_t)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{.len = std::size(code), .filter = code};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(QuantizeFiles, FileSystemsThatKnowNoFlagsOfRenamesWillDo) {
  const fs::path root = scratch("renames");
  make_model(root / "model");
  bool filtered = false;
  std::thread([&] {
    filtered = refuse_flags_of_renames();
    if (!filtered) return;
    quantize_files(root / "model", root / "x", {.to = "nf4"});
    quantize_files(root / "model", root / "x", {.to = "int8", .overwrite = true});
  }).join();
  if (!filtered) GTEST_SKIP() << "the system filters no calls";
  EXPECT_THAT(text_of(root / "x/config.json"), HasSubstr("\"load_in_8bit\": true"));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root)) names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, testing::UnorderedElementsAre("model", "x"));
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
