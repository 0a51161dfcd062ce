#include "parallel/captured_gradient.hpp"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "comm/group.hpp"
#include "parallel/replica_average.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// The backward that runs hands over what comes to this node, which adds to nothing.
bool is_captured(torch::autograd::Node* accumulator) {
  const auto* all = torch::autograd::get_current_graph_task_exec_info();
  if (!all) return false;
  const auto found = all->find(accumulator);
  return found != all->end() && found->second.captures_ && !found->second.captures_->empty();
}

}  // namespace

CapturedGradient::CapturedGradient(const at::Tensor& leaf, Take take)
    : take_(std::make_shared<Take>(std::move(take))), accumulator_(torch::autograd::impl::grad_accumulator(leaf)) {
  // Only a leaf's own hooks are called for what is captured; and LibTorch drops those that are not of this
  // kind when the program adds its first.
  leaf.register_hook([weak = std::weak_ptr(take_), accumulator = accumulator_.get()](const at::Tensor& gradient) {
    const auto take = weak.lock();  // the leaf keeps its hooks
    const bool given = take && !at::GradMode::is_enabled() && gradient.defined() && is_captured(accumulator);
    return given ? (*take)(gradient) : at::Tensor();
  });
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
