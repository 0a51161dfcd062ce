#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <memory>

/// LibTorch's Adam and AdamW as DeepSpeed's Adam for the host: moments are fp32 also of parameters in 16 bits, and a
/// step is computed in fp32 and rounded once. The program's object stays the one that steps, with its groups, its
/// states and the schedules that drive it: only the class of its groups' options says so.
namespace accelerate::optim {

template <class Options> struct WithFp32Moments final : Options {
  explicit WithFp32Moments(const Options& options) : Options(options) {}

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<WithFp32Moments>(*this);
  }
};

inline bool has_fp32_moments(const torch::optim::OptimizerOptions& options) {
  return dynamic_cast<const WithFp32Moments<torch::optim::AdamOptions>*>(&options) ||
         dynamic_cast<const WithFp32Moments<torch::optim::AdamWOptions>*>(&options);
}
bool has_fp32_moments(const torch::optim::Optimizer& optimizer);
/// The dtype of the moments of a parameter, in a group with these options.
inline at::ScalarType moment_type(const torch::optim::OptimizerOptions& options, const at::Tensor& parameter) {
  const auto type = parameter.scalar_type();
  return at::isReducedFloatingType(type) && has_fp32_moments(options) ? at::kFloat : type;
}

/// Whether it is of one of the two classes, and not of one derived from them.
bool can_have_fp32_moments(const torch::optim::Optimizer& optimizer);
/// All its groups, those that have it already too. States that are there take the type. Nothing for other classes.
/// @return whether any group hadn't
bool give_fp32_moments(torch::optim::Optimizer& optimizer);
/// A step by operators, where no kernel takes it. Nothing, and false, for an optimizer without such moments.
bool step_with_fp32_moments(torch::optim::Optimizer& optimizer);

}  // namespace accelerate::optim
