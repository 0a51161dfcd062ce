#pragma once

#include <torch/csrc/autograd/function.h>
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

/// Called right before backward adds to a leaf's gradient, as long as this lives. The leaf requires a gradient.
class BeforeGradient {
 public:
  BeforeGradient(const at::Tensor& leaf, std::function<void()> call)
      : call_(std::make_shared<std::function<void()>>(std::move(call))),
        accumulator_(torch::autograd::impl::grad_accumulator(leaf)) {
    accumulator_->add_pre_hook(std::make_unique<Hook>(call_));
  }

 private:
  class Hook final : public torch::autograd::FunctionPreHook {
   public:
    explicit Hook(std::weak_ptr<std::function<void()>> call) : call_(std::move(call)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
      if (const auto call = call_.lock()) (*call)();
      return gradients;
    }

   private:
    std::weak_ptr<std::function<void()>> call_;  // a graph may keep the node
  };

  std::shared_ptr<std::function<void()>> call_;
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator_;
};

}  // namespace accelerate::parallel
