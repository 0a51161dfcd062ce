#include "residency/activations/operator_tape.hpp"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>

#include "accelerate/utils/error.hpp"
#include "residency/deferred/tape.hpp"
#include "residency/member.hpp"
#include "residency/operator_facts.hpp"

namespace accelerate::residency {
namespace {

/// Memory that somebody fills by pointer (torch::tensor({...})): kept as it is.
bool is_unfilled(const std::string& name) {
  return name == "aten::empty" || name == "aten::empty_strided" || name == "aten::empty_like" ||
         name == "aten::new_empty" || name == "aten::new_empty_strided";
}

}  // namespace

int32_t OperatorTape::remember(const at::Tensor& tensor) {
  known_.insert_or_assign(
      tensor.unsafeGetTensorImpl(),
      Known{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()), slots_});
  return slots_++;
}

int32_t OperatorTape::slot_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return kUndefined;
  if (const auto found = known_.find(tensor.unsafeGetTensorImpl()); found != known_.end()) return found->second.slot;
  const int32_t slot = remember(tensor);
  inputs_.push_back({.slot = slot, .tensor = tensor, .stamp = {}, .given = {}});
  return slot;
}

/// Operators that came before must find the tensor as they found it.
void OperatorTape::keep_before_write(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  slot_of(tensor);
  Input* kept = nullptr;
  for (auto& input : inputs_) {
    if (!input.tensor.defined() || !input.tensor.has_storage() || !input.tensor.is_alias_of(tensor)) continue;
    if (kept)
      throw ConfigError("activation checkpointing of '" + name_ + "': " + op.schema().name() +
                        " writes into a tensor from outside of the unit, of which the unit also uses a view; use the "
                        "operator that does not write in place");
    kept = &input;
  }
  if (!kept || kept->written) return;
  const at::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const bool trained = kept->tensor.requires_grad();
  kept->tensor = at::clone(kept->tensor.detach()).set_requires_grad(trained);
  kept->written = true;
}

void OperatorTape::record(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::function<void()>& call) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const OperatorFacts& facts = facts_of(schema);
  const uint64_t writes = facts.writes;
  if ((writes == 0 && !facts.makes_tensors) || is_unfilled(schema.name())) return call();
  Record record{.op = op,
                .arguments = {},
                .results = {},
                .keys = c10::impl::tls_local_dispatch_key_set(),
                .grad_mode = at::GradMode::is_enabled(),
                .last_uses = {}};
  const auto arguments = torch::jit::last(*stack, count);
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = arguments[i];
    if (i < 64 && (writes >> i & 1))
      deferred::for_each_tensor(value, [&](const at::Tensor& tensor) { keep_before_write(op, tensor); });
    Argument argument;
    if (value.isTensor()) {
      argument.kind = Argument::Kind::tensor;
      argument.slots.push_back(slot_of(value.toTensor()));
    } else if (value.isTensorList()) {
      argument.kind = Argument::Kind::list;
      for (const at::Tensor& tensor : value.toTensorVector()) argument.slots.push_back(slot_of(tensor));
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::Kind::optionals;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        argument.slots.push_back(tensor ? slot_of(*tensor) : kUndefined);
    } else {
      argument.plain = value;
    }
    record.arguments.push_back(std::move(argument));
  }
  call();
  for (const auto& result : torch::jit::last(*stack, schema.returns().size()))
    deferred::for_each_tensor(result, [&](const at::Tensor& tensor) {
      const auto found = known_.find(tensor.unsafeGetTensorImpl());
      record.results.push_back(found != known_.end() ? found->second.slot : remember(tensor));
    });
  records_.push_back(std::move(record));
}

std::vector<at::Tensor> OperatorTape::take_out(const torch::jit::Stack& arguments,
                                               const std::function<bool(const at::Tensor&)>& stays) {
  std::vector<at::Tensor> taken;
  for (const auto& argument : arguments)
    deferred::for_each_tensor(argument, [&](const at::Tensor& tensor) {
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
    if (slot == kUndefined || used[static_cast<size_t>(slot)]) return;
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
  const auto value = [&](int32_t slot) {
    return slot == kUndefined ? at::Tensor() : values[static_cast<size_t>(slot)];
  };
  for (const auto& record : records_) {
    torch::jit::Stack stack;
    for (const auto& argument : record.arguments) {
      switch (argument.kind) {
        case Argument::Kind::plain:
          stack.push_back(argument.plain);
          break;
        case Argument::Kind::tensor:
          stack.emplace_back(value(argument.slots[0]));
          break;
        case Argument::Kind::list: {
          c10::List<at::Tensor> list;
          for (const int32_t slot : argument.slots) list.push_back(value(slot));
          stack.emplace_back(std::move(list));
          break;
        }
        case Argument::Kind::optionals: {
          c10::List<std::optional<at::Tensor>> list;
          for (const int32_t slot : argument.slots)
            list.push_back(slot == kUndefined ? std::nullopt : std::optional(value(slot)));
          stack.emplace_back(std::move(list));
          break;
        }
      }
    }
    {
      const c10::impl::ForceDispatchKeyGuard keys(record.keys.included_.remove(kKey), record.keys.excluded_);
      const at::AutoGradMode grad(record.grad_mode);
      record.op.callBoxed(stack);
    }
    size_t result = 0;
    for (const auto& item : stack)
      deferred::for_each_tensor(
          item, [&](const at::Tensor& tensor) { values[static_cast<size_t>(record.results.at(result++))] = tensor; });
    for (const int32_t slot : record.last_uses) values[static_cast<size_t>(slot)].reset();
  }
}

}  // namespace accelerate::residency
