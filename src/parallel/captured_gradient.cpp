#include "parallel/captured_gradient.hpp"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "comm/group.hpp"
#include "parallel/replica_average.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

/// Autograd calls a leaf's hooks for what is captured there, too, but not those of the node that adds to grad().
class CapturedGradient::Hook final : public torch::autograd::FunctionPreHook {
 public:
  Hook(torch::autograd::Node* accumulator, std::weak_ptr<std::function<at::Tensor(const at::Tensor&)>> take)
      : accumulator_(accumulator), take_(std::move(take)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const auto take = take_.lock();  // the leaf keeps its hooks
    if (!take || at::GradMode::is_enabled() || !gradients.at(0).defined() || !is_captured()) return gradients;
    return {(*take)(gradients[0])};
  }

 private:
  bool is_captured() const {
    const auto* all = torch::autograd::get_current_graph_task_exec_info();
    if (!all) return false;
    const auto found = all->find(accumulator_);
    return found != all->end() && found->second.captures_ && !found->second.captures_->empty();
  }

  torch::autograd::Node* accumulator_;  ///< lives as long as `take_` does
  std::weak_ptr<std::function<at::Tensor(const at::Tensor&)>> take_;
};

CapturedGradient::CapturedGradient(const at::Tensor& leaf, std::function<at::Tensor(const at::Tensor&)> take)
    : take_(std::make_shared<std::function<at::Tensor(const at::Tensor&)>>(std::move(take))),
      accumulator_(torch::autograd::impl::grad_accumulator(leaf)) {
  torch::autograd::impl::add_hook(leaf, std::make_unique<Hook>(accumulator_.get(), take_));
}

at::Tensor average_of_captured(comm::Group& group, const std::string& name, const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided)
    raise<ConfigError>(
        "autograd::grad: found a sparse gradient of '{}', expected dense ones, which alone are averaged over ranks; "
        "make the embedding with sparse(false)",
        name);
  const at::Tensor average = gradient.detach().clone();
  group.guard("autograd::grad", [&] { average_in_place(group, {average}); });
  return average;
}

}  // namespace accelerate::parallel
