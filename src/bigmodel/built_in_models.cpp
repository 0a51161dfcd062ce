#include "bigmodel/built_in_models.hpp"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "accelerate/bigmodel/estimate.hpp"

namespace accelerate {
namespace bigmodel {
namespace {

/// Fields that have the library's default are left out. Two models have fields of ours, for what the transformers did
/// with which Hugging Face published these models' sizes. The bytes that they count are printed with the figures.
/// - `_cached_rotary_tables`: cosines and sines of all positions were buffers of every attention until 4.40. With them
///   idefics-80b gives its published sizes to the byte, and llama-3-8B its 28.21 GB.
constexpr BuiltInModel kModels[] = {
    {"google-bert/bert-base-cased", "", R"({"model_type": "bert", "vocab_size": 28996})"},
    {"google-bert/bert-base-uncased", "", R"({"model_type": "bert"})"},
    {"google-bert/bert-large-uncased", "",
     R"({"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, )"
     R"("intermediate_size": 4096})"},
    {"sentence-transformers/all-MiniLM-L6-v2", "",
     R"({"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536})"},
    {"distilbert/distilbert-base-uncased", "", R"({"model_type": "distilbert"})"},
    {"FacebookAI/roberta-base", "",
     R"({"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1})"},
    {"openai-community/gpt2", "", R"({"model_type": "gpt2"})"},
    {"openai-community/gpt2-medium", "", R"({"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16})"},
    {"openai-community/gpt2-large", "", R"({"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20})"},
    {"openai-community/gpt2-xl", "", R"({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25})"},
    {"EleutherAI/gpt-j-6b", "gpt-j", R"({"model_type": "gptj"})"},
    {"EleutherAI/gpt-neox-20b", "gpt-neox", R"({"model_type": "gpt_neox"})"},
    {"facebook/opt-125m", "", R"({"model_type": "opt"})"},
    {"facebook/opt-1.3b", "",
     R"({"model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, )"
     R"("ffn_dim": 8192})"},
    {"facebook/opt-6.7b", "",
     R"({"model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, )"
     R"("ffn_dim": 16384})"},
    {"facebook/opt-30b", "",
     R"({"model_type": "opt", "hidden_size": 7168, "num_hidden_layers": 48, "num_attention_heads": 56, )"
     R"("ffn_dim": 28672})"},
    {"meta-llama/Llama-2-7b-hf", "llama-2-7b", R"({"model_type": "llama"})"},
    {"meta-llama/Llama-2-13b-hf", "llama-2-13b",
     R"({"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, )"
     R"("intermediate_size": 13824})"},
    {"meta-llama/Llama-2-70b-hf", "llama-2-70b",
     R"({"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, )"
     R"("num_key_value_heads": 8, "intermediate_size": 28672})"},
    {"meta-llama/Meta-Llama-3-8B", "llama-3-8b",
     R"({"model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8,
         "max_position_embeddings": 8192, "_cached_rotary_tables": true})"},
    {"meta-llama/Meta-Llama-3-70B", "llama-3-70b",
     R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80, )"
     R"("num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672})"},
    {"mistralai/Mistral-7B-v0.1", "mistral-7b", R"({"model_type": "mistral"})"},
    {"mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", R"({"model_type": "mixtral"})"},
    {"Qwen/Qwen2-0.5B", "",
     R"({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, )"
     R"("num_key_value_heads": 2, "intermediate_size": 4864})"},
    {"HuggingFaceTB/SmolLM2-135M", "",
     R"({"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, )"
     R"("num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536})"},
    {"HuggingFaceTB/SmolLM2-1.7B", "",
     R"({"model_type": "llama", "vocab_size": 49152, "hidden_size": 2048, "num_hidden_layers": 24, )"
     R"("num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192})"},
    {"google-t5/t5-small", "", R"({"model_type": "t5"})"},
    {"google-t5/t5-base", "",
     R"({"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12})"},
    {"bigscience/T0pp", "",
     R"({"model_type": "t5", "d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, )"
     R"("feed_forward_proj": "gated-gelu"})"},
    {"google/vit-base-patch16-224", "", R"({"model_type": "vit"})"},
    {"microsoft/resnet-50", "", R"({"model_type": "resnet"})"},
    {"timm/resnet18.a1_in1k", "", R"({"architecture": "resnet18"})"},
    {"timm/resnet50.a1_in1k", "resnet50", R"({"architecture": "resnet50"})"},
    {"timm/resnet101.a1_in1k", "resnet101", R"({"architecture": "resnet101"})"},
    {"HuggingFaceM4/idefics-80b-instruct", "",
     R"({"model_type": "idefics", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
         "intermediate_size": 22016, "additional_vocab_size": 2, "cross_layer_interval": 4,
         "qk_layer_norms": true, "use_resampler": true, "_cached_rotary_tables": true,
         "vision_config": {"embed_dim": 1280},
         "perceiver_config": {"qk_layer_norms_perceiver": true}})"},
};

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return std::tolower(c); });
  return result;
}

}  // namespace

const BuiltInModel* find_built_in(std::string_view name) {
  const std::string wanted = lower(name);
  for (const auto& model : kModels) {
    const std::string full = lower(model.name), aliases = " " + lower(model.aliases) + " ";
    if (wanted == full || wanted == full.substr(full.find('/') + 1) ||
        (!wanted.empty() && aliases.find(" " + wanted + " ") != std::string::npos))
      return &model;
  }
  return nullptr;
}

std::vector<std::string> built_in_names() {
  std::vector<std::string> names;
  for (const auto& model : kModels) {
    names.emplace_back(model.name);
    names.emplace_back(model.name.substr(model.name.find('/') + 1));
    std::istringstream aliases{std::string(model.aliases)};
    for (std::string alias; aliases >> alias;) names.push_back(alias);
  }
  return names;
}

}  // namespace bigmodel

std::vector<std::string> built_in_models() {
  std::vector<std::string> names;
  for (const auto& model : bigmodel::kModels) names.emplace_back(model.name);
  return names;
}

std::string built_in_config(const std::string& name) {
  const auto* model = bigmodel::find_built_in(name);
  return model ? std::string(model->config) : "";
}

}  // namespace accelerate
