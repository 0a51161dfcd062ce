#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "residency/member.hpp"
#include "residency/operator_facts.hpp"
#include "residency/pins.hpp"

namespace accelerate::residency {

/// Calls `see(tensor)` for each defined tensor that a value holds: itself, or in a list, of optional ones too.
template <class F> void for_each_tensor(const c10::IValue& value, F&& see) {
  if (value.isTensor()) {
    if (const at::Tensor& tensor = value.toTensor(); tensor.defined()) see(tensor);
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor() && item.toTensor().defined()) see(item.toTensor());
  }
}

/// Puts `change(tensor)` in place of each of these tensors. A list may belong to somebody else, so a changed one is
/// another list. @return whether anything changed
template <class F> bool map_tensors(c10::IValue& value, F&& change) {
  if (value.isTensor()) {
    const at::Tensor& before = value.toTensor();
    if (!before.defined()) return false;
    at::Tensor after = change(before);
    if (after.is_same(before)) return false;
    value = std::move(after);
    return true;
  }
  if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
  std::optional<c10::List<c10::IValue>> changed;
  const c10::ArrayRef<c10::IValue> items = value.toListRef();
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].isTensor() || !items[i].toTensor().defined()) continue;
    at::Tensor after = change(items[i].toTensor());
    if (after.is_same(items[i].toTensor())) continue;
    if (!changed) changed = value.toList().copy();
    changed->set(i, std::move(after));
  }
  if (!changed) return false;
  value = *std::move(changed);
  return true;
}

/// One call of an operator, on its way through the handlers (chain.hpp). Its values lie at the end of the dispatcher's
/// stack: the arguments until somebody carries it out, then the results.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack& stack)
      : op(handle), schema(handle.schema()), facts(facts_of(schema)), keys_(keys), stack_(stack) {}
  OperatorCall(const OperatorCall&) = delete;
  OperatorCall& operator=(const OperatorCall&) = delete;

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const OperatorFacts& facts;
  /// The units of the members among the arguments, once *touch* has made them present; until the call ends.
  Pins pins;
  /// The device of these, in models across devices; *touch* tells it to *devices*.
  std::optional<at::Device> unit_device;

  const std::string& name() const { return schema.name(); }  ///< "aten::add"
  std::string full_name() const;                             ///< "aten::add.Tensor"

  // Before it has run.
  c10::ArrayRef<c10::IValue> arguments() const { return last(schema.arguments().size()); }
  bool writes(size_t argument) const { return facts.writes_to(argument); }
  void set_argument(size_t i, c10::IValue value) {
    values(schema.arguments().size())[i] = std::move(value);
    changed_ = true;
  }
  /// see(tensor, i): a defined tensor of argument i.
  template <class F> void for_each_tensor(F&& see) const {
    const auto all = arguments();
    for (size_t i = 0; i < all.size(); ++i)
      residency::for_each_tensor(all[i], [&](const at::Tensor& tensor) { see(tensor, i); });
  }
  /// change(tensor) -> the tensor to pass in its place, of all arguments or of one.
  template <class F> void map_tensors(F&& change) {
    for (size_t i = 0; i < schema.arguments().size(); ++i) map_tensors(i, change);
  }
  template <class F> void map_tensors(size_t argument, F&& change) {
    changed_ |= residency::map_tensors(values(schema.arguments().size())[argument], change);
  }
  /// The device that the call names; none also where it names the meta device.
  std::optional<at::Device> real_device() const;

  // Each of these leaves results in place of the arguments.
  /// The end of the chain: the operator, below the members' key.
  void run() {
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);
    if (changed_) op.callBoxed(&stack_);
    else op.redispatchBoxed(keys_ & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), &stack_);
  }
  /// From the dispatcher on, because the arguments are others now: all handlers see it again.
  void dispatch_anew() { op.callBoxed(&stack_); }
  void finish(std::vector<c10::IValue> results);

  // After it has run.
  c10::ArrayRef<c10::IValue> results() const { return last(schema.returns().size()); }
  /// change(tensor) -> the tensor to return in its place.
  template <class F> void map_results(F&& change) {
    c10::IValue* all = values(schema.returns().size());
    for (size_t i = 0; i < schema.returns().size(); ++i) residency::map_tensors(all[i], change);
  }
  /// Results that are arguments (in-place operators, out=) are the program's own tensors again, not those that took
  /// their places. @param originals  the arguments as the program passed them
  void put_back(c10::ArrayRef<c10::IValue> originals);

  /// Which argument a result is, if it is one.
  std::optional<size_t> argument_of(size_t result) const;
  bool only_returns_arguments() const;

 private:
  c10::ArrayRef<c10::IValue> last(size_t count) const { return torch::jit::last(stack_, count); }
  c10::IValue* values(size_t count) { return stack_.data() + (stack_.size() - count); }

  const c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  bool changed_ = false;  ///< the arguments: other tensors, other kernels
};

}  // namespace accelerate::residency
