#include "residency/devices.hpp"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <string_view>
#include <unordered_set>

#include "residency/member.hpp"
#include "residency/operator_facts.hpp"

namespace accelerate::residency::devices {
namespace {

std::atomic<int64_t> models{0};
thread_local std::optional<at::Device> last_device;  ///< where this thread last computed with members
thread_local bool watching = false;                  ///< this thread's operators come by

const std::unordered_set<std::string_view> kMeantToCross = {
    "aten::to",         "aten::_to_copy",
    "aten::copy_",      "aten::copy",
    "aten::_copy_from", "aten::_copy_from_and_resize",
    "aten::set_",       "aten::set_data",
    "aten::type_as",    "aten::_has_compatible_shallow_copy_type",
};

bool has_place(const at::Tensor& tensor) { return tensor.defined() && !(tensor.dim() == 0 && tensor.is_cpu()); }

/// Calls f(tensor) with each tensor that an argument holds; a tensor that it returns takes the place of the other.
template <class F> void for_each(c10::IValue& argument, F&& f) {
  if (argument.isTensor()) {
    if (auto moved = f(argument.toTensor())) argument = *std::move(moved);
  } else if (argument.isTensorList()) {
    const auto list = argument.toTensorList();
    c10::List<at::Tensor> changed;
    bool any = false;
    for (const at::Tensor& item : list.vec()) {
      auto moved = f(item);
      any |= moved.has_value();
      changed.push_back(moved ? *std::move(moved) : item);
    }
    if (any) argument = std::move(changed);
  } else if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    bool any = false;
    for (const std::optional<at::Tensor>& item : argument.toOptionalTensorList().vec()) {
      auto moved = item ? f(*item) : std::nullopt;
      any |= moved.has_value();
      changed.push_back(moved ? std::move(moved) : item);
    }
    if (any) argument = std::move(changed);
  }
}

}  // namespace

void begin() { ++models; }
void end() { --models; }
bool active() { return models.load(std::memory_order_relaxed) > 0 || watching; }

bool bring_together(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::optional<at::Device> unit_device) {
  if (models.load(std::memory_order_relaxed) == 0) {
    c10::impl::tls_set_dispatch_key_included(kKey, false);
    watching = false;
    return false;
  }
  if (unit_device) {
    last_device = unit_device;
    if (!c10::impl::tls_is_dispatch_key_included(kKey)) c10::impl::tls_set_dispatch_key_included(kKey, true);
    watching = true;
  }
  const auto& schema = op.schema();
  if (kMeantToCross.contains(schema.name())) return false;
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const OperatorFacts& facts = facts_of(schema);
  std::optional<at::Device> front, written;
  bool differ = false, at_last = false;
  for (size_t i = 0; i < count; ++i)
    for_each((*stack)[first + i], [&](const at::Tensor& tensor) -> std::optional<at::Tensor> {
      if (!has_place(tensor)) return std::nullopt;
      const at::Device device = tensor.device();
      differ |= front && *front != device;
      if (!front) front = device;
      if (!written && i < 64 && (facts.writes >> i & 1)) written = device;
      at_last |= last_device && *last_device == device;
      return std::nullopt;
    });
  if (!differ) return false;
  const at::Device target = written ? *written : unit_device ? *unit_device : at_last ? *last_device : *front;
  for (size_t i = 0; i < count; ++i)
    for_each((*stack)[first + i], [&](const at::Tensor& tensor) -> std::optional<at::Tensor> {
      if (!has_place(tensor) || tensor.device() == target) return std::nullopt;
      return tensor.to(target, /*non_blocking=*/tensor.is_cpu() && tensor.is_pinned());
    });
  return true;
}

}  // namespace accelerate::residency::devices
