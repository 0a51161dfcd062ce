#include "residency/deferred/intercept.hpp"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "accelerate/utils/error.hpp"
#include "residency/deferred/plain.hpp"
#include "residency/deferred/storage.hpp"
#include "residency/operator_call.hpp"
#include "utils/meta_memory.hpp"

namespace accelerate::residency::deferred {
namespace {

thread_local Scope* innermost = nullptr;

/// Outside of a scope these may be recorded although they make new tensors: modules are cloned and converted to other
/// dtypes by them.
const std::unordered_set<std::string_view> kCarryOver = {"aten::clone",      "aten::to",      "aten::_to_copy",
                                                         "aten::contiguous", "aten::reshape", "aten::flatten"};

bool is_meta_device(const c10::IValue& value) { return value.isDevice() && value.toDevice().is_meta(); }

/// What is known of an operator call, from its schema and its arguments.
struct Call : OperatorCall {
  c10::SmallVector<at::Tensor, 4> deferred;
  bool has_real = false, writes_deferred = false, writes_real = false, takes_tensors = false;

  Call(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) : OperatorCall(handle, stack) {
    for (size_t i = 0; i < arguments.size(); ++i)
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        takes_tensors = true;
        if (owner_of(tensor)) {
          deferred.push_back(tensor);
          writes_deferred |= writes(i);
        } else {
          has_real = true;
          writes_real |= writes(i);
        }
      });
  }

  /// Makes a tensor from nothing, or from another one's sizes.
  bool is_factory() const {
    return device && (!takes_tensors || name().starts_with("aten::new_") || name().ends_with("_like"));
  }
  /// torch::tensor({...}) and its kin make such a tensor and write into it by pointer.
  bool is_host_array() const {
    return name() == "aten::empty" && arguments[0].isIntList() && arguments[0].toIntList().size() == 1 &&
           arguments[*device].isDevice() && arguments[*device].toDevice().is_cpu();
  }
  bool returns_tensors() const {
    return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
      return result.type()->str().find("Tensor") != std::string::npos;
    });
  }
  bool is_random() const { return op.hasTag(at::Tag::nondeterministic_seeded); }
};

[[noreturn]] void throw_not_initialised(const Call& call) {
  const at::Tensor& tensor = call.deferred.front();
  throw ConfigError(std::string(call.name()) + ": found a " + (tensor.requires_grad() ? "parameter " : "tensor ") +
                    c10::str(tensor.sizes(), " ", tensor.dtype().name()) +
                    " that is not initialised yet (init_empty_weights), expected values; it was built without memory "
                    "and only initialisers can run on it. Call accelerate::materialize(module), "
                    "Accelerator::prepare, or load weights first");
}

void replace_stack(torch::jit::Stack* stack, size_t arguments, std::vector<c10::IValue> results) {
  torch::jit::drop(*stack, arguments);
  for (auto& result : results) stack->push_back(std::move(result));
}

/// Carries the operator out on real values, now.
void on_values(const Call& call, Tape& tape, torch::jit::Stack* stack) {
  tape.record(call.op, call.arguments, {});
  std::vector<c10::IValue> results = tape.carry_out_last();
  for (size_t i = 0; i < results.size(); ++i)
    if (const auto argument = call.argument_of(i)) results[i] = call.arguments[*argument];
  replace_stack(stack, call.arguments.size(), std::move(results));
}

at::Tensor on_meta(const at::Tensor& real) {
  Plain plain;
  const meta_memory::Uncounted sizes_only;
  at::Tensor meta =
      at::empty_strided(real.sizes(), real.strides(), real.options().device(at::kMeta).pinned_memory(std::nullopt));
  if (real.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

/// Where eager construction would put a result.
at::Device intended_device(const Call& call) {
  if (call.device && call.arguments[*call.device].isDevice() && !call.arguments[*call.device].toDevice().is_meta())
    return call.arguments[*call.device].toDevice();
  if (!call.deferred.empty()) {
    const Owner* owner = owner_of(call.deferred.front());
    return owner->tape->device(owner->node);
  }
  for (const auto& argument : call.arguments)
    if (argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_meta())
      return argument.toTensor().device();
  return at::kCPU;
}

/// Carries the operator out for sizes only and writes it down.
void on_tape(const Call& call, const std::shared_ptr<Tape>& tape, Scope* scope, torch::jit::Stack* stack) {
  torch::jit::Stack meta;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    if (i == call.device && (call.arguments[i].isDevice() || call.is_factory()))
      meta.emplace_back(at::Device(at::kMeta));
    else if (call.schema.arguments()[i].name() == "pin_memory") meta.emplace_back();
    else
      meta.push_back(map_tensors(call.arguments[i], [](const at::Tensor& tensor) {
        return owner_of(tensor) || tensor.is_meta() ? tensor : on_meta(tensor);
      }));
  }
  try {
    const OpenForMeta open(call.deferred);
    const meta_memory::Uncounted sizes_only;
    const c10::impl::ExcludeDispatchKeyGuard below(kKey);
    call.op.callBoxed(meta);
  } catch (const c10::NotImplementedError&) {
    // No kernel for sizes. One that returns its argument has none to find out.
    if (!call.writes_deferred || !call.only_returns_arguments()) {
      if (!scope) throw_not_initialised(call);
      return on_values(call, *tape, stack);
    }
    meta.clear();
    for (size_t i = 0; i < call.schema.returns().size(); ++i) meta.push_back(call.arguments[*call.argument_of(i)]);
  } catch (const c10::Error&) {
    // Most often it needs values: item(), a mask. If not, it says again there what is wrong.
    if (call.writes_deferred) throw;
    if (!scope) throw_not_initialised(call);
    return on_values(call, *tape, stack);
  }
  bool made_some = false;
  for (const auto& result : meta) {
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      if (!tensor.is_meta() || !tensor.has_storage()) return;
      if (!has_key(tensor)) tag(tensor);
      if (!owner_of(tensor)) {  // a new storage, and the first result over it
        tape->begin_node(tensor, intended_device(call));
        made_some = true;
      }
      if (scope) scope->remember(tensor);
    });
  }
  if (made_some || call.writes_deferred) tape->record(call.op, call.arguments, meta);
  replace_stack(stack, call.arguments.size(), std::move(meta));
}

/// copy_() of a real tensor onto a whole deferred one, outside of a scope: that is loading weights. What was recorded
/// for it is of no interest any more.
bool load(const Call& call) {
  if (call.name() != "aten::copy_" || call.deferred.size() != 1 || !call.has_real ||
      !owner_of(call.arguments[0].toTensor()))
    return false;
  const at::Tensor& target = call.arguments[0].toTensor();
  const Owner owner = *owner_of(target);
  if (target.requires_grad() && at::GradMode::is_enabled()) return false;  // autograd has something to say about that
  if (!at::is_expandable_to(call.arguments[1].toTensor().sizes(), target.sizes())) return false;
  if (!target.is_non_overlapping_and_dense() ||
      static_cast<size_t>(target.numel()) * target.element_size() != owner.tape->bytes(owner.node))
    return false;
  Plain plain;
  owner.tape->replace(owner.node, owner.tape->allocate(owner.node));
  adopt(target, *owner.tape->kept(owner.node));
  return true;
}

}  // namespace

void Scope::remember(const at::Tensor& tensor) {
  if (born.size() >= prune_at) {
    std::erase_if(born, [](const auto& weak) { return weak.expired(); });
    prune_at = 2 * born.size() + 1024;
  }
  born.emplace_back(tensor.getIntrusivePtr());
}

Scope* current_scope() { return innermost; }

void enter(Scope& scope) {
  scope.outer = innermost;
  innermost = &scope;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void leave(Scope& scope) {
  innermost = scope.outer;
  if (!innermost) c10::impl::tls_set_dispatch_key_included(kKey, false);
}

bool intercept(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.schema().name() == "aten::_has_compatible_shallow_copy_type") return false;  // set_data() asks about keys only
  Scope* scope = c10::impl::tls_is_dispatch_key_included(kKey) ? current_scope() : nullptr;
  if (!scope) {
    bool ours = false;
    for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size()))
      for_each_tensor(argument, [&](const at::Tensor& tensor) { ours |= owner_of(tensor) != nullptr; });
    if (!ours) return false;
  }
  const Call call(op, *stack);
  if (call.deferred.empty()) {
    if (!scope) return false;
    if (!scope->tape) {
      if (call.is_factory() && !call.takes_tensors && call.arguments[*call.device].isNone())
        torch::jit::peek(*stack, *call.device, call.arguments.size()) = *scope->device;
      return false;
    }
    if (call.is_factory() && !call.is_host_array()) {
      on_tape(call, scope->tape, scope, stack);
      return true;
    }
    if (!call.is_random()) return false;
    on_values(call, *scope->tape, stack);  // numbers recorded before have to be drawn before
    return true;
  }

  if (scope && !scope->tape) scope = nullptr;
  // One tape per record: that of the scope, else of what is written to. Tensors of others, and tensors that have become
  // real behind another TensorImpl's back, get their values first.
  std::shared_ptr<Tape> tape = scope ? scope->tape : owner_of(call.deferred.front())->tape;
  bool changed = false;
  for (const at::Tensor& tensor : call.deferred) {
    const Owner* found = owner_of(tensor);
    if (!found) continue;  // the same tensor twice
    const Owner owner = *found;
    auto real = owner.tape->kept(owner.node);
    if (!real && owner.tape != tape) real = owner.tape->materialize(owner.node);
    if (!real) continue;
    adopt(tensor, *real);
    changed = true;
  }
  if (!changed && !scope && load(call)) changed = true;
  if (changed) {
    op.callBoxed(stack);
    return true;
  }

  if (call.writes_real) {
    if (!scope) throw_not_initialised(call);
    on_values(call, *tape, stack);
    return true;
  }
  if (!scope && !call.writes_deferred) {
    const bool elsewhere =
        call.device && call.arguments[*call.device].isDevice() && !is_meta_device(call.arguments[*call.device]);
    const bool carries = !call.has_real && !elsewhere &&
                         (!call.facts.needs_bytes || kCarryOver.contains(call.name()) || !call.returns_tensors());
    if (!carries) throw_not_initialised(call);
  }
  on_tape(call, tape, scope, stack);
  return true;
}

}  // namespace accelerate::residency::deferred
