#include <torch/torch.h>

#include "accelerate/models/llama.hpp"
#include "models/llama_config.hpp"
#include "models/weights.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

/// Fills an uninitialised model; what the files lack is initialised freshly.
void load_folder(torch::nn::Module& model, const LlamaConfig& config, const fs::path& folder, const LlamaLoadOptions& options, LoadReport* report) {
  if (options.dtype) model.to(*options.dtype);
  const WeightRules rules{.base_prefix = "model.",
                          .head_prefixes = {"lm_head."},
                          .ignored_suffixes = {"rotary_emb.inv_freq"},  // worked out from the configuration; old files have it
                          .ignore_mismatched_sizes = false};
  auto found = load_pretrained(model, folder, rules);
  auto parameters = model.named_parameters();
  for (const auto& name : found.missing_keys) initialize(name, parameters[name], config);
  if (config.tie_word_embeddings) std::erase(found.unexpected_keys, "lm_head.weight");  // a copy of the embeddings
  if (report) *report = std::move(found);
}

}  // namespace

LlamaModel LlamaModel::from_pretrained(const fs::path& folder, const LlamaLoadOptions& options, LoadReport* report) {
  const auto config = LlamaConfig::from_pretrained(folder);
  LlamaModel model(config, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

LlamaForCausalLM LlamaForCausalLM::from_pretrained(const fs::path& folder, const LlamaLoadOptions& options, LoadReport* report) {
  const auto config = LlamaConfig::from_pretrained(folder);
  LlamaForCausalLM model(config, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

void LlamaModelImpl::save_pretrained(const fs::path& folder) const {
  save_folder(*this, folder, [&](const std::string& dtype) { return to_json(config_, "LlamaModel", dtype); });
}
void LlamaForCausalLMImpl::save_pretrained(const fs::path& folder) const {
  save_folder(*this, folder, [&](const std::string& dtype) { return to_json(config_, "LlamaForCausalLM", dtype); });
}

}  // namespace accelerate::models
