#pragma once

/// How much memory a model needs, from its config.json or the header of its files: what `accelerate estimate-memory`
/// prints. No weight is read, and no LibTorch is needed.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/bigmodel/sizes.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The sizes of weights in few bits as they lie in their files, scales included.
struct StoredSizes {
  std::string encoding;  ///< "nf4", "int8", "fp4 and int8" of both, or of a .gguf file what most bytes are, "Q4_1"
  double largest_layer = 0, total = 0;  ///< bytes
};

/// A model by its structure.
struct ModelDescription {
  std::string name;     ///< the name that was asked for
  std::string library;  ///< "transformers", "timm", or "" for a structure read from weights
  std::string source;   ///< the file that it was read from, or "built in"
  ModuleTree tree;
  std::vector<std::string> no_split_module_classes;  ///< the library's own for this class
  /// Names of modules that transformers never has in few bits (its `_keep_in_fp32_modules`): "wo" of T5.
  std::vector<std::string> keep_in_fp32_modules;
  /// Of .gguf files with blocks, and of safetensors with codes of bitsandbytes, by what their headers name.
  std::optional<StoredSizes> stored;
};

/// The architectures that describe_architecture() knows, by their `model_type` (timm's by `architecture`).
ACCELERATE_API std::vector<std::string> known_architectures();

/// The model that a config.json (its text) describes, as `AutoModel.from_config` of transformers 5 or `create_model` of
/// timm would build it in fp32, buffers included. Fields that the config leaves out have the library's default. Weights
/// that a model always shares are one, also where the reference's command counts each of their names (T5's embedding).
/// @param class_name  another class than AutoModel's, with a language model's head: "GPT2LMHeadModel",
/// "LlamaForCausalLM", ... The head is not tied to the embedding, as without weights.
/// @throws ConfigError for an architecture or class that is not known, naming the nearest; CheckpointError for text
/// that is no JSON or fields of another type.
ACCELERATE_API ModelDescription describe_architecture(const std::string& config, const std::string& class_name = "");

/// Finds a model by what the user calls it: a folder (config.json, else the weights in it), a config.json, a file of
/// weights (safetensors, GGUF, torch.save's) or its index, a TorchScript file, or the name of a built-in config like
/// "bert-base-cased". Of files only headers are read. A structure read from weights has its floating-point tensors in
/// fp32, as one built from a config has; all its tensors are parameters, buffers too; and only TorchScript says of
/// which classes its modules are.
/// @param library  "transformers", "timm" or "" for whichever it is
/// @throws ConfigError for a name that is neither, with the nearest built-in one, for a model of another library, and
/// for weights beside a quantization_config that is damaged or another library's; CheckpointError for damaged files.
ACCELERATE_API ModelDescription find_model(const std::string& model, const std::string& library = "");

/// The names of the built-in configs.
ACCELERATE_API std::vector<std::string> built_in_models();
/// The sizes in the config.json of a built-in model, or "" for another name.
ACCELERATE_API std::string built_in_config(const std::string& name);

/// Bytes to train with Adam and a batch of one; -1 where a dtype can't be trained in.
struct ACCELERATE_API TrainingUsage {
  double model = -1, gradients = -1, optimizer = -1, step = -1;
  /// The highest of the four, or -1.
  double peak() const;
};

/// @param bytes  of the model in fp32
/// @param mixed_precision  "float32", "float16", "bfloat16", "fp8"; others can't be trained in
ACCELERATE_API TrainingUsage estimate_training_usage(double bytes, const std::string& mixed_precision);

/// One line of the table.
struct MemoryEstimate {
  std::string dtype;
  double largest_layer = 0, total = 0;  ///< bytes
  TrainingUsage training;
};

/// @param dtypes  of float32, float16, int8, int4. @throws ConfigError for another.
ACCELERATE_API std::vector<MemoryEstimate> estimate_memory(const MaximumSizes& sizes,
                                                           const std::vector<std::string>& dtypes);

/// The reference's table in box characters, without a newline at the end.
ACCELERATE_API std::string memory_table(const std::string& model, const std::vector<MemoryEstimate>& estimates);

}  // namespace accelerate
