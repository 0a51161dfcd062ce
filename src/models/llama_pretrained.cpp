#include <torch/torch.h>

#include "accelerate/models/llama.hpp"
#include "models/architecture.hpp"
#include "models/llama_config.hpp"
#include "models/weights.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

WeightRules rules(const LlamaConfig& config) {
  WeightRules rules{
      .names = formats::weight_names_of_type("llama"),
      .head_prefixes = {"lm_head."},
      .ignored_suffixes = {"rotary_emb.inv_freq"}};  // worked out from the configuration; old files have it
  if (config.tie_word_embeddings) rules.tie("lm_head", "model.embed_tokens.weight");
  return rules;
}

template <class Model> Model load_llama(const fs::path& folder, const LlamaLoadOptions& options, LoadReport* report) {
  const auto config = LlamaConfig::from_pretrained(folder);
  const auto empty = zero3_init(folder);
  Model model(config, Weights::uninitialized);
  if (options.dtype) model->to(*options.dtype);
  load_folder(*model, folder, rules(config), initialize_as(config), report);
  return model;
}

}  // namespace

LlamaModel LlamaModel::from_pretrained(const fs::path& folder, const LlamaLoadOptions& options, LoadReport* report) {
  return load_llama<LlamaModel>(folder, options, report);
}
LlamaForCausalLM LlamaForCausalLM::from_pretrained(const fs::path& folder, const LlamaLoadOptions& options,
                                                   LoadReport* report) {
  return load_llama<LlamaForCausalLM>(folder, options, report);
}

void LlamaModelImpl::save_pretrained(const fs::path& folder) const { save_pretrained(folder, named_weights(*this)); }
void LlamaModelImpl::save_pretrained(const fs::path& folder, const std::map<std::string, at::Tensor>& weights) const {
  save_folder(*this, weights, folder,
              [&](const std::string& dtype) { return to_json(config_, config_.family() + "Model", dtype); });
}
void LlamaForCausalLMImpl::save_pretrained(const fs::path& folder) const {
  save_pretrained(folder, named_weights(*this));
}
void LlamaForCausalLMImpl::save_pretrained(const fs::path& folder,
                                           const std::map<std::string, at::Tensor>& weights) const {
  save_folder(*this, weights, folder,
              [&](const std::string& dtype) { return to_json(config_, config_.family() + "ForCausalLM", dtype); });
}

Architecture build_llama(const fs::path& path, const std::string&) {
  const auto config = LlamaConfig::from_pretrained(path);
  return causal_architecture<LlamaForCausalLM>(config, rules(config));
}

}  // namespace accelerate::models
