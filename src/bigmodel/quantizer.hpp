#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/codes/codes.hpp"
#include "bigmodel/loading_plan.hpp"

/// Dispatching with some weights in few bits.
namespace accelerate::bigmodel {

/// quant_method in a config.json whose weights are being replaced, by save_quantized_model().
inline constexpr const char* kUnfinished = "unfinished_save";

/// Checks a config.json's text: its weights are bitsandbytes', or not in few bits. Text that is no such thing passes.
/// @throws ConfigError naming another method, or that of an unfinished save
void refuse_other_methods(const std::string& config);

/// @throws ConfigError for a dtype that BnbQuantizationConfig::bnb_4bit_quant_storage can't be
void check_quant_storage(const char* caller, at::ScalarType dtype);

struct Quantizer {
  /// How a weight is encoded; none: it stays as it is. Empty: as none of all.
  std::function<std::optional<codes::EncodeOptions>(const LoadTarget&)> how;
  /// Weights that the checkpoint has in few bits stay so.
  bool keep_codes = false;
  /// See residency::EncodedWeight.
  std::optional<at::ScalarType> compute_dtype;
  double outlier_threshold = 0;
  bool exact = false;
  /// Dtypes of the weights of a model that has its values.
  std::function<at::ScalarType(const LoadTarget&)> dtype;
  /// As DeviceMapOptions, for maps that are worked out.
  std::map<std::string, std::string> special_dtypes;
  /// For a model that has its values: as in LoadAndDispatchOptions.
  std::optional<MaxMemory> max_memory;
  std::filesystem::path offload_folder;
};

/// load_checkpoint_and_dispatch() and dispatch_model() for `caller`. @param quantizer  null: nothing is in few bits
DispatchedModel load_and_dispatch(const char* caller, const ModelRef& model, const std::filesystem::path& checkpoint,
                                  const LoadAndDispatchOptions& options, const Quantizer* quantizer);
DispatchedModel dispatch(const char* caller, const ModelRef& model, const DeviceMap& map,
                         const DispatchOptions& options, const Quantizer* quantizer);
/// Bytes that weights in few bits take in memory, as products have them, by the names of the model that has its values.
std::map<std::string, int64_t> bytes_in_few_bits(const ModelRef& model, const Quantizer& quantizer);
/// The tree whose tensors of these names are so many bytes: for maps that count what will be held.
void count_bytes(ModuleTree& tree, const std::map<std::string, int64_t>& bytes);
/// A dtype of that size, for maps.
std::string dtype_of_size(at::ScalarType dtype);
/// The device on which weights compute that nobody gave a place.
ACCELERATE_API at::Device accelerator_or_host();

}  // namespace accelerate::bigmodel
