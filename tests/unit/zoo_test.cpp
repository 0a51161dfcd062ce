/// The Auto classes and all architectures: against transformers, and alone.

#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/auto_model.hpp"
#include "accelerate/models/generate.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "models/activations.hpp"
#include "python.hpp"
#include "residency/meta_kernels.hpp"
#include "residency_support.hpp"
#include "scratch.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate::models;
using support::largest_difference;
using support::scratch;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Tolerance of all comparisons: the same fp32 operations in another order of summation, for logits of a size of 1
// to 10. Measured are at most 5e-6.
constexpr double kTolerance = 1e-5;

/// Writes a config.json. @return its folder
fs::path config(const std::string& json) {
  static int count = 0;
  const auto folder = scratch("config-" + std::to_string(count++));
  fs::create_directories(folder);
  std::ofstream(folder / "config.json") << json;
  return folder;
}

struct Kind {
  const char* json;
  const char* layer;  ///< class of the unit that does not split
};

const Kind kCausal[] = {
    {R"({"model_type":"llama","vocab_size":20,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,)"
     R"("num_attention_heads":4,"num_key_value_heads":2,"initializer_range":0.3})",
     "LlamaDecoderLayer"},
    {R"({"architectures":["MistralForCausalLM"],"model_type":"mistral","vocab_size":20,"hidden_size":16,)"
     R"("intermediate_size":24,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,)"
     R"("sliding_window":4,"initializer_range":0.3})",
     "MistralDecoderLayer"},
    {R"({"model_type":"qwen2","vocab_size":20,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,)"
     R"("num_attention_heads":4,"num_key_value_heads":2,"initializer_range":0.3})",
     "Qwen2DecoderLayer"},
    {R"({"model_type":"mixtral","vocab_size":20,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,)"
     R"("num_attention_heads":4,"num_key_value_heads":2,"num_local_experts":3,"initializer_range":0.3})",
     "MixtralDecoderLayer"},
    {R"({"model_type":"gpt2","vocab_size":20,"n_positions":16,"n_embd":16,"n_layer":2,"n_head":4,)"
     R"("initializer_range":0.3})",
     "GPT2Block"},
    {R"({"model_type":"gptj","vocab_size":20,"n_positions":16,"n_embd":16,"n_layer":2,"n_head":4,"rotary_dim":2,)"
     R"("initializer_range":0.3})",
     "GPTJBlock"},
    {R"({"model_type":"gpt_neox","vocab_size":20,"hidden_size":16,"intermediate_size":24,"num_hidden_layers":2,)"
     R"("num_attention_heads":2,"initializer_range":0.3})",
     "GPTNeoXLayer"},
    {R"({"model_type":"opt","vocab_size":20,"hidden_size":16,"ffn_dim":24,"num_hidden_layers":2,)"
     R"("num_attention_heads":4,"max_position_embeddings":16,"init_std":0.3})",
     "OPTDecoderLayer"},
};
const Kind kT5 = {R"({"model_type":"t5","vocab_size":20,"d_model":16,"d_kv":4,"d_ff":24,"num_layers":2,"num_heads":4,)"
                  R"("relative_attention_num_buckets":8,"relative_attention_max_distance":12})",
                  "T5Block"};
const Kind kImages[] = {
    {R"({"model_type":"vit","hidden_size":16,"num_hidden_layers":2,"num_attention_heads":4,"intermediate_size":24,)"
     R"("image_size":16,"patch_size":8,"num_labels":5})",
     "ViTLayer"},
    {R"({"model_type":"resnet","embedding_size":8,"hidden_sizes":[16,24],"depths":[2,1],"num_labels":5})",
     "ResNetConvLayer"},
    {R"({"architecture":"efficientnet_lite0","num_classes":5})", "InvertedResidual"},
};
const Kind kBert = {
    R"({"architectures":["BertForMaskedLM"],"model_type":"bert","vocab_size":20,"hidden_size":16,)"
    R"("num_hidden_layers":2,"num_attention_heads":4,"intermediate_size":24,"max_position_embeddings":16})",
    "BertLayer"};

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds(std::begin(kCausal), std::end(kCausal));
  kinds.insert(kinds.end(), std::begin(kImages), std::end(kImages));
  kinds.push_back(kT5);
  kinds.push_back(kBert);
  return kinds;
}

AutoModel::Tensors inputs_of(const Kind& kind) {
  torch::manual_seed(1);
  for (const auto& image : kImages)
    if (image.json == kind.json) return {{"pixel_values", torch::randn({2, 3, 16, 16})}};
  AutoModel::Tensors inputs = {{"input_ids", torch::randint(1, 20, {2, 6})}};
  if (kind.json == kT5.json) inputs["decoder_input_ids"] = torch::randint(1, 20, {2, 3});
  return inputs;
}

/// Logits of a model of whatever kind; of BERT the hidden states.
torch::Tensor output_of(const AutoModel& model, const AutoModel::Tensors& inputs) {
  return model.forward(inputs).begin()->second;
}

TEST(Zoo, LayersHaveHuggingFacesClasses) {
  for (const auto& kind : all_kinds()) {
    std::set<std::string> classes;
    for (const auto& module : AutoModel::from_config(config(kind.json)).module()->modules()) {
      const auto name = module->name();
      classes.insert(name.substr(name.rfind(':') == std::string::npos ? 0 : name.rfind(':') + 1));
    }
    EXPECT_THAT(classes, Contains(kind.layer));
  }
}

TEST(Zoo, BuiltWithoutMemoryTheyAreTheSameModels) {
  for (const auto& kind : all_kinds()) {
    SCOPED_TRACE(kind.layer);
    const auto folder = config(kind.json);
    torch::manual_seed(3);
    const auto eager = AutoModel::from_config(folder);
    torch::manual_seed(3);
    auto deferred = [&] {
      auto empty = accelerate::init_empty_weights();
      return AutoModel::from_config(folder);
    }();
    for (const auto& parameter : deferred.module()->parameters()) EXPECT_TRUE(parameter.is_meta());
    accelerate::materialize(deferred.module());
    const auto parameters = deferred.module()->named_parameters();
    for (const auto& item : eager.module()->named_parameters())
      EXPECT_TRUE(item.value().equal(parameters[item.key()])) << item.key();
    eager.module()->eval();
    deferred.module()->eval();
    EXPECT_TRUE(output_of(eager, inputs_of(kind)).equal(output_of(deferred, inputs_of(kind))));
  }
}

/// Language models: LibTorch has no convolution of meta tensors in C++.
TEST(Zoo, OnTheMetaDeviceTheyGiveShapes) {
  accelerate::meta_memory::install_kernels();
  for (const auto& kind : all_kinds()) {
    SCOPED_TRACE(kind.layer);
    if (std::any_of(std::begin(kImages), std::end(kImages), [&](const Kind& image) { return image.json == kind.json; }))
      continue;
    const auto folder = config(kind.json);
    auto inputs = inputs_of(kind);
    const auto real = output_of(AutoModel::from_config(folder), inputs);
    const auto model = [&] {
      auto on_meta = accelerate::init_on_device(at::kMeta);
      return AutoModel::from_config(folder, Weights::uninitialized);
    }();
    for (auto& [name, tensor] : inputs) tensor = tensor.to(at::kMeta);
    const auto shape = output_of(model, inputs);
    EXPECT_TRUE(shape.is_meta());
    EXPECT_EQ(shape.sizes(), real.sizes());
  }
}

TEST(Zoo, ClonesAreIndependent) {
  for (const auto& kind : all_kinds()) {
    SCOPED_TRACE(kind.layer);
    const auto model = AutoModel::from_config(config(kind.json));
    const auto copy = model.module()->clone();
    const auto parameters = copy->named_parameters();
    for (const auto& item : model.module()->named_parameters()) {
      EXPECT_TRUE(item.value().equal(parameters[item.key()])) << item.key();
      EXPECT_NE(item.value().data_ptr(), parameters[item.key()].data_ptr()) << item.key();
    }
  }
}

/// Token by token, with half of the rows padded on the left, and with only the last logits.
TEST(Zoo, ACacheChangesNothing) {
  const torch::NoGradGuard no_grad;
  for (const auto& kind : kCausal) {
    SCOPED_TRACE(kind.layer);
    torch::manual_seed(0);
    const auto model = AutoModelForCausalLM::from_config(config(kind.json));
    model.module()->eval();
    const auto ids = torch::randint(0, 20, {2, 9});
    auto padded = torch::ones({2, 9}, at::kLong);
    padded[1].slice(0, 0, 2).zero_();
    for (const auto& mask : {torch::Tensor(), padded}) {
      const auto whole = model(ids, mask);
      KeyValueCache cache;
      std::vector<torch::Tensor> parts;
      for (const auto& [from, to] : {std::pair<int64_t, int64_t>{0, 3}, {3, 6}, {6, 7}, {7, 8}, {8, 9}})
        parts.push_back(model(ids.slice(1, from, to), mask.defined() ? mask.slice(1, 0, to) : mask, {}, &cache));
      EXPECT_EQ(cache.length(), 9);
      EXPECT_LT(largest_difference(torch::cat(parts, 1).slice(1, 2), whole.slice(1, 2)), kTolerance);
      EXPECT_LT(largest_difference(model(ids, mask, {}, nullptr, 2), whole.slice(1, 7)), kTolerance);
      EXPECT_EQ(model(ids, mask, {}, nullptr, 2).size(1), 2);
    }
    EXPECT_THAT(support::message_of<accelerate::ShapeError>([&] {
                  model(ids, torch::ones({2, 4}));
                }),
                HasSubstr("attention_mask has shape [2, 4], but input_ids [2, 9]"));
  }
}

/// The same bits, whether a weight lies in memory or is fetched for each operator: our own product of one row too.
TEST(Zoo, TheyDecodeWhileWeightsComeAndGo) {
  const torch::NoGradGuard no_grad;
  for (const auto& kind : kCausal) {
    SCOPED_TRACE(kind.layer);
    torch::manual_seed(0);
    const auto model = AutoModelForCausalLM::from_config(config(kind.json));
    model.module()->eval();
    const auto decode = [&] {
      KeyValueCache cache;
      std::vector<torch::Tensor> parts;
      for (int64_t t = 0; t < 4; ++t) parts.push_back(model(torch::full({1, 1}, t, at::kLong), {}, {}, &cache));
      return torch::cat(parts, 1);
    };
    const auto plain = decode();
    const auto engine = residency_test::shard_children(model.module(), {.prefetch = 1, .evict_after_use = true});
    EXPECT_TRUE(decode().equal(plain));
  }
}

/// transformers 5 calls some modules otherwise: GPT-NeoX's head, ViT's layers. Its device maps mean the same ones.
TEST(Zoo, DeviceMapsHaveTheNamesOfTransformers5) {
  const torch::NoGradGuard no_grad;
  const auto map_of = [](std::initializer_list<std::pair<const char*, const char*>> places) {
    accelerate::DeviceMap map;
    for (const auto& [name, place] : places) map.insert_or_assign(name, place);
    return map;
  };
  const auto neox = map_of({{"gpt_neox", "cpu"}, {"lm_head", "disk"}});
  const auto vit = map_of({{"vit", "cpu"}, {"vit.layers.1.attention.q_proj", "disk"}, {"classifier", "cpu"}});
  for (const auto& [kind, theirs, ours] : {std::tuple(kCausal[6], neox, "embed_out"),
                                           {kImages[0], vit, "vit.encoder.layer.1.attention.attention.query"}}) {
    SCOPED_TRACE(kind.layer);
    const auto folder = config(kind.json);
    const auto saved = AutoModel::from_config(folder);
    saved.module()->eval();
    std::map<std::string, at::Tensor> tensors;
    for (const auto& item : saved.module()->named_parameters()) tensors.emplace(item.key(), item.value().detach());
    accelerate::save_safetensors(folder / "model.safetensors", tensors);
    const auto expected = output_of(saved, inputs_of(kind));
    const auto model = AutoModel::from_config(folder);
    model.module()->eval();
    const auto dispatched =
        accelerate::load_checkpoint_and_dispatch(accelerate::ModelRef(model.module()), folder / "model.safetensors",
                                                 {.device_map = theirs, .offload_folder = folder / "offload"});
    EXPECT_EQ(dispatched.hf_device_map().at(ours).str(), "disk");
    EXPECT_TRUE(output_of(model, inputs_of(kind)).equal(expected));
    const auto again =
        accelerate::dispatch_model(accelerate::ModelRef(saved.module()), theirs, {.offload_dir = folder / "dispatch"});
    EXPECT_EQ(again.hf_device_map().at(ours).str(), "disk");
    auto in_memory = theirs;
    for (auto& [name, place] : in_memory) place = "cpu";
    const auto into = AutoModel::from_config(folder);
    into.module()->eval();
    accelerate::load_checkpoint_in_model(accelerate::ModelRef(into.module()), folder / "model.safetensors",
                                         {.device_map = in_memory});
    EXPECT_TRUE(output_of(into, inputs_of(kind)).equal(expected));
  }
}

TEST(Zoo, ADecoderRepeatsItsInputForBeams) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  const auto model = AutoModelForSeq2SeqLM::from_config(config(kT5.json));
  model.module()->eval();
  const auto ids = torch::randint(1, 20, {2, 5}), answer = torch::randint(1, 20, {6, 4});
  auto mask = torch::ones({2, 5});
  mask[1].slice(0, 3).zero_();
  const auto beams = model.encode(ids, mask)(answer);
  for (int64_t row = 0; row < 6; ++row) {
    const auto alone = model.encode(ids.slice(0, row / 3, row / 3 + 1),
                                    mask.slice(0, row / 3, row / 3 + 1))(answer.slice(0, row, row + 1));
    EXPECT_LT(largest_difference(beams.slice(0, row, row + 1), alone), kTolerance);
  }
}

TEST(Zoo, ErrorsNameWhatIsWrong) {
  const auto error = [](const std::string& json) {
    return support::message_of<accelerate::CheckpointError>([&] { AutoModelForCausalLM::from_config(config(json)); });
  };
  EXPECT_THAT(error(R"({"model_type":"mamba"})"), HasSubstr("model_type is \"mamba\", expected one of bert, "));
  EXPECT_THAT(error(R"({"model_type":"opt","architectures":["OPTForSequenceClassification"]})"),
              HasSubstr("architectures is \"OPTForSequenceClassification\", expected OPTForCausalLM"));
  EXPECT_THAT(error(kT5.json),
              HasSubstr("': T5ForConditionalGeneration is no causal language model; use AutoModelForSeq2SeqLM."));
  EXPECT_THAT(error(kBert.json), HasSubstr("use AutoModel."));
  EXPECT_THAT(error(R"({"model_type":"gptj","n_embd":10,"n_head":4})"),
              HasSubstr("n_head is 4, expected a divisor of n_embd, which is 10"));
  EXPECT_THAT(error(R"({"model_type":"gpt_neox","hidden_size":0})"),
              HasSubstr("hidden_size is 0, expected at least 1"));
  EXPECT_THAT(error(R"({"model_type":"opt","activation_function":"softplus"})"),
              HasSubstr("activation_function is \"softplus\", expected one of gelu, "));
  EXPECT_THAT(error(R"({"model_type":"mixtral","num_experts_per_tok":9})"),
              HasSubstr("num_experts_per_tok is 9, expected 1 to num_local_experts, which is 8"));
  // transformers computes these otherwise, or not at all.
  EXPECT_THAT(error(R"({"model_type":"gpt2","is_causal":false})"), HasSubstr("is_causal is false, expected true"));
  EXPECT_THAT(error(R"({"model_type":"opt","per_layer_config":{"0":{"ffn_dim":8}}})"),
              HasSubstr("per_layer_config is {"));
  EXPECT_THAT(error(R"({"model_type":"llama","sliding_window":8,"max_position_embeddings":16})"),
              HasSubstr("sliding_window is 8, expected null, or at least max_position_embeddings, which is 16"));
  EXPECT_THAT(
      error(R"({"model_type":"mistral","num_hidden_layers":2,"sliding_window":4,"layer_types":["full_attention",)"
            R"("sliding_attention"]})"),
      HasSubstr("expected the same for all layers"));
  EXPECT_THAT(
      error(R"({"model_type":"qwen2","num_hidden_layers":1,"layer_types":["sliding_attention"]})"),
      HasSubstr("layer_types is 'sliding_attention', expected full_attention where there is no sliding_window"));
  EXPECT_THAT(error(R"({"model_type":"llama","rope_scaling":{"type":"linear"}})"),
              HasSubstr("rope_scaling.factor is null, expected a value, which rope_type linear needs"));
  EXPECT_THAT(error(R"({"model_type":"gpt_neox","rope_parameters":{"rope_type":"mrope","factor":2}})"),
              HasSubstr("rope_parameters.rope_type is \"mrope\", expected one of default, dynamic, "));
  EXPECT_THAT(
      error(R"({"model_type":"qwen2","partial_rotary_factor":0.5,"rope_scaling":{"type":"linear","factor":2}})"),
      HasSubstr("partial_rotary_factor is 0.5, expected 1"));
  EXPECT_THAT(error(R"({"model_type":"llama","rope_parameters":{"full_attention":{"rope_type":"default"}}})"),
              HasSubstr("expected one set of parameters"));
  EXPECT_THAT(error(R"({"model_type":"gptj","rotary_dim":null,"n_embd":16,"n_head":2})"),
              HasSubstr("rotary_dim is 16, expected an even number up to n_embd / n_head, which is 8"));
  const auto quantized = config(R"({"model_type":"gpt2","vocab_size":20,"n_embd":16,"n_layer":1,"n_head":4,)"
                                R"("quantization_config":{"quant_method":"fp8"}})");
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { AutoModel::from_pretrained(quantized); }),
              HasSubstr("quant_method is \"fp8\", expected \"bitsandbytes\""));
  // A number wins over names.
  const auto named = AutoModel::from_config(
      config(R"({"model_type":"resnet","embedding_size":8,"hidden_sizes":[16],"depths":[1],"num_labels":5,)"
             R"("id2label":{"0":"a","1":"b","2":"c"}})"));
  EXPECT_EQ(named.module()->named_parameters()["classifier.1.bias"].size(0), 5);
  const auto model = AutoModel::from_config(config(kImages[1].json));
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] {
                model.forward({{"pixels", torch::zeros({1})}});
              }),
              HasSubstr("found an input 'pixels', expected some of pixel_values"));
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { model.forward({}); }),
              HasSubstr("the input 'pixel_values' is missing"));
  EXPECT_THAT(support::message_of<accelerate::ShapeError>([&] {
                model.forward({{"pixel_values", torch::zeros({1, 4, 8, 8})}});
              }),
              HasSubstr("pixel_values has shape [1, 4, 8, 8], expected [B, 3, height, width]"));
}

TEST(ZooLoading, AHeadThatShouldBeTheEmbeddingsIsCompared) {
  for (const auto& kind : {kCausal[4], kCausal[7], kT5}) {
    SCOPED_TRACE(kind.layer);
    const auto folder = config(kind.json);
    std::map<std::string, at::Tensor> tensors;
    for (const auto& item : AutoModel::from_config(folder).module()->named_parameters())
      tensors.emplace(item.key(), item.value().detach());
    const auto words = std::find_if(tensors.begin(), tensors.end(), [](const auto& item) {
      return item.first == "shared.weight" || item.first.ends_with("embed_tokens.weight") ||
             item.first.ends_with("wte.weight");
    });
    ASSERT_NE(words, tensors.end());
    tensors["lm_head.weight"] = words->second.clone();
    accelerate::save_safetensors(folder / "model.safetensors", tensors);
    LoadReport report;
    AutoModel::from_pretrained(folder, {}, &report);
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    tensors["lm_head.weight"] += 1;
    accelerate::save_safetensors(folder / "model.safetensors", tensors);
    EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] { AutoModel::from_pretrained(folder); }),
                HasSubstr("lm_head.weight differs from " + words->first + ", but tie_word_embeddings is true"));
  }
}

TEST(ZooLoading, AllDifferencesAreListed) {
  const auto folder = config(kCausal[7].json);
  const auto model = AutoModelForCausalLM::from_config(folder);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : model.module()->named_parameters()) tensors.emplace(item.key(), item.value().detach());
  accelerate::save_safetensors(folder / "model.safetensors", tensors);
  LoadReport report;
  const auto same = AutoModelForCausalLM::from_pretrained(folder, {.dtype = at::kBFloat16}, &report);
  EXPECT_THAT(report.missing_keys, IsEmpty());
  EXPECT_EQ(same.module()->parameters().front().scalar_type(), at::kBFloat16);
  EXPECT_FALSE(same.module()->is_training());

  tensors.erase("model.decoder.layers.0.fc1.bias");
  tensors.at("model.decoder.layers.1.fc2.bias") = torch::zeros({17});
  tensors["model.decoder.extra"] = torch::zeros({1});
  accelerate::save_safetensors(folder / "model.safetensors", tensors);
  EXPECT_THAT(support::message_of<accelerate::CheckpointError>([&] { AutoModelForCausalLM::from_pretrained(folder); }),
              AllOf(HasSubstr("1 tensors do not fit the model:\n  model.decoder.layers.1.fc2.bias: [17] Float in the "
                              "file, [16] Float in the model"),
                    HasSubstr("1 tensors of the model are missing:\n  model.decoder.layers.0.fc1.bias")));
}

/// The folders that the peer made, one for each kind.
std::vector<std::string> kinds_of(const std::string& group, const fs::path& folder) {
  const auto result = support::run_python("tests/unit/zoo_peer.py", {group, folder.string()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  std::vector<std::string> kinds;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.is_directory()) kinds.push_back(entry.path().filename());
  return kinds;
}

template <class Model> Model load_all(const fs::path& folder) {
  LoadReport report;
  auto model = Model::from_pretrained(folder, {}, &report);
  EXPECT_THAT(report.missing_keys, IsEmpty());
  EXPECT_THAT(report.unexpected_keys, IsEmpty());
  return model;
}

class CausalReference : public ::testing::TestWithParam<std::pair<const char*, size_t>> {};

TEST_P(CausalReference, ModelsEqualTransformers) {
  SKIP_WITHOUT_PYTHON();
  const torch::NoGradGuard no_grad;
  const auto& [group, count] = GetParam();
  const auto folder = scratch(group);
  const auto kinds = kinds_of(group, folder);
  EXPECT_EQ(kinds.size(), count);
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind);
    const auto expected = accelerate::load_safetensors(folder / (kind + ".safetensors"));
    const auto model = load_all<AutoModelForCausalLM>(folder / kind);
    const auto &ids = expected.at("input_ids"), &mask = expected.at("attention_mask");
    EXPECT_LT(largest_difference(model(ids), expected.at("logits")), kTolerance);
    const auto seen = mask.unsqueeze(-1);
    EXPECT_LT(largest_difference(model(ids, mask) * seen, expected.at("masked_logits") * seen), kTolerance);
    KeyValueCache cache;
    std::vector<torch::Tensor> tokens;
    for (int64_t t = 0; t < ids.size(1); ++t)
      tokens.push_back(model(ids.slice(1, t, t + 1), mask.slice(1, 0, t + 1), {}, &cache));
    EXPECT_LT(largest_difference(torch::cat(tokens, 1) * seen, expected.at("cached_logits") * seen), kTolerance);
    EXPECT_TRUE(generate(model, ids.slice(0, 1), {.max_new_tokens = 8},
                         {.attention_mask = mask.slice(0, 1), .max_positions = 1000})
                    .equal(expected.at("generated")));
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, CausalReference,
                         ::testing::Values(std::pair("causal", size_t{18}), std::pair("written", size_t{17})),
                         [](const auto& info) { return info.param.first; });

AutoModelForCausalLM without_weights(const fs::path& folder) {
  const auto empty = accelerate::init_empty_weights();
  auto model = AutoModelForCausalLM::from_config(folder, Weights::uninitialized);
  model.module()->eval();
  return model;
}

/// Every way of loading goes by the same names.
TEST(ZooReference, NamesOfOtherFilesAreKnownHoweverTheyAreLoaded) {
  SKIP_WITHOUT_PYTHON();
  const torch::NoGradGuard no_grad;
  const auto folder = scratch("names");
  const auto kinds = kinds_of("names", folder);
  EXPECT_EQ(kinds.size(), 8U);
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind);
    const auto expected = accelerate::load_safetensors(folder / (kind + ".safetensors"));
    const auto& ids = expected.at("input_ids");
    const auto expect_logits = [&](const AutoModelForCausalLM& model, const char* how) {
      EXPECT_LT(largest_difference(model(ids), expected.at("logits")), kTolerance) << how;
    };
    expect_logits(load_all<AutoModelForCausalLM>(folder / kind), "from_pretrained");
    const auto loaded = without_weights(folder / kind);
    EXPECT_EQ(accelerate::check_state_dict(accelerate::ModelRef(loaded.module()), folder / kind).text(), "");
    accelerate::load_checkpoint_in_model(accelerate::ModelRef(loaded.module()), folder / kind);
    expect_logits(loaded, "load_checkpoint_in_model");
    const auto on_disk = without_weights(folder / kind);
    const auto weights = accelerate::load_checkpoint_and_dispatch(
        accelerate::ModelRef(on_disk.module()), folder / kind,
        {.device_map = accelerate::DeviceMap{{"", accelerate::Place("disk")}}});
    expect_logits(on_disk, "load_checkpoint_and_dispatch");

    const auto quantized = [&](const fs::path& from, const fs::path& to) {
      accelerate::quantize_files(from, to, {.to = "nf4"});
      std::ifstream file(to / "config.json");
      auto config = accelerate::BnbQuantizationConfig::from_json({std::istreambuf_iterator<char>(file), {}});
      config.torch_dtype = at::kFloat;
      const auto model = without_weights(to);
      const auto codes = accelerate::load_and_quantize_model(accelerate::ModelRef(model.module()), config, to);
      EXPECT_GT(codes.code_bytes(), 0);
      return model(ids);
    };
    EXPECT_TRUE(quantized(folder / kind, folder / (kind + "-nf4"))
                    .equal(quantized(folder / kind / "plain", folder / (kind + "-plain-nf4"))));
  }
}

TEST(ZooReference, ActivationsEqualTransformers) {
  SKIP_WITHOUT_PYTHON();
  const auto folder = scratch("activations");
  const auto result = support::run_python("tests/unit/zoo_peer.py", {"activations", folder.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const auto tensors = accelerate::load_safetensors(folder / "activations.safetensors");
  EXPECT_GT(tensors.size(), 20U);
  for (const auto& [name, expected] : tensors) {
    if (name == "x") continue;
    const auto activation = find_activation(name);
    ASSERT_TRUE(activation) << name;
    // Formulas of fp32 that are equal but for rounding, of values up to 144.
    EXPECT_TRUE(torch::allclose((*activation)(tensors.at("x")), expected, 1e-6, 2e-6)) << name;
  }
}

TEST(ZooReference, EncoderAndDecoderEqualTransformers) {
  SKIP_WITHOUT_PYTHON();
  const torch::NoGradGuard no_grad;
  const auto folder = scratch("seq2seq");
  const auto kinds = kinds_of("seq2seq", folder);
  EXPECT_EQ(kinds.size(), 4U);
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind);
    const auto expected = accelerate::load_safetensors(folder / (kind + ".safetensors"));
    LoadReport report;
    const auto model = AutoModelForSeq2SeqLM::from_pretrained(folder / kind, {}, &report);
    // transformers ties the head of both versions when it saves.
    EXPECT_THAT(report.missing_keys, kind != "t5-v1_1" ? ::testing::Matcher<std::vector<std::string>>(IsEmpty())
                                                       : ::testing::ElementsAre("lm_head.weight"));
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    const auto &ids = expected.at("input_ids"), &mask = expected.at("attention_mask"),
               &answer = expected.at("decoder_input_ids");
    EXPECT_LT(largest_difference(model.encode(ids)(answer), expected.at("logits")), kTolerance);
    const auto decoder = model.encode(ids, mask);
    EXPECT_LT(largest_difference(decoder(answer), expected.at("masked_logits")), kTolerance);
    KeyValueCache cache;
    std::vector<torch::Tensor> tokens;
    for (int64_t t = 0; t < answer.size(1); ++t) tokens.push_back(decoder(answer.slice(1, t, t + 1), {}, {}, &cache));
    EXPECT_LT(largest_difference(torch::cat(tokens, 1), expected.at("masked_logits")), kTolerance);
  }
}

TEST(ZooReference, ImageClassifiersEqualTransformers) {
  SKIP_WITHOUT_PYTHON();
  const torch::NoGradGuard no_grad;
  const auto folder = scratch("images");
  const auto kinds = kinds_of("images", folder);
  EXPECT_EQ(kinds.size(), 6U);
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind);
    const auto expected = accelerate::load_safetensors(folder / (kind + ".safetensors"));
    const auto model = load_all<AutoModel>(folder / kind);
    EXPECT_LT(largest_difference(model.forward({{"pixel_values", expected.at("pixel_values")}}).at("logits"),
                                 expected.at("logits")),
              kTolerance);
  }
}

/// Not as they begin, where norms and biases are neutral and a forgotten one would not be seen.
void shake(const AutoModel& model) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.module()->parameters())
    if (parameter.dim() == 1) parameter += 0.1 * torch::randn_like(parameter);
  for (const auto& buffer : model.module()->named_buffers()) {
    if (buffer.key().ends_with("running_mean")) buffer.value().add_(0.1 * torch::randn_like(buffer.value()));
    if (buffer.key().ends_with("running_var")) buffer.value().mul_(torch::rand_like(buffer.value()) + 0.5);
  }
}

/// Every architecture: ours reads it to the bit, and transformers computes the same with it.
TEST(ZooSaving, EveryArchitectureIsReadHereAndByTransformers) {
  const torch::NoGradGuard no_grad;
  auto kinds = all_kinds();
  kinds[0].json = R"({"model_type":"llama","vocab_size":20,"hidden_size":16,"intermediate_size":24,"my_field":[1],)"
                  R"("num_hidden_layers":2,"num_attention_heads":4,"torch_dtype":"float16","initializer_range":0.3})";
  for (auto& kind : kinds)  // the peer computes this one by itself, with TensorFlow's padding
    if (kind.layer == std::string("InvertedResidual"))
      kind.json = R"({"architecture":"tf_efficientnet_lite0","num_classes":5})";
  kinds.push_back({R"({"model_type":"t5","vocab_size":20,"d_model":16,"d_kv":4,"d_ff":24,"num_layers":2,"num_heads":4,)"
                   R"("feed_forward_proj":"gated-gelu","tie_word_embeddings":false,"initializer_factor":0.4})",
                   "T5Block"});
  kinds.push_back({R"({"model_type":"gptj","vocab_size":20,"n_positions":16,"n_embd":16,"n_layer":1,"n_head":4,)"
                   R"("rotary_dim":2,"tie_word_embeddings":true,"initializer_range":0.3})",
                   "GPTJBlock"});
  kinds.push_back({R"({"architectures":["BertForSequenceClassification"],"model_type":"bert","vocab_size":20,)"
                   R"("hidden_size":16,"num_hidden_layers":1,"num_attention_heads":4,"intermediate_size":24})",
                   "BertLayer"});
  const auto folder = scratch("saved");
  std::vector<torch::Tensor> outputs;
  for (const auto& kind : kinds) {
    SCOPED_TRACE(kind.json);
    torch::manual_seed(5);
    const auto model = AutoModel::from_config(config(kind.json));
    shake(model);
    model.module()->eval();
    const auto name = std::to_string(outputs.size());
    model.save_pretrained(folder / name);
    torch::manual_seed(1);
    AutoModel::Tensors inputs{{"pixel_values", torch::randn({2, 3, 16, 16})}};
    if (model.module()->name().find("Image") == std::string::npos &&
        model.module()->name().find("EfficientNet") == std::string::npos)
      inputs = {{"input_ids", torch::randint(1, 20, {2, 6})}};
    if (kind.layer == std::string("T5Block")) inputs["decoder_input_ids"] = torch::randint(1, 20, {2, 3});
    outputs.push_back(output_of(model, inputs));
    LoadReport report;
    EXPECT_TRUE(output_of(AutoModel::from_pretrained(folder / name, {}, &report), inputs).equal(outputs.back()));
    EXPECT_THAT(report.missing_keys, IsEmpty());
    EXPECT_THAT(report.unexpected_keys, IsEmpty());
    accelerate::save_safetensors(folder / (name + ".inputs"), inputs);
  }
  std::ifstream file(folder / "0/config.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(text, AllOf(HasSubstr("my_field"), HasSubstr(R"("dtype": "float32")"),
                          ::testing::Not(HasSubstr("torch_dtype")), HasSubstr("LlamaForCausalLM")));

  SKIP_WITHOUT_PYTHON();
  const auto result = support::run_python("tests/unit/zoo_peer.py", {"outputs", folder.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  for (size_t i = 0; i < outputs.size(); ++i) {
    SCOPED_TRACE(kinds[i].json);
    const auto theirs = accelerate::load_safetensors(folder / (std::to_string(i) + ".outputs")).at("output");
    EXPECT_LT(largest_difference(outputs[i], theirs), kTolerance);
  }
}

TEST(ZooSaving, OtherWeightsInSeveralFiles) {
  const auto folder = scratch("other"), made = config(kCausal[0].json);
  std::ofstream(made / "generation_config.json") << R"({"eos_token_id": [2, 3]})";
  const auto model = AutoModelForCausalLM::from_config(made);
  std::map<std::string, torch::Tensor> weights;
  for (const auto& item : model.module()->named_parameters()) weights.emplace(item.key(), item.value().detach() * 2);
  model.save_pretrained(folder, weights, "2KB");
  EXPECT_TRUE(fs::exists(folder / "model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
  std::ifstream generation(folder / "generation_config.json");
  EXPECT_EQ((std::string{std::istreambuf_iterator<char>(generation), {}}), R"({"eos_token_id": [2, 3]})");
  const auto read = AutoModelForCausalLM::from_pretrained(folder);
  for (const auto& item : read.module()->named_parameters())
    EXPECT_TRUE(item.value().equal(weights.at(item.key()))) << item.key();
  read.save_pretrained(folder);  // from where the next one reads, over what it has read
  EXPECT_FALSE(fs::exists(folder / "model.safetensors.index.json"));
  EXPECT_TRUE(
      AutoModelForCausalLM::from_pretrained(folder).module()->parameters()[0].equal(read.module()->parameters()[0]));

  const auto refusal = [&](const std::map<std::string, torch::Tensor>& given) {
    return support::message_of<accelerate::CheckpointError>([&] { model.save_pretrained(scratch("never"), given); });
  };
  EXPECT_THAT(refusal({}), HasSubstr("save on the main process"));
  auto wrong = weights;
  wrong.erase("lm_head.weight");
  wrong["more"] = torch::zeros({1});
  wrong.at("model.norm.weight") = torch::zeros({3});
  EXPECT_THAT(refusal(wrong),
              AllOf(HasSubstr("'lm_head.weight': missing in the given state"), HasSubstr("'more': not in the model"),
                    HasSubstr("'model.norm.weight': the given state has [3], the model [16]")));
  EXPECT_FALSE(fs::exists(scratch("never")));
  const AutoModel own(model.module(), [](const AutoModel::Tensors& inputs) { return inputs; });
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { own.save_pretrained(folder); }),
              HasSubstr("no config.json describes it"));
}

/// Wherever they lie, and in whatever they are kept.
TEST(ZooSaving, DispatchedAndInFewBits) {
  const torch::NoGradGuard no_grad;
  const auto folder = scratch("whole"), saved = scratch("saved_again");
  const auto made = config(R"({"model_type":"llama","vocab_size":64,"hidden_size":64,"intermediate_size":128,)"
                           R"("num_hidden_layers":2,"num_attention_heads":4,"max_position_embeddings":128,)"
                           R"("rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","initializer_range":0.3})");
  const auto ids = torch::randint(64, {1, 5});
  AutoModelForCausalLM::from_config(made).save_pretrained(folder);
  std::ofstream(folder / "tokenizer.json")
      << R"({"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},"added_tokens":[],)"
         R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"decoder":{"type":"ByteLevel"}})";
  const auto expect_same_again = [&](const AutoLoadOptions& options, const fs::path& from) {
    const auto model = AutoModelForCausalLM::from_pretrained(from, options);
    model.save_pretrained(saved);
    const auto again = AutoModelForCausalLM::from_pretrained(saved);
    EXPECT_TRUE(again(ids).equal(model(ids)));
    return again;
  };
  expect_same_again({.device_map = "disk"}, folder);
  for (const bool four : {true, false}) {
    accelerate::BnbQuantizationConfig bits{.load_in_8bit = !four, .load_in_4bit = four};
    bits.torch_dtype = bits.bnb_4bit_compute_dtype = at::kFloat;
    const auto again = expect_same_again({.device_map = "cpu", .quantization = bits}, folder);
    ASSERT_TRUE(again.dispatched());
    EXPECT_GT(again.dispatched()->code_bytes(), 0);
    EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { again.save_pretrained(saved, "1GB"); }),
                HasSubstr("max_shard_size is '1GB'"));
  }
  // And numbers where codes were.
  EXPECT_FALSE(expect_same_again({}, folder).dispatched());

  const auto blocks = scratch("blocks.gguf");
  accelerate::quantize_files(folder, blocks, {.to = "q8_0"});
  const auto kept = AutoModelForCausalLM::from_pretrained(blocks, {.keep_codes = true});
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { kept.save_pretrained(saved); }),
              HasSubstr("blocks of a .gguf file"));
  expect_same_again({}, blocks);
}

TEST(AutoModels, ArePreparedAsAnyModel) {
  accelerate::Accelerator accelerator({.cpu = true});
  const auto folder = config(kCausal[0].json);
  const auto ids = torch::randint(20, {2, 5});
  auto model = AutoModelForCausalLM::from_config(folder);
  torch::optim::SGD optimizer(model.module()->parameters(), 0.1);
  auto [m, opt] = accelerator.prepare(model, optimizer);
  const auto before = model(ids).detach();
  EXPECT_TRUE(m(ids).equal(before));
  accelerator.backward(m(ids).pow(2).mean());
  opt.step();
  EXPECT_FALSE(m(ids).equal(before));
  EXPECT_TRUE(m(ids).equal(model(ids)));
  EXPECT_EQ(accelerator.get_state_dict(m).size(), model.module()->named_parameters().size());
  EXPECT_EQ(m->parameters().size(), model.module()->parameters().size());

  auto any = AutoModel::from_config(folder);
  const AutoModel::Tensors inputs{{"input_ids", ids}};
  EXPECT_TRUE(accelerator.prepare(any)(inputs).at("logits").equal(any(inputs).at("logits")));
  EXPECT_TRUE(accelerate::cpu_offload(any)(inputs).at("logits").equal(any(inputs).at("logits")));
}

}  // namespace
