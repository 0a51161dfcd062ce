#pragma once

#include <string>
#include <vector>

#include "accelerate/bigmodel/sizes.hpp"
#include "bigmodel/architectures/config.hpp"

/// One function per family, in a file of its own; the table that names them is in architectures.cpp.
namespace accelerate::bigmodel {

struct OutlinedArchitecture {
  ModuleTree tree;
  std::vector<std::string> no_split_module_classes;
  std::vector<std::string> keep_in_fp32_modules = {};
};

/// The differences within a family are the prefix of its class names, "Bert" or "Roberta", and the fields that the
/// config leaves out.
OutlinedArchitecture bert(const Config& config, const std::string& family);
OutlinedArchitecture distilbert(const Config& config, const std::string& family);
OutlinedArchitecture gpt2(const Config& config, const std::string& family);
OutlinedArchitecture gptj(const Config& config, const std::string& family);
OutlinedArchitecture gpt_neox(const Config& config, const std::string& family);
OutlinedArchitecture opt(const Config& config, const std::string& family);
/// LLaMA and those built like it: Mistral, Qwen2, Qwen3, Mixtral.
OutlinedArchitecture llama(const Config& config, const std::string& family);
OutlinedArchitecture t5(const Config& config, const std::string& family);
OutlinedArchitecture vit(const Config& config, const std::string& family);
OutlinedArchitecture resnet(const Config& config, const std::string& family);
OutlinedArchitecture idefics(const Config& config, const std::string& family);
OutlinedArchitecture timm_resnet(const Config& config, const std::string& family);

/// The module with the tables of rotary positions. A config with `_cached_rotary_tables` has them for all positions, as
/// transformers had until 4.40.
ModuleTree rotary_embedding(const Config& config, const std::string& class_name, int64_t head_dim);

}  // namespace accelerate::bigmodel
