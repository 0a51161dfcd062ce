#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "residency/deferred/tape.hpp"

namespace accelerate::residency::deferred {

/// The first link of the fallback's chain: records operators in a scope and those on deferred tensors.
/// @return true: the operator is done, its results are on the stack. false: go on; the arguments may have been given a
/// device.
/// @throws ConfigError when it needs values that don't exist yet.
bool intercept(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// One init_empty_weights() or init_on_device() of this thread; scopes form a stack.
struct Scope {
  Scope* outer = nullptr;
  std::shared_ptr<Tape> tape;        ///< null: no recording
  std::optional<at::Device> device;  ///< for factory functions that name none
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>
      born;  ///< deferred tensors that operators of this scope have returned
  size_t prune_at = 1024;
  Watch watch;

  void remember(const at::Tensor& tensor);
};

Scope* current_scope();
/// The first scope lets this thread's operators come by; with the last one that ends.
void enter(Scope& scope);
void leave(Scope& scope);

}  // namespace accelerate::residency::deferred
