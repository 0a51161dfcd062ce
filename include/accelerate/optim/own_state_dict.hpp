#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "accelerate/utils/export.hpp"

namespace c10 {
struct IValue;
}

namespace accelerate::optim {

/// For optimizers that know best how their state is written: a torch::optim::Optimizer that is one of these is saved
/// and loaded by AcceleratedOptimizer and Accelerator::save_state in its own words. Others need a class that Python
/// has, too. Its state is taken as one thing: what cuts a model into shards (FSDP) refuses it.
class ACCELERATE_API OwnStateDict {
 public:
  virtual ~OwnStateDict() = default;
  /// {"state": …, "param_groups": […]}; tensors are shared.
  virtual c10::IValue state_dict() const = 0;
  /// Takes over such a dict, copying its tensors. @throws CheckpointError for what does not fit; nothing is changed
  /// then.
  virtual void load_state_dict(const c10::IValue& state) = 0;
  /// Replaces every tensor of the state by f(tensor), to move it to another device.
  virtual void map_state(const std::function<at::Tensor(const at::Tensor&)>& f) = 0;
};

}  // namespace accelerate::optim
