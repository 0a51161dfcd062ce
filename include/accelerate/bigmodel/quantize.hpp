#pragma once

/// Weights of linear layers in 8 or 4 bits, as bitsandbytes has them.
///
///     auto net = [] { auto empty = accelerate::init_empty_weights(); return BigModel(options); }();
///     const accelerate::BnbQuantizationConfig config{.load_in_4bit = true, .bnb_4bit_quant_type = "nf4"};
///     auto model = accelerate::load_and_quantize_model(net, config, "checkpoint");
///     auto out = model(input);  // or net->forward(input)
///     accelerate::save_quantized_model(net, config, "folder");
///
/// - No module is swapped: the weight of a `Linear` keeps its name, shape and identity; its bytes are codes (a home of
///   the residency engine, residency.hpp). Products with it, or with its transpose, are made from the codes; other
///   operators decode it for the moment (residency::Stats::decodes).
/// - Loading holds the codes and one tensor. Codes and files are bitsandbytes' (0.50, on CPUs), in both directions, and
///   so are products in 8 bits, and in 4 bits with exact_products; "cpu" and "disk" are places for codes like any
///   other, also in 4 bits.
/// - Such weights are frozen. Gradients flow through them to activations and biases.
/// - The result owns the codes: keep it as long as the model is used.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// How linear layers are quantized. Exactly one of load_in_8bit and load_in_4bit.
struct ACCELERATE_API BnbQuantizationConfig {
  /// LLM.int8(): a code of 8 bits per element, a scale per row; activations are rounded to 8 bits too.
  bool load_in_8bit = false;
  /// With load_in_8bit: columns of activations in which an element reaches it are multiplied in full precision.
  /// 0: none is. Left alone with load_in_4bit.
  double llm_int8_threshold = 6.0;
  /// 4 bits and a scale per block. Products round activations to 8 bits where a kernel computes on the codes (about
  /// half a percent of a product's norm), unless exact_products is set or a gradient is wanted.
  bool load_in_4bit = false;
  /// "fp4" or "nf4" (smaller errors on weights).
  std::string bnb_4bit_quant_type = "fp4";
  /// Scales in 8 bits: 0.37 bits less per element.
  bool bnb_4bit_use_double_quant = false;
  /// fp32, fp16 or bf16: with load_in_4bit, what activations are converted to for products, and results back.
  at::ScalarType bnb_4bit_compute_dtype = at::kHalf;
  /// As which dtype save_quantized_model() stores codes of 4 bits: uint8, or one whose size divides them.
  at::ScalarType bnb_4bit_quant_storage = at::kByte;
  /// Elements to a scale of 4-bit codes; the reference has always 64. 32 to 4096, a power of two.
  int64_t bnb_4bit_blocksize = 64;
  /// Of the weights before they are encoded, and of all that is not quantized. Default: float16 with load_in_8bit, else
  /// bnb_4bit_compute_dtype.
  std::optional<at::ScalarType> torch_dtype;
  /// Modules that stay as they are: names of modules ("lm_head"), or dotted paths. Default: what shares a weight with
  /// another module, and the model's last module, which is its head; of the base models of accelerate::models
  /// (BertModel …) without tied weights: none.
  std::optional<std::vector<std::string>> skip_modules;
  /// Modules that are not quantized either; with torch_dtype float16 they stay in float32.
  std::vector<std::string> keep_in_fp32_modules;
  /// Products with decoded weights only: no kernel that rounds activations for speed, no LLM.int8().
  bool exact_products = false;

  at::ScalarType loaded_dtype() const {
    return torch_dtype.value_or(load_in_8bit ? at::kHalf : bnb_4bit_compute_dtype);
  }
  /// @throws ConfigError naming the first field that can't be as it is
  void validate() const;

  /// `quantization_config` of a Hugging Face config.json, as transformers reads and writes it.
  std::string to_json() const;
  /// @param json  that object, or a whole config.json. @throws ConfigError for one without, another quant_method, or
  /// values that are not valid; of what bitsandbytes' offers and we have not (llm_int8_has_fp16_weight), by name
  static BnbQuantizationConfig from_json(const std::string& json);
};

struct LoadAndQuantizeOptions {
  /// A map, or a strategy of make_device_map(), which counts codes by their bits. Default: all on the accelerator, or
  /// on the host where there is none.
  std::optional<std::variant<std::string, DeviceMap>> device_map;
  std::vector<std::string> no_split_module_classes;
  std::optional<MaxMemory> max_memory;
  /// For codes of parts on "disk" (bitsandbytes' form, a file per weight, mapped), and for others as
  /// LoadAndDispatchOptions.
  std::filesystem::path offload_folder;
  /// As LoadCheckpointOptions.
  bool strict = true;
  OffloadOptions offload;
};

/// Quantizes the linear layers of a model while it is loaded.
/// @param weights_location  as check_state_dict(): safetensors, torch.save's, sharded, or a .gguf file. Weights that it
/// has in few bits already (saved by bitsandbytes, or GGUF's blocks) stay as they are. Empty: the model has its
/// weights, which are replaced after all of them have been looked at.
/// @throws ConfigError for a configuration that is not valid, for a folder whose config.json names another quant_method
/// (gptq, awq …), and for weights that can't be encoded (NaN, what fp16 can't hold with
/// load_in_8bit, what is in few bits already), by name;
/// otherwise as load_checkpoint_and_dispatch()
ACCELERATE_API DispatchedModel load_and_quantize_model(const ModelRef& model, const BnbQuantizationConfig& config,
                                                       const std::filesystem::path& weights_location = {},
                                                       const LoadAndQuantizeOptions& options = {});

template <ModelLike Model>
[[nodiscard]] Dispatched<Model> load_and_quantize_model(const Model& model, const BnbQuantizationConfig& config,
                                                        const std::filesystem::path& weights_location = {},
                                                        const LoadAndQuantizeOptions& options = {}) {
  return {model, load_and_quantize_model(ModelRef(model), config, weights_location, options)};
}

/// The paths of the modules that skip_modules stands for when it is not given.
ACCELERATE_API std::vector<std::string> get_keys_to_not_convert(const ModelRef& model);

/// Parameters and buffers as bitsandbytes' modules would save them: what is in few bits by its parts ("l.weight",
/// "l.weight.absmax" …), the rest as it is.
/// @param quant_storage  as BnbQuantizationConfig::bnb_4bit_quant_storage
/// @throws ConfigError for weights in GGUF's blocks, which this form has not
ACCELERATE_API std::map<std::string, at::Tensor> quantized_state_dict(const ModelRef& model,
                                                                      at::ScalarType quant_storage = at::kByte);

/// Writes model.safetensors with quantized_state_dict(), and `quantization_config` into the folder's config.json (made
/// if there is none; its other fields stay), so that transformers and load_and_quantize_model() load the folder. Each
/// file is replaced when its new one is whole. A process killed in between leaves a config.json with all its fields
/// whose quant_method, "unfinished_save", is refused by from_json() and by transformers.
/// @param config  with which the weights were encoded; modules that keep_in_fp32_modules kept are among those that the
/// folder says to skip
/// @throws ConfigError for a model without codes, or with other ones than `config` says; otherwise as
/// quantized_state_dict() and save_safetensors()
ACCELERATE_API void save_quantized_model(const ModelRef& model, const BnbQuantizationConfig& config,
                                         const std::filesystem::path& folder);

}  // namespace accelerate
