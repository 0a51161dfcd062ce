#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "accelerate/models/pretrained.hpp"
#include "accelerate/residency/deferred.hpp"
#include "formats/weight_names.hpp"

namespace accelerate::models {

/// A scope in which what from_pretrained() and from_config() make has no memory, so that prepare() gives each rank its
/// pieces only, where ZeRO's stage 3 is active with zero3_init_flag (zero.Init of transformers). Null elsewhere, and
/// for .gguf files, which are decoded into memory.
/// @param source  what is read
std::unique_ptr<InitScope> zero3_init(const std::filesystem::path& source);

struct WeightRules {
  const formats::WeightNames* names = nullptr;  ///< null: names in files are the parameters'
  std::vector<std::string> head_prefixes;       ///< Parameters that may be missing from the files.
  std::vector<std::string> ignored_suffixes;    ///< Tensors of the files that are no parameters and not worth a report.
  std::string tied_to;  ///< Parameter that the head multiplies by, so that a head in the files must be the same; empty
                        ///< where it has weights of its own.
  bool ignore_mismatched_sizes = false;
  /// The name of such a parameter in other files, besides those of `names`; may be empty.
  std::function<std::string(const std::string& name)> other_name;

  /// The head multiplies by `embeddings`, of which files may have a copy as its weight.
  void tie(const std::string& head, std::string embeddings) {
    ignored_suffixes.push_back(head + ".weight");
    tied_to = std::move(embeddings);
  }
};

using ReadWeight = std::function<void(const std::string& name, at::Tensor target)>;

/// Copies tensors (as load_checkpoint_files maps them) into the module's parameters and buffers. Everything is checked
/// before the first byte is copied.
/// @param source  Name of the files, for messages.
/// @param read    Fills a parameter from the tensor of that name, where `tensors` have only shapes.
/// @throws CheckpointError listing every shape that differs, and every missing parameter that is not of a head.
LoadReport load_weights(torch::nn::Module& module, const std::map<std::string, at::Tensor>& tensors,
                        const WeightRules& rules, const std::string& source, const ReadWeight& read = nullptr);

/// The same from a folder of safetensors, or from a .gguf file, which is decoded into the parameters' own memory.
/// @throws CheckpointError
LoadReport load_pretrained(torch::nn::Module& module, const std::filesystem::path& source, const WeightRules& rules);

/// load_pretrained() into an uninitialised model; `initialize` makes the parameters that the files lack.
void load_folder(torch::nn::Module& module, const std::filesystem::path& source, const WeightRules& rules,
                 const std::function<void(const std::string& name, at::Tensor parameter)>& initialize,
                 LoadReport* report);

/// Parameters and buffers by name, without a copy.
std::map<std::string, at::Tensor> named_weights(const torch::nn::Module& module);

/// Writes model.safetensors and config.json into a folder that is created where it is missing. @param config  The
/// latter's text, for the weights' dtype (e.g. "float32"). @param weights  all of the module's, its own or others
/// @throws CheckpointError, ResourceError
void save_folder(const torch::nn::Module& module, const std::map<std::string, at::Tensor>& weights,
                 const std::filesystem::path& folder,
                 const std::function<std::string(const std::string& dtype)>& config);

}  // namespace accelerate::models
