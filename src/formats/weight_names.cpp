#include "formats/weight_names.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace accelerate::formats {
namespace {

/// transformers 5 can write the head as other models have it.
std::string gpt_neox_name(const std::string& name) {
  return name == "embed_out.weight" ? "lm_head.weight" : name == "lm_head.weight" ? "embed_out.weight" : name;
}

/// The names that transformers 5 has in memory, and writes when it is asked to.
std::string vit_name(const std::string& name) {
  constexpr std::pair<std::string_view, std::string_view> kParts[] = {{"encoder.layer.", "layers."},
                                                                      {"attention.attention.query", "attention.q_proj"},
                                                                      {"attention.attention.key", "attention.k_proj"},
                                                                      {"attention.attention.value", "attention.v_proj"},
                                                                      {"attention.output.dense", "attention.o_proj"},
                                                                      {"intermediate.dense", "mlp.fc1"},
                                                                      {"output.dense", "mlp.fc2"}};
  auto other = name;
  for (const auto& [from, to] : kParts)
    if (const auto at = other.find(from); at != std::string::npos) other.replace(at, from.size(), to);
  return other;
}

constexpr WeightNames kNames[] = {{"bert", "Bert", "bert."},
                                  {"gpt2", "GPT2", "transformer."},
                                  {"gptj", "GPTJ", "transformer."},
                                  {"gpt_neox", "GPTNeoX", "gpt_neox.", gpt_neox_name},
                                  {"llama", "Llama", "model."},
                                  {"mistral", "Mistral", "model."},
                                  {"mixtral", "Mixtral", "model."},
                                  {"opt", "OPT", "model."},
                                  {"qwen2", "Qwen2", "model."},
                                  {"resnet", "ResNet", "resnet."},
                                  {"t5", "T5", ""},
                                  {"vit", "ViT", "vit.", vit_name}};

const WeightNames* found(const WeightNames* names) { return names == std::end(kNames) ? nullptr : names; }

/// Checkpoints that were converted from TensorFlow long ago call a layer norm's weight gamma and its bias beta.
std::string old_name(const std::string& name) {
  constexpr std::pair<std::string_view, const char*> kEndings[] = {{"LayerNorm.weight", "LayerNorm.gamma"},
                                                                   {"LayerNorm.bias", "LayerNorm.beta"}};
  for (const auto& [ending, old] : kEndings)
    if (name.ends_with(ending)) return name.substr(0, name.size() - ending.size()) + old;
  return name;
}

}  // namespace

const WeightNames* weight_names_of_class(std::string_view class_name) {
  return found(std::ranges::find_if(kNames, [&](const WeightNames& names) {
    return class_name.starts_with(names.classes) &&
           (class_name.ends_with("Model") || class_name.find("For") != class_name.npos);
  }));
}

const WeightNames* weight_names_of_type(std::string_view model_type) {
  return found(std::ranges::find_if(kNames, [&](const WeightNames& names) { return model_type == names.model_type; }));
}

std::vector<std::string> names_in_files(const WeightNames& names, const std::string& name) {
  std::vector<std::string> all = {name};
  const std::string_view base = names.base_prefix;
  all.push_back(name.starts_with(base) ? name.substr(base.size()) : names.base_prefix + name);
  for (size_t i = 0; i < 2; ++i) all.push_back(old_name(all[i]));
  if (names.other_name)
    for (size_t i = 0; i < 2; ++i) all.push_back(names.other_name(all[i]));
  return all;
}

bool is_worked_out(const std::string& name) {
  return std::ranges::any_of(
      std::array{"rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attn.embed_positions", ".attention.bias",
                 ".attention.masked_bias", ".crossattention.bias", ".crossattention.masked_bias",
                 "embeddings.position_ids", "EncDecAttention.relative_attention_bias.weight"},
      [&](const char* end) { return name.ends_with(end); });
}

}  // namespace accelerate::formats
