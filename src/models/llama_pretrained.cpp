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
  if (config.tie_word_embeddings)
    rules.ignored_suffixes.emplace_back("lm_head.weight"),
        rules.tied_to = "model.embed_tokens.weight";  // a copy of the embeddings
  return rules;
}

/// Fills an uninitialised model; what the files lack is initialised freshly.
void load_folder(torch::nn::Module& model, const LlamaConfig& config, const fs::path& folder,
                 const LlamaLoadOptions& options, LoadReport* report) {
  if (options.dtype) model.to(*options.dtype);
  auto found = load_pretrained(model, folder, rules(config));
  auto parameters = model.named_parameters();
  for (const auto& name : found.missing_keys) initialize(name, parameters[name], config);
  if (report) *report = std::move(found);
}

}  // namespace

LlamaModel LlamaModel::from_pretrained(const fs::path& folder, const LlamaLoadOptions& options, LoadReport* report) {
  const auto config = LlamaConfig::from_pretrained(folder);
  LlamaModel model(config, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

LlamaForCausalLM LlamaForCausalLM::from_pretrained(const fs::path& folder, const LlamaLoadOptions& options,
                                                   LoadReport* report) {
  const auto config = LlamaConfig::from_pretrained(folder);
  LlamaForCausalLM model(config, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
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
  const auto model = LlamaForCausalLM(config, Weights::uninitialized).ptr();
  return {.module = model,
          .rules = rules(config),
          .initialize = [config](const std::string& name,
                                 const at::Tensor& parameter) { initialize(name, parameter, config); },
          .causal = causal_forward(model),
          .max_positions = model->max_positions()};
}

}  // namespace accelerate::models
