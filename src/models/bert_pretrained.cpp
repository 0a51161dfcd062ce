#include <torch/torch.h>

#include "accelerate/models/bert.hpp"
#include "accelerate/safetensors.hpp"
#include "models/bert_config.hpp"
#include "models/weights.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

/// Fills an uninitialised model; what the files lack is initialised freshly.
void load_folder(torch::nn::Module& model, const BertConfig& config, const fs::path& folder, const BertLoadOptions& options, LoadReport* report) {
  const WeightRules rules{.base_prefix = "bert.",
                          .head_prefixes = {"classifier.", "bert.pooler.", "pooler."},
                          .ignored_suffixes = {"embeddings.position_ids"},  // 0, 1, 2, ... in old files
                          .ignore_mismatched_sizes = options.ignore_mismatched_sizes};
  auto found = load_weights(model, load_checkpoint_files(folder), rules, folder.string());
  auto parameters = model.named_parameters();
  for (const auto* names : {&found.missing_keys, &found.mismatched_keys})
    for (const auto& name : *names) initialize(name, parameters[name], config);
  if (report) *report = std::move(found);
}

}  // namespace

BertModel BertModel::from_pretrained(const fs::path& folder, const BertLoadOptions& options, LoadReport* report) {
  const auto config = BertConfig::from_pretrained(folder);
  BertModel model(config, BertModelOptions{.add_pooling_layer = options.add_pooling_layer}, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

BertForSequenceClassification BertForSequenceClassification::from_pretrained(const fs::path& folder, const BertLoadOptions& options, LoadReport* report) {
  auto config = BertConfig::from_pretrained(folder);
  if (options.num_labels) config.set_num_labels(*options.num_labels);
  BertForSequenceClassification model(config, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

void BertModelImpl::save_pretrained(const fs::path& folder) const { save_folder(*this, folder, [&](const std::string& dtype) { return to_json(config_, "BertModel", dtype); }); }
void BertForSequenceClassificationImpl::save_pretrained(const fs::path& folder) const { save_folder(*this, folder, [&](const std::string& dtype) { return to_json(config_, "BertForSequenceClassification", dtype); }); }

}  // namespace accelerate::models
