#pragma once

/// Default hooks for the tensors that autograd saves for backward, without Python.
///
/// Autograd asks its engine for hooks each time that an operator saves a tensor. A thin engine that passes everything
/// else on answers from a stack that belongs to the calling thread; it is installed when the first hooks are pushed.
/// Only the top of the stack is asked.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace accelerate::residency {

/// A stand-in for one saved tensor; destroyed when autograd releases the saved variable, on whichever thread does that.
class PackedTensor {
 public:
  virtual ~PackedTensor() = default;
  /// The tensor's values, in backward (on autograd's thread). Called once per backward pass through the operator.
  virtual at::Tensor unpack() = 0;
};

/// One pair of hooks. Autograd adds its own metadata (gradient function, requires_grad) to what unpack returns; values
/// must not carry a graph.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  /// Called within the operator, with grad mode off. Must not write to `tensor`, nor keep it: it may be an output,
  /// whose graph holds the result of this call.
  virtual std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) = 0;
};

/// The hooks of the calling thread from construction to destruction; scopes nest. nullptr: autograd keeps tensors
/// itself within the scope.
class SavedTensorHooksScope {
 public:
  explicit SavedTensorHooksScope(std::shared_ptr<SavedTensorHooks> hooks);
  SavedTensorHooksScope(const SavedTensorHooksScope&) = delete;
  SavedTensorHooksScope& operator=(const SavedTensorHooksScope&) = delete;
  ~SavedTensorHooksScope();
};

/// The top of the calling thread's stack, or nullptr.
const std::shared_ptr<SavedTensorHooks>& current_saved_tensor_hooks();
/// How many scopes the calling thread is in.
int64_t saved_tensor_hooks_depth();

/// Autograd's memory of a tensor's contents: it checks this itself where there are no hooks, and leaves it to the hooks
/// where there are.
class VersionStamp {
 public:
  explicit VersionStamp(const at::Tensor& tensor);
  /// @throws ShapeError as autograd would, if the tensor (or a view of it) was written to since; `what` begins the
  /// message.
  void check(const std::string& what) const;

 private:
  c10::VariableVersion counter_;  ///< shared with the tensor, does not keep it alive
  uint32_t version_;
};

/// The tensor without its graph: an alias, no copy.
at::Tensor without_graph(const at::Tensor& tensor);
/// Stands for a tensor that stays where it is, with autograd's check against in-place changes.
std::unique_ptr<PackedTensor> keep_in_place(const at::Tensor& tensor);

}  // namespace accelerate::residency
