#pragma once

/// Handlers for mixed_precision "fp8": which products are computed in 8 bits, and with which scales. The three back
/// ends of the reference are three recipes here, all of which this library computes by itself (docs/fp8.md).
///
///     Accelerator accelerator({.mixed_precision = "fp8", .kwargs_handlers = {TERecipeKwargs{.margin = 1}}});
///
/// Fields that are left out come from the environment that `accelerate launch --fp8_…` sets, else from the default.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs_dict.hpp"

namespace accelerate {

/// The library whose recipe it is: torchao's (scales of the tensors as they are now), Transformer Engine's (scales from
/// the past, or of blocks), MS-AMP's. NO: no fp8.
enum class FP8BackendType { NO, TE, MSAMP, AO };
/// "NO", "TE", "MSAMP", "AO".
ACCELERATE_API const char* to_string(FP8BackendType type);
/// In any case. @throws ConfigError naming the valid ones.
ACCELERATE_API FP8BackendType fp8_backend_from_string(const std::string& text);

/// torchao's settings as far as they change what is computed.
struct Float8LinearConfig {
  /// "tensorwise": one scale for a tensor. "rowwise": one for each row of the left and each column of the right matrix
  /// of a product. "rowwise_with_gw_hp": rowwise, and gradients of weights in high precision.
  std::string recipe = "tensorwise";
  /// As the fields of AORecipeKwargs.
  bool enable_fsdp_float8_all_gather = false;
  bool pad_inner_dim = false;

  bool operator==(const Float8LinearConfig&) const = default;
};

/// Which weights compute in fp8. @param module  the parameter's name without ".weight" @param weight  2-D, its values
/// may be missing (sharded models, deferred ones)
using FP8ModuleFilter = std::function<bool(const std::string& module, const at::Tensor& weight)>;

/// torchao's: each tensor is scaled by its own largest value. The first and the last linear layer of the model, and
/// those of whose sizes one is no multiple of 16, compute as without fp8.
struct AORecipeKwargs {
  /// Unset: tensorwise, with the last two fields. A field that says something else than config is an error.
  std::optional<Float8LinearConfig> config;
  /// In the place of the rule about first and last layers; sizes must be multiples of 16 anyway.
  FP8ModuleFilter module_filter_func;
  /// Products with an inner size that is no multiple of 16 (gradients of weights: the number of rows) are filled up
  /// with zeros. Off: they are errors. ACCELERATE_FP8_PAD_INNER_DIM, else true.
  std::optional<bool> pad_inner_dim;
  /// Sharded weights that compute in fp8 travel as fp8, in half the bytes of bf16. Scales are then those of the whole
  /// weights. ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER, else true; of no effect where models are not sharded, and
  /// where ranks share memory, so that nothing travels.
  std::optional<bool> enable_fsdp_float8_all_gather;
};

/// Transformer Engine's delayed scaling: a tensor is scaled by the largest values of its past; or its MXFP8.
struct TERecipeKwargs {
  /// fp8 also where the model is in evaluation mode. ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL, else false.
  std::optional<bool> use_autocast_during_eval;
  /// Scales are divided by 2^margin, against values that are larger than those before. ACCELERATE_FP8_MARGIN, else 0.
  std::optional<int64_t> margin;
  /// Forwards between new scales, at least 1. ACCELERATE_FP8_INTERVAL, else 1.
  std::optional<int64_t> interval;
  /// "HYBRID" (E4M3 in forward, E5M2 for gradients), "E4M3", or "E5M2", which Transformer Engine refuses to train with;
  /// in any case. ACCELERATE_FP8_FORMAT, else HYBRID.
  std::optional<std::string> fp8_format;
  /// How many steps' largest values are remembered, at least 1. ACCELERATE_FP8_AMAX_HISTORY_LEN, else 1024.
  std::optional<int64_t> amax_history_len;
  /// "most_recent" or "max": which of them counts; in any case. ACCELERATE_FP8_AMAX_COMPUTE_ALGO, else most_recent.
  std::optional<std::string> amax_compute_algo;
  /// Whether forward products, gradients of inputs, and gradients of weights are computed in high precision.
  /// ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD, _WGRAD, else none.
  std::optional<std::array<bool, 3>> override_linear_precision;
  /// Blocks of 32 values along the inner size of a product share a power of two as their scale; nothing is remembered.
  /// ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING, else false.
  std::optional<bool> use_mxfp8_block_scaling;
};

/// MS-AMP's, which is deprecated: fp8 products, and gradients that travel as fp8 between the ranks of data parallelism.
struct MSAMPRecipeKwargs {
  /// "O1" or "O2". ACCELERATE_FP8_OPT_LEVEL, else O2.
  std::optional<std::string> opt_level;
};

/// Deprecated: TERecipeKwargs or MSAMPRecipeKwargs by `backend`. A field of the other one that says something is an
/// error.
struct FP8RecipeKwargs {
  // As in TERecipeKwargs.
  std::optional<bool> use_autocast_during_eval;
  std::optional<int64_t> margin;
  std::optional<int64_t> interval;
  std::optional<std::string> fp8_format;
  std::optional<int64_t> amax_history_len;
  std::optional<std::string> amax_compute_algo;
  std::optional<std::array<bool, 3>> override_linear_precision;
  std::optional<bool> use_mxfp8_block_scaling;
  // As in MSAMPRecipeKwargs.
  std::optional<std::string> opt_level;
  /// "MSAMP" or "TE", in any case. ACCELERATE_FP8_BACKEND, else TE.
  std::optional<std::string> backend;
};

/// The handler with all fields decided, names in upper (formats, back ends) or lower case (the rest), as in the
/// reference. A deprecated one warns, once in a process. @throws ConfigError for values that are not among the valid
/// ones, and for settings that contradict each other.
ACCELERATE_API AORecipeKwargs resolve(AORecipeKwargs kwargs);
ACCELERATE_API TERecipeKwargs resolve(TERecipeKwargs kwargs);
ACCELERATE_API MSAMPRecipeKwargs resolve(MSAMPRecipeKwargs kwargs);
ACCELERATE_API FP8RecipeKwargs resolve(FP8RecipeKwargs kwargs);

/// All fields by the names that the reference passes on; of a module filter nothing, and of a config its recipe's name.
ACCELERATE_API KwargsDict to_dict(const AORecipeKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const TERecipeKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const MSAMPRecipeKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const FP8RecipeKwargs& kwargs);

}  // namespace accelerate
