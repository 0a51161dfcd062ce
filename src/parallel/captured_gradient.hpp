#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <string>

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// A gradient that torch::autograd::grad() finds with respect to a leaf never comes to grad(), where engines would see
/// it. As long as this lives, `take` is given that gradient, and the caller gets the result of `take`. With
/// create_graph the caller gets a node of this rank's own graph, and `take` is not called. The leaf requires a
/// gradient.
class CapturedGradient {
 public:
  using Take = std::function<at::Tensor(const at::Tensor&)>;
  CapturedGradient(const at::Tensor& leaf, Take take);

 private:
  std::shared_ptr<Take> take_;
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator_;
};

/// The mean over the group's ranks. Collective.
/// @throws ConfigError for a sparse one, naming the parameter
at::Tensor average_of_captured(comm::Group& group, const std::string& name, const at::Tensor& gradient);

}  // namespace accelerate::parallel
