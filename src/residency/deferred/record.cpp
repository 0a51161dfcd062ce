#include "residency/deferred/record.hpp"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include "memory/meta_memory.hpp"
#include "residency/deferred/plain.hpp"
#include "residency/deferred/storage.hpp"
#include "residency/member.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency::deferred {
namespace {

thread_local RecordScope* innermost = nullptr;

/// Outside of a scope these may be recorded although they make new tensors: modules are cloned and converted to other
/// dtypes by them.
const std::unordered_set<std::string_view> kCarryOver = {"aten::clone",      "aten::to",      "aten::_to_copy",
                                                         "aten::contiguous", "aten::reshape", "aten::flatten"};

/// An operator call, and what its tensors are to tapes.
struct RecordedCall {
  OperatorCall& call;
  const Next next;
  c10::SmallVector<at::Tensor, 4> deferred;
  bool has_real = false, writes_deferred = false, writes_real = false, takes_tensors = false;

  RecordedCall(OperatorCall& operator_call, Next rest) : call(operator_call), next(rest) {
    call.for_each_tensor([&](const at::Tensor& tensor, size_t i) {
      takes_tensors = true;
      if (owner_of(tensor)) {
        deferred.push_back(tensor);
        writes_deferred |= call.writes(i);
      } else {
        has_real = true;
        writes_real |= call.writes(i);
      }
    });
  }

  std::string_view name() const { return call.name(); }
  /// The argument that names the device, of those that have one.
  const c10::IValue& device() const { return call.arguments()[*call.facts.device]; }
  /// Makes a tensor from nothing, or from another one's sizes.
  bool is_factory() const {
    return call.facts.device && (!takes_tensors || name().starts_with("aten::new_") || name().ends_with("_like"));
  }
  /// torch::tensor({...}) and its kin make such a tensor and write into it by pointer.
  bool is_host_array() const {
    const c10::IValue& sizes = call.arguments()[0];
    return name() == "aten::empty" && sizes.isIntList() && sizes.toIntList().size() == 1 && device().isDevice() &&
           device().toDevice().is_cpu();
  }
  bool is_random() const { return call.op.hasTag(at::Tag::nondeterministic_seeded); }
};

[[noreturn]] void throw_not_initialised(const RecordedCall& recorded) {
  const at::Tensor& tensor = recorded.deferred.front();
  raise<ConfigError>(
      "{}: found a {} {} {} that is not initialised yet (init_empty_weights, or DeepSpeed's zero3_init_flag), expected "
      "values; it was built without memory and only initialisers can run on it. Call accelerate::materialize(module), "
      "Accelerator::prepare, or load weights first",
      recorded.name(), tensor.requires_grad() ? "parameter" : "tensor", c10::str(tensor.sizes()),
      tensor.dtype().name());
}

/// Carries the operator out on real values, now.
void on_values(Tape& tape, OperatorCall& call) {
  tape.record(call.op, call.arguments(), {});
  std::vector<c10::IValue> results = tape.carry_out_last();
  const std::vector<c10::IValue> originals = call.arguments().vec();
  call.finish(std::move(results));
  call.put_back(originals);
}

at::Tensor on_meta(const at::Tensor& real) {
  Plain plain;
  const meta_memory::Uncounted sizes_only;
  at::Tensor meta =
      at::empty_strided(real.sizes(), real.strides(), real.options().device(at::kMeta).pinned_memory(std::nullopt));
  if (real.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

/// The device on which eager construction would put a result.
at::Device intended_device(const RecordedCall& recorded) {
  if (const auto named = recorded.call.real_device()) return *named;
  if (!recorded.deferred.empty()) {
    const Owner* owner = owner_of(recorded.deferred.front());
    return owner->tape->device(owner->node);
  }
  for (const auto& argument : recorded.call.arguments())
    if (argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_meta())
      return argument.toTensor().device();
  return at::kCPU;
}

/// Carries the operator out for sizes only and writes it down.
void on_tape(const RecordedCall& recorded, const std::shared_ptr<Tape>& tape, RecordScope* scope) {
  OperatorCall& call = recorded.call;
  const auto arguments = call.arguments();
  const auto& schema = call.schema;
  torch::jit::Stack meta;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i == call.facts.device && (arguments[i].isDevice() || recorded.is_factory()))
      meta.emplace_back(at::Device(at::kMeta));
    else if (schema.arguments()[i].name() == "pin_memory") meta.emplace_back();
    else {
      meta.push_back(arguments[i]);
      map_tensors(meta.back(), [](const at::Tensor& tensor) {
        return owner_of(tensor) || tensor.is_meta() ? tensor : on_meta(tensor);
      });
    }
  }
  try {
    const OpenForMeta open(recorded.deferred);
    const meta_memory::Uncounted sizes_only;
    recorded.next.compute(TorchLayers::program, OwnLinks::none, [&] { call.op.callBoxed(meta); });
  } catch (const c10::NotImplementedError&) {
    // No kernel for sizes. One that returns its argument has none to find out.
    if (!recorded.writes_deferred || !call.only_returns_arguments()) {
      if (!scope) throw_not_initialised(recorded);
      return on_values(*tape, call);
    }
    meta.clear();
    for (size_t i = 0; i < schema.returns().size(); ++i) meta.push_back(arguments[*call.argument_of(i)]);
  } catch (const c10::Error&) {
    // Most often it needs values: item(), a mask. If not, it says again there what is wrong.
    if (recorded.writes_deferred) throw;
    if (!scope) throw_not_initialised(recorded);
    return on_values(*tape, call);
  }
  bool made_some = false;
  for (const auto& result : meta) {
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      if (!tensor.is_meta() || !tensor.has_storage()) return;
      if (!has_key(tensor)) tag(tensor);
      if (!owner_of(tensor)) {  // a new storage, and the first result over it
        tape->begin_node(tensor, intended_device(recorded));
        made_some = true;
      }
      if (scope) scope->remember(tensor);
    });
  }
  if (made_some || recorded.writes_deferred) tape->record(call.op, arguments, meta);
  call.finish(std::move(meta));
}

/// copy_() of a real tensor onto a whole deferred one, outside of a scope: that is loading weights. Earlier records
/// for it are of no interest any more.
bool load(const RecordedCall& recorded) {
  const auto arguments = recorded.call.arguments();
  if (recorded.name() != "aten::copy_" || recorded.deferred.size() != 1 || !recorded.has_real ||
      !owner_of(arguments[0].toTensor()))
    return false;
  const at::Tensor& target = arguments[0].toTensor();
  const Owner owner = *owner_of(target);
  if (target.requires_grad() && at::GradMode::is_enabled()) return false;  // autograd has something to say about that
  if (!at::is_expandable_to(arguments[1].toTensor().sizes(), target.sizes())) return false;
  if (!target.is_non_overlapping_and_dense() ||
      static_cast<size_t>(target.numel()) * target.element_size() != owner.tape->bytes(owner.node))
    return false;
  Plain plain;
  owner.tape->replace(owner.node, owner.tape->allocate(owner.node));
  adopt(target, *owner.tape->kept(owner.node));
  return true;
}

/// Records operators in a scope and those on deferred tensors. @throws ConfigError when one needs values that don't
/// exist yet.
struct DeferredRecorder final : Handler {
  bool handle(OperatorCall& call, Next next) override {
    // In a pipeline's forward, deferred tensors are sizes as others are; ranks that need values have got them before.
    if (has_scope(Link::place)) return false;
    if (call.name() == "aten::_has_compatible_shallow_copy_type") return false;  // set_data() asks about keys only
    RecordScope* scope = c10::impl::tls_is_dispatch_key_included(kKey) ? current_scope() : nullptr;
    if (!scope) {
      bool ours = false;
      call.for_each_tensor([&](const at::Tensor& tensor, size_t) { ours |= owner_of(tensor) != nullptr; });
      if (!ours) return false;
    }
    const RecordedCall recorded(call, next);
    if (recorded.deferred.empty()) return scope && handle_real(recorded, *scope);

    if (scope && !scope->tape) scope = nullptr;
    // One tape per record: that of the scope, else of what is written to. Tensors of others, and tensors that have
    // become real behind another TensorImpl's back, get their values first.
    const std::shared_ptr<Tape> tape = scope ? scope->tape : owner_of(recorded.deferred.front())->tape;
    bool changed = false;
    for (const at::Tensor& tensor : recorded.deferred) {
      const Owner* found = owner_of(tensor);
      if (!found) continue;  // the same tensor twice
      const Owner owner = *found;
      auto real = owner.tape->kept(owner.node);
      if (!real && owner.tape != tape) real = owner.tape->materialize(owner.node);
      if (!real) continue;
      adopt(tensor, *real);
      changed = true;
    }
    if (!changed && !scope && load(recorded)) changed = true;
    if (changed) {
      call.dispatch_anew();
      return true;
    }

    if (recorded.writes_real) {
      if (!scope) throw_not_initialised(recorded);
      on_values(*tape, call);
      return true;
    }
    if (!scope && !recorded.writes_deferred) {
      const bool carries =
          !recorded.has_real && !call.real_device() &&
          (!call.facts.needs_bytes || kCarryOver.contains(recorded.name()) || !call.facts.makes_tensors);
      if (!carries) throw_not_initialised(recorded);
    }
    on_tape(recorded, tape, scope);
    return true;
  }

 private:
  /// In a scope, without deferred tensors among the arguments.
  static bool handle_real(const RecordedCall& recorded, RecordScope& scope) {
    OperatorCall& call = recorded.call;
    if (!scope.tape) {
      if (recorded.is_factory() && !recorded.takes_tensors && recorded.device().isNone())
        call.set_argument(*call.facts.device, *scope.device);
      return false;
    }
    if (recorded.is_factory() && !recorded.is_host_array()) {
      on_tape(recorded, scope.tape, &scope);
      return true;
    }
    if (!recorded.is_random()) return false;
    on_values(*scope.tape, call);  // numbers recorded before have to be drawn before
    return true;
  }
};

}  // namespace

void RecordScope::remember(const at::Tensor& tensor) {
  if (born.size() >= prune_at) {
    std::erase_if(born, [](const auto& weak) { return weak.expired(); });
    prune_at = 2 * born.size() + 1024;
  }
  born.emplace_back(tensor.getIntrusivePtr());
}

RecordScope* current_scope() { return innermost; }

void enter(RecordScope& scope) {
  scope.outer = innermost;
  innermost = &scope;
  scope.all.emplace();
}

void leave(RecordScope& scope) {
  innermost = scope.outer;
  scope.all.reset();
}

Handler& recorder() {
  static DeferredRecorder recorder;
  return recorder;
}

}  // namespace accelerate::residency::deferred
