#include <torch/torch.h>

#include "accelerate/models/gpt2.hpp"
#include "models/architecture.hpp"
#include "models/gpt2_config.hpp"
#include "models/weights.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

WeightRules rules(const GPT2Config& config) {
  WeightRules rules{.names = formats::weight_names_of_type("gpt2"),
                    .head_prefixes = {"lm_head."},
                    .ignored_suffixes = {".attn.bias", ".attn.masked_bias"}};  // the causal mask, which old files have
  if (config.tie_word_embeddings)
    rules.ignored_suffixes.emplace_back("lm_head.weight"),
        rules.tied_to = "transformer.wte.weight";  // a copy of the embeddings
  return rules;
}

/// Fills an uninitialised model; what the files lack is initialised freshly.
void load_folder(torch::nn::Module& model, const GPT2Config& config, const fs::path& folder, LoadReport* report) {
  auto found = load_pretrained(model, folder, rules(config));
  auto parameters = model.named_parameters();
  for (const auto& name : found.missing_keys) initialize(name, parameters[name], config);
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

void GPT2ModelImpl::save_pretrained(const fs::path& folder) const { save_pretrained(folder, named_weights(*this)); }
void GPT2ModelImpl::save_pretrained(const fs::path& folder, const std::map<std::string, at::Tensor>& weights) const {
  save_folder(*this, weights, folder, [&](const std::string& dtype) { return to_json(config_, "GPT2Model", dtype); });
}
void GPT2LMHeadModelImpl::save_pretrained(const fs::path& folder) const {
  save_pretrained(folder, named_weights(*this));
}
void GPT2LMHeadModelImpl::save_pretrained(const fs::path& folder,
                                          const std::map<std::string, at::Tensor>& weights) const {
  save_folder(*this, weights, folder,
              [&](const std::string& dtype) { return to_json(config_, "GPT2LMHeadModel", dtype); });
}

Architecture build_gpt2(const fs::path& path, const std::string&) {
  const auto config = GPT2Config::from_pretrained(path);
  const auto model = GPT2LMHeadModel(config, Weights::uninitialized).ptr();
  return {.module = model,
          .rules = rules(config),
          .initialize = [config](const std::string& name,
                                 const at::Tensor& parameter) { initialize(name, parameter, config); },
          .causal = causal_forward(model),
          .max_positions = model->max_positions()};
}

}  // namespace accelerate::models
