#include <torch/torch.h>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/models/bert.hpp"
#include "models/architecture.hpp"
#include "models/bert_config.hpp"
#include "models/weights.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

WeightRules rules(bool ignore_mismatched_sizes = false) {
  return {.names = formats::weight_names_of_type("bert"),
          .head_prefixes = {"classifier.", "bert.pooler.", "pooler."},
          .ignored_suffixes = {"embeddings.position_ids"},  // 0, 1, 2, ... in old files
          .ignore_mismatched_sizes = ignore_mismatched_sizes};
}

/// Fills an uninitialised model; what the files lack is initialised freshly.
void load_folder(torch::nn::Module& model, const BertConfig& config, const fs::path& folder,
                 const BertLoadOptions& options, LoadReport* report) {
  auto found =
      load_weights(model, load_checkpoint_files(folder), rules(options.ignore_mismatched_sizes), folder.string());
  auto parameters = model.named_parameters();
  for (const auto* names : {&found.missing_keys, &found.mismatched_keys})
    for (const auto& name : *names) initialize(name, parameters[name], config);
  if (report) *report = std::move(found);
}

}  // namespace

BertModel BertModel::from_pretrained(const fs::path& folder, const BertLoadOptions& options, LoadReport* report) {
  const auto config = BertConfig::from_pretrained(folder);
  const auto empty = zero3_init(folder);
  BertModel model(config, BertModelOptions{.add_pooling_layer = options.add_pooling_layer}, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

BertForSequenceClassification BertForSequenceClassification::from_pretrained(const fs::path& folder,
                                                                             const BertLoadOptions& options,
                                                                             LoadReport* report) {
  auto config = BertConfig::from_pretrained(folder);
  if (options.num_labels) config.set_num_labels(*options.num_labels);
  const auto empty = zero3_init(folder);
  BertForSequenceClassification model(config, Weights::uninitialized);
  load_folder(*model, config, folder, options, report);
  return model;
}

void BertModelImpl::save_pretrained(const fs::path& folder) const { save_pretrained(folder, named_weights(*this)); }
void BertModelImpl::save_pretrained(const fs::path& folder, const std::map<std::string, at::Tensor>& weights) const {
  save_folder(*this, weights, folder, [&](const std::string& dtype) { return to_json(config_, "BertModel", dtype); });
}
void BertForSequenceClassificationImpl::save_pretrained(const fs::path& folder) const {
  save_pretrained(folder, named_weights(*this));
}
void BertForSequenceClassificationImpl::save_pretrained(const fs::path& folder,
                                                        const std::map<std::string, at::Tensor>& weights) const {
  save_folder(*this, weights, folder,
              [&](const std::string& dtype) { return to_json(config_, "BertForSequenceClassification", dtype); });
}

Architecture build_bert(const fs::path& path, const std::string& class_name) {
  const auto config = BertConfig::from_pretrained(path);
  Architecture result{.module = nullptr,
                      .rules = rules(),
                      .initialize = [config](const std::string& name, const at::Tensor& parameter) {
                        initialize(name, parameter, config);
                      }};
  const auto take = [](const AutoModel::Tensors& inputs) {
    return take_inputs(inputs, {"input_ids", "attention_mask", "token_type_ids"}, 1);
  };
  if (class_name == "BertForSequenceClassification") {
    const auto model = BertForSequenceClassification(config, Weights::uninitialized).ptr();
    result.module = model;
    result.forward = [model, take](const AutoModel::Tensors& inputs) {
      const auto given = take(inputs);
      return AutoModel::Tensors{{"logits", model->forward(given[0], given[1], given[2])}};
    };
  } else {
    const auto model = BertModel(config, BertModelOptions{}, Weights::uninitialized).ptr();
    result.module = model;
    result.forward = [model, take](const AutoModel::Tensors& inputs) {
      const auto given = take(inputs);
      const auto output = model->forward(given[0], given[1], given[2]);
      return AutoModel::Tensors{{"last_hidden_state", output.last_hidden_state},
                                {"pooler_output", output.pooler_output}};
    };
  }
  return result;
}

}  // namespace accelerate::models
