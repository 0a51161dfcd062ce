#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/nn/module.h>

#include "accelerate/models/auto_model.hpp"
#include "models/json_file.hpp"

/// Saving as save_pretrained() of the Auto classes does it.
namespace accelerate::models {

/// What a folder has beside the weights, as it is where a model comes from.
struct PretrainedModel::Source {
  std::string config;                                 ///< config.json, of numbers: without quantization_config
  std::optional<std::string> generation_config;       ///< generation_config.json, where there is one
  std::optional<BnbQuantizationConfig> quantization;  ///< of weights that were loaded in few bits

  /// The model, as from_pretrained() and from_config() give it.
  template <class Model>
  static Model describe(Model model, std::shared_ptr<const Source> source, std::optional<DispatchedModel> dispatched) {
    PretrainedModel& described = model;
    described.source_ = std::move(source);
    described.dispatched_ = std::move(dispatched);
    return model;
  }
};

/// @param path  config.json, its folder or a .gguf file, of which `config` was read  @param module  that was built of
/// it
std::shared_ptr<PretrainedModel::Source> source_of(const std::filesystem::path& path, const JsonFile& config,
                                                   const torch::nn::Module& module);

/// The class of a module, without namespaces.
std::string class_of(const torch::nn::Module& module);

}  // namespace accelerate::models
