#include "residency/activations/operator_tape.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>

#include "residency/member.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

/// Memory that somebody fills by pointer (torch::tensor({...})): kept as it is.
bool is_unfilled(const std::string& name) {
  return name == "aten::empty" || name == "aten::empty_strided" || name == "aten::empty_like" ||
         name == "aten::new_empty" || name == "aten::new_empty_strided";
}

/// Stands where a recorded argument had a tensor.
const at::Tensor& stand_in() {
  static const at::Tensor tensor(c10::make_intrusive<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(at::kFloat), at::Device(at::kCPU)));
  return tensor;
}

}  // namespace

int32_t OperatorTape::remember(const at::Tensor& tensor) {
  known_.insert_or_assign(
      tensor.unsafeGetTensorImpl(),
      Known{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()), slots_});
  return slots_++;
}

int32_t OperatorTape::slot_of(const at::Tensor& tensor) {
  if (const auto found = known_.find(tensor.unsafeGetTensorImpl()); found != known_.end()) return found->second.slot;
  const int32_t slot = remember(tensor);
  inputs_.push_back({.slot = slot, .tensor = tensor, .stamp = {}, .given = {}});
  return slot;
}

/// Operators that came before must find the tensor as they found it.
void OperatorTape::keep_before_write(const OperatorCall& call, const Next& next, const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  slot_of(tensor);
  Input* kept = nullptr;
  for (auto& input : inputs_) {
    if (!input.tensor.defined() || !input.tensor.has_storage()) continue;
    // Members share their storage with views only, and may not be asked for bytes, as is_alias_of() does, while absent.
    const bool alias =
        Member::of(input.tensor) ? Member::of(input.tensor) == Member::of(tensor) : input.tensor.is_alias_of(tensor);
    if (!alias) continue;
    if (kept)
      raise<ConfigError>(
          "activation checkpointing of '{}': {} writes into a tensor from outside of the unit, of which the unit also "
          "uses a view; use the operator that does not write in place",
          name_, call.name());
    kept = &input;
  }
  if (!kept || kept->written) return;
  const bool trained = kept->tensor.requires_grad();
  kept->tensor = next.compute(TorchLayers::no_gradients, [&] { return at::clone(kept->tensor.detach()); });
  kept->tensor.set_requires_grad(trained);
  kept->written = true;
}

void OperatorTape::record(OperatorCall& call, Next next) {
  if ((call.facts.writes == 0 && !call.facts.makes_tensors) || is_unfilled(call.name())) return next();
  Record record{.op = call.op,
                .arguments = {},
                .results = {},
                .keys = c10::impl::tls_local_dispatch_key_set(),
                .grad_mode = at::GradMode::is_enabled(),
                .random = {},
                .last_uses = {}};
  const auto arguments = call.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (call.writes(i))
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) { keep_before_write(call, next, tensor); });
    if (arguments[i].isGenerator() && arguments[i].toGenerator().defined())
      record.random.emplace(arguments[i].toGenerator());
    Argument argument{.value = arguments[i], .slots = {}};
    map_tensors(argument.value, [&](const at::Tensor& tensor) {
      argument.slots.push_back(slot_of(tensor));
      return stand_in();
    });
    record.arguments.push_back(std::move(argument));
  }
  next();
  for (const auto& result : call.results())
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      const auto found = known_.find(tensor.unsafeGetTensorImpl());
      record.results.push_back(found != known_.end() ? found->second.slot : remember(tensor));
    });
  records_.push_back(std::move(record));
}

std::vector<at::Tensor> OperatorTape::take_out(const OperatorCall& call,
                                               const std::function<bool(const at::Tensor&)>& stays) {
  std::vector<at::Tensor> taken;
  call.for_each_tensor([&](const at::Tensor& tensor, size_t) {
    if (known_.contains(tensor.unsafeGetTensorImpl()) || stays(tensor)) return;
    inputs_.push_back({.slot = remember(tensor), .tensor = {}, .stamp = {}, .given = taken.size()});
    taken.push_back(tensor);
  });
  return taken;
}

void OperatorTape::close() {
  known_.clear();
  for (auto& input : inputs_)
    if (input.tensor.defined() && !input.written && !input.tensor.is_inference()) input.stamp.emplace(input.tensor);
  std::vector<char> used(static_cast<size_t>(slots_), 0);
  const auto last = [&](Record& record, int32_t slot) {
    if (used[static_cast<size_t>(slot)]) return;
    used[static_cast<size_t>(slot)] = 1;
    record.last_uses.push_back(slot);
  };
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
    for (const int32_t slot : record->results) last(*record, slot);
    for (const auto& argument : record->arguments)
      for (const int32_t slot : argument.slots) last(*record, slot);
  }
}

void OperatorTape::replay(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> values(static_cast<size_t>(slots_));
  for (const auto& input : inputs_) {
    if (input.stamp) input.stamp->check("activation checkpointing of '" + name_ + "'");
    values[static_cast<size_t>(input.slot)] = input.given     ? inputs[*input.given]
                                              : input.written ? at::clone(input.tensor)
                                                              : input.tensor;
  }
  BorrowedGenerators generators;
  for (const auto& record : records_) {
    if (record.random) generators.set(*record.random);
    torch::jit::Stack stack;
    for (const auto& argument : record.arguments) {
      stack.push_back(argument.value);
      size_t next = 0;
      map_tensors(stack.back(), [&](const at::Tensor&) { return values[static_cast<size_t>(argument.slots[next++])]; });
    }
    {
      // The scopes of this replay see what has no member among its arguments, too.
      const auto included = has_scope() ? record.keys.included_ : record.keys.included_.remove(kKey);
      const c10::impl::ForceDispatchKeyGuard keys(included, record.keys.excluded_);
      const at::AutoGradMode grad(record.grad_mode);
      record.op.callBoxed(stack);
    }
    size_t result = 0;
    for (const auto& item : stack)
      for_each_tensor(
          item, [&](const at::Tensor& tensor) { values[static_cast<size_t>(record.results.at(result++))] = tensor; });
    for (const int32_t slot : record.last_uses) values[static_cast<size_t>(slot)].reset();
  }
}

}  // namespace accelerate::residency
