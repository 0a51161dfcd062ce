#pragma once

/// A model that `prepare` has taken, whatever its type.

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/utils/core_kwargs.hpp"

namespace accelerate::parallel {
struct DeepSpeedFiles;  // src/parallel/deepspeed_files.hpp
}  // namespace accelerate::parallel

namespace accelerate {
class FP8Training;  // accelerate/precision/fp8.hpp
}  // namespace accelerate

namespace accelerate::detail {

/// Shared by all handles on one prepared model.
struct PreparedModel {
  ModelRef model;
  std::shared_ptr<parallel::Engine> engine;  ///< null alone and for evaluation
  at::DeviceType device_type = at::kCPU;
  std::optional<at::ScalarType> autocast_dtype;
  AutocastKwargs autocast;
  std::optional<at::ScalarType> input_dtype;   ///< floating-point inputs are converted to it
  std::optional<at::ScalarType> output_dtype;  ///< floating-point results are, instead of to fp32 under autocast
  std::shared_ptr<FP8Training> fp8 = {};       ///< null: no product in 8 bits
  std::shared_ptr<const void> owner = {};      ///< of the weights: what dispatching returned, if that was prepared
  /// How checkpoints of a model that DeepSpeed's settings train are written; null: it is none.
  std::shared_ptr<const parallel::DeepSpeedFiles> deepspeed = {};
  int64_t fp8_codes_of = -1;  ///< which values of the weights the codes are of that micro-steps share
};

}  // namespace accelerate::detail
