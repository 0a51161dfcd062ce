#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torch/nn/module.h>

#include "accelerate/models/auto_model.hpp"
#include "models/weights.hpp"

namespace accelerate::models {

/// An architecture for the Auto classes: a module without weights, and how to use it. Its file makes it.
struct Architecture {
  std::shared_ptr<torch::nn::Module> module;
  WeightRules rules;
  /// A fresh weight. @param name  Of the parameter.
  std::function<void(const std::string& name, at::Tensor parameter)> initialize;
  // One of these three.
  AutoModelForCausalLM::Forward causal;
  AutoModelForSeq2SeqLM::Encode encode;
  AutoModel::Forward forward;
  std::optional<int64_t> max_positions = {};             ///< of a causal one; unset: no end
  std::shared_ptr<PretrainedModel::Source> source = {};  ///< build() in auto_model.cpp sets it
};

/// @param config      The file config.json.
/// @param class_name  One of those that the table in auto_model.cpp names with this function.
/// @throws CheckpointError if a field is not valid.
using BuildArchitecture = Architecture (*)(const std::filesystem::path& config, const std::string& class_name);

Architecture build_bert(const std::filesystem::path& config, const std::string& class_name);
Architecture build_efficientnet_lite(const std::filesystem::path& config, const std::string& class_name);
Architecture build_gpt2(const std::filesystem::path& config, const std::string& class_name);
Architecture build_gptj(const std::filesystem::path& config, const std::string& class_name);
Architecture build_gpt_neox(const std::filesystem::path& config, const std::string& class_name);
Architecture build_llama(const std::filesystem::path& config, const std::string& class_name);
Architecture build_opt(const std::filesystem::path& config, const std::string& class_name);
Architecture build_resnet(const std::filesystem::path& config, const std::string& class_name);
Architecture build_t5(const std::filesystem::path& config, const std::string& class_name);
Architecture build_vit(const std::filesystem::path& config, const std::string& class_name);

/// Inputs by name, in this order; undefined where they are not given. @param required  So many of the first names must
/// be given.
/// @throws ConfigError for one that is missing, or that is not among the names.
std::vector<at::Tensor> take_inputs(const AutoModel::Tensors& inputs, const std::vector<std::string>& names,
                                    size_t required);

/// Wraps the forward of a causal language model's module.
template <class Module> AutoModelForCausalLM::Forward causal_forward(const std::shared_ptr<Module>& module) {
  return [module](const at::Tensor& input_ids, const at::Tensor& attention_mask, const at::Tensor& position_ids,
                  KeyValueCache* cache, int64_t logits_to_keep) {
    return module->forward(input_ids, attention_mask, position_ids, cache, logits_to_keep);
  };
}

/// initialize(), of a public configuration.
template <class Config> auto initialize_as(const Config& config) {
  return [config](const std::string& name, const at::Tensor& parameter) { initialize(name, parameter, config); };
}

/// Fresh weights for all of a module.
template <class Config> void initialize_all(torch::nn::Module& module, const Config& config) {
  for (const auto& item : module.named_parameters()) initialize(item.key(), item.value(), config);
}

/// A causal language model with a public configuration. @tparam Model  a module holder
template <class Model, class Config> Architecture causal_architecture(const Config& config, WeightRules rules) {
  const auto model = Model(config, Weights::uninitialized).ptr();
  return {.module = model,
          .rules = std::move(rules),
          .initialize = initialize_as(config),
          .causal = causal_forward(model),
          .max_positions = model->max_positions()};
}

/// Wraps the forward of an image classifier's module.
template <class Module> AutoModel::Forward image_forward(const std::shared_ptr<Module>& module) {
  return [module](const AutoModel::Tensors& inputs) {
    return AutoModel::Tensors{{"logits", module->forward(take_inputs(inputs, {"pixel_values"}, 1).front())}};
  };
}

/// The usual fresh weights: biases 0, norms 1, all else normal with this deviation.
std::function<void(const std::string&, at::Tensor)> initialize_normal(double deviation);

}  // namespace accelerate::models
