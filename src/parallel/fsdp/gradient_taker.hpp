#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

namespace accelerate::parallel {

/// Called when backward has added the last contribution to a leaf's gradient.
class GradientTaker final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientTaker(std::function<void(const at::Tensor&)> take) : take_(std::move(take)) {}
  void operator()(const torch::autograd::Variable& leaf) override { take_(leaf); }

  static void attach(const at::Tensor& leaf, std::function<void(const at::Tensor&)> take) {
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<GradientTaker>(std::move(take)));
  }
  static void detach(const at::Tensor& leaf) { torch::autograd::impl::set_post_acc_grad_hooks(leaf, nullptr); }

 private:
  std::function<void(const at::Tensor&)> take_;
};

}  // namespace accelerate::parallel
