#pragma once

/// DeepSpeed's handles on what ZeRO splits: whole masters, gradients and optimizer states of a parameter, and
/// parameters that are whole for a while. They work with prepared models of any engine, by the module's own tensors
/// (`m->first->weight`). Names and meaning: deepspeed.utils, deepspeed.zero.GatheredParameters.
///
/// All are collective: every rank that trains the model calls them, for the same parameters in the same order.
/// @throws ConfigError for a tensor that is no parameter of a prepared model

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A copy of the whole parameter in fp32, from the master where there is one.
ACCELERATE_API at::Tensor safe_get_full_fp32_param(const at::Tensor& parameter);
/// The whole gradient in fp32 as backward has left it: averaged where the micro-step synchronised, times the loss
/// scale, not clipped. Undefined where backward has not reached the parameter on any rank.
ACCELERATE_API at::Tensor safe_get_full_grad(const at::Tensor& parameter);
/// A whole state of the prepared optimizer ("exp_avg", "momentum_buffer", …). Undefined before its first step, and for
/// one that the optimizer does not keep.
ACCELERATE_API at::Tensor safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state_key);

/// `value`: of the parameter's sizes, the same on all ranks. Modules compute with it from now on.
/// @throws ShapeError
ACCELERATE_API void safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
/// Between backward and step. @throws ConfigError where there is no gradient
ACCELERATE_API void safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value);
/// @throws ConfigError before the optimizer's first step, and for a state that it does not keep
ACCELERATE_API void safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value,
                                                  const std::string& state_key);

/// While it lives, parameters are whole: data_ptr(), copies, initialisation and the like work.
///
///     GatheredParameters whole({m->first->weight}, /*modifier_rank=*/0);
///     if (accelerator.is_main_process()) torch::nn::init::zeros_(m->first->weight);
///     whole.close();
///
/// With a modifier_rank that rank may change them, and close() makes its values those of all ranks; without one,
/// changes are lost. The end of the scope closes, too, unless it is left by an exception: all ranks reach it then.
class ACCELERATE_API GatheredParameters {
 public:
  explicit GatheredParameters(const std::vector<at::Tensor>& parameters, std::optional<int64_t> modifier_rank = {},
                              bool enabled = true);
  explicit GatheredParameters(const ModelRef& model, std::optional<int64_t> modifier_rank = {}, bool enabled = true);
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;
  ~GatheredParameters() noexcept(false);
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
