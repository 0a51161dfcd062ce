#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

namespace accelerate::residency {

/// Decides where an operator runs, before anyone else looks at it: the stages of a pipeline. While a scope is open, all
/// operators of this thread come by.
class Placement {
 public:
  virtual ~Placement() = default;
  /// Consumes the operator's arguments and leaves its results. @param carry_out  runs the operator on what is on the
  /// stack by then; may be left out.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::function_ref<void()> carry_out) = 0;

  /// Of the innermost scope of this thread; null outside.
  static Placement* current();

  class Scope {
   public:
    explicit Scope(Placement& placement);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    Placement* outer_;
    bool included_;
  };
};

}  // namespace accelerate::residency
