#include "residency/operator_call.hpp"

namespace accelerate::residency {

std::string OperatorCall::full_name() const {
  return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
}

std::optional<at::Device> OperatorCall::real_device() const {
  if (!facts.device) return {};
  const c10::IValue& named = arguments()[*facts.device];
  return named.isDevice() && !named.toDevice().is_meta() ? std::optional(named.toDevice()) : std::nullopt;
}

void OperatorCall::finish(std::vector<c10::IValue> results) {
  torch::jit::drop(stack_, schema.arguments().size());
  for (c10::IValue& result : results) stack_.push_back(std::move(result));
}

void OperatorCall::put_back(c10::ArrayRef<c10::IValue> originals) {
  c10::IValue* all = values(schema.returns().size());
  for (size_t i = 0; i < schema.returns().size(); ++i)
    if (const auto argument = argument_of(i)) all[i] = originals[*argument];
}

std::optional<size_t> OperatorCall::argument_of(size_t result) const {
  const auto* info = schema.returns()[result].alias_info();
  if (!info || !info->isWrite()) return {};
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (const auto* other = schema.arguments()[i].alias_info();
        other && other->isWrite() && other->beforeSets() == info->beforeSets())
      return i;
  return {};
}

bool OperatorCall::only_returns_arguments() const {
  for (size_t i = 0; i < schema.returns().size(); ++i)
    if (!argument_of(i)) return false;
  return true;
}

}  // namespace accelerate::residency
