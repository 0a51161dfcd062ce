/// The one boxed fallback on the members' key, and the chain of those who have something to say about an operator
/// before it runs.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "residency/activations/unit_checkpoints.hpp"
#include "residency/deferred/intercept.hpp"
#include "residency/devices.hpp"
#include "residency/fallback.hpp"
#include "residency/member.hpp"
#include "residency/operator_facts.hpp"
#include "residency/placement.hpp"
#include "residency/residency.hpp"

namespace accelerate::residency {
namespace {

/// Makes the units of one argument present for the length of the operator. `device`: where they are, of models across
/// devices.
void touch(const c10::IValue& argument, bool writes, Pins& pins, std::optional<at::Device>& device) {
  const auto touch_tensor = [&](const at::Tensor& tensor) {
    Member* member = Member::of(tensor);
    if (!member) return;
    pins.add(member->unit(), writes);
    if (!device && member->unit().owner().policy().across_devices) device = tensor.device();
  };
  if (argument.isTensor()) {
    touch_tensor(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const auto& item : argument.toListRef()) touch_tensor(item.toTensor());
  } else if (argument.isOptionalTensorList()) {
    for (const auto& item : argument.toListRef())
      if (item.isTensor()) touch_tensor(item.toTensor());
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Pins what the arguments need; gives the device of their units, of models across devices.
  const auto pin_arguments = [&](Pins& pins) {
    std::optional<at::Device> device;
    const auto& schema = op.schema();
    const OperatorFacts& facts = facts_of(schema);
    if (!facts.needs_bytes) return device;
    const size_t count = schema.arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    for (size_t i = 0; i < count; ++i) touch(arguments[i], i < 64 && (facts.writes >> i & 1), pins, device);
    return device;
  };
  if (Placement* placement = Placement::current()) {
    c10::impl::ExcludeDispatchKeyGuard below(kKey);  // what the placement itself does is nobody's operator
    return placement->run(op, stack, [&] {
      Pins pins;
      pin_arguments(pins);
      op.callBoxed(stack);  // the placement may have exchanged arguments for those of another device
    });
  }
  if (deferred::watching() && deferred::intercept(op, stack)) return;
  const auto carry_out = [&] {
    Pins pins;
    const auto device = pin_arguments(pins);
    const bool moved = devices::active() && devices::bring_together(op, stack, device);
    c10::impl::ExcludeDispatchKeyGuard below(kKey);
    if (moved) op.callBoxed(stack);  // other devices, other keys
    else op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  };
  if (auto* checkpoints = UnitCheckpoints::current()) checkpoints->run(op, stack, carry_out);
  else carry_out();
}

}  // namespace

void install_fallback() {
  // Not by TORCH_LIBRARY_IMPL: a static library's object file that nobody calls is not linked.
  static const torch::Library library = [] {
    torch::Library registration(torch::Library::IMPL, "_", c10::DispatchKey::DeferredInit, __FILE__, __LINE__);
    registration.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    return registration;
  }();
}

}  // namespace accelerate::residency
