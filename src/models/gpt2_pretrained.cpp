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
  if (config.tie_word_embeddings) rules.tie("lm_head", "transformer.wte.weight");
  return rules;
}

template <class Model> Model load_gpt2(const fs::path& folder, LoadReport* report) {
  const auto config = GPT2Config::from_pretrained(folder);
  const auto empty = zero3_init(folder);
  Model model(config, Weights::uninitialized);
  load_folder(*model, folder, rules(config), initialize_as(config), report);
  return model;
}

}  // namespace

GPT2Model GPT2Model::from_pretrained(const fs::path& folder, LoadReport* report) {
  return load_gpt2<GPT2Model>(folder, report);
}
GPT2LMHeadModel GPT2LMHeadModel::from_pretrained(const fs::path& folder, LoadReport* report) {
  return load_gpt2<GPT2LMHeadModel>(folder, report);
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
  return causal_architecture<GPT2LMHeadModel>(config, rules(config));
}

}  // namespace accelerate::models
