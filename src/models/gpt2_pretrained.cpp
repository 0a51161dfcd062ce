#include <torch/torch.h>

#include "accelerate/models/gpt2.hpp"
#include "models/gpt2_config.hpp"
#include "models/weights.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

/// Fills an uninitialised model; what the files lack is initialised freshly.
void load_folder(torch::nn::Module& model, const GPT2Config& config, const fs::path& folder, LoadReport* report) {
  const WeightRules rules{.base_prefix = "transformer.",
                          .head_prefixes = {"lm_head."},
                          .ignored_suffixes = {".attn.bias", ".attn.masked_bias"},  // the causal mask, which old files have
                          .ignore_mismatched_sizes = false};
  auto found = load_pretrained(model, folder, rules);
  auto parameters = model.named_parameters();
  for (const auto& name : found.missing_keys) initialize(name, parameters[name], config);
  if (config.tie_word_embeddings) std::erase(found.unexpected_keys, "lm_head.weight");  // a copy of the embeddings
  if (report) *report = std::move(found);
}

}  // namespace

GPT2Model GPT2Model::from_pretrained(const fs::path& folder, LoadReport* report) {
  const auto config = GPT2Config::from_pretrained(folder);
  GPT2Model model(config, Weights::uninitialized);
  load_folder(*model, config, folder, report);
  return model;
}

GPT2LMHeadModel GPT2LMHeadModel::from_pretrained(const fs::path& folder, LoadReport* report) {
  const auto config = GPT2Config::from_pretrained(folder);
  GPT2LMHeadModel model(config, Weights::uninitialized);
  load_folder(*model, config, folder, report);
  return model;
}

void GPT2ModelImpl::save_pretrained(const fs::path& folder) const {
  save_folder(*this, folder, [&](const std::string& dtype) { return to_json(config_, "GPT2Model", dtype); });
}
void GPT2LMHeadModelImpl::save_pretrained(const fs::path& folder) const {
  save_folder(*this, folder, [&](const std::string& dtype) { return to_json(config_, "GPT2LMHeadModel", dtype); });
}

}  // namespace accelerate::models
