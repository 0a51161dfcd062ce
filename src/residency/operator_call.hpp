#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "residency/operator_facts.hpp"

namespace accelerate::residency {

/// A call of an operator as a boxed fallback sees it.
struct OperatorCall {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const OperatorFacts& facts;
  std::vector<c10::IValue> arguments;
  std::optional<size_t> device;  ///< which argument names the device

  OperatorCall(const c10::OperatorHandle& handle, const torch::jit::Stack& stack)
      : op(handle), schema(handle.schema()), facts(facts_of(schema)) {
    const auto last = torch::jit::last(stack, schema.arguments().size());
    arguments.assign(last.begin(), last.end());
    for (size_t i = 0; i < arguments.size(); ++i)
      if (schema.arguments()[i].name() == "device") device = i;
  }

  std::string_view name() const { return schema.name(); }
  bool writes(size_t i) const { return i < 64 && (facts.writes >> i & 1); }

  /// Which argument a result is, if it is one (in-place operators, out=).
  std::optional<size_t> argument_of(size_t result) const {
    const auto* info = schema.returns()[result].alias_info();
    if (!info || !info->isWrite()) return {};
    for (size_t i = 0; i < arguments.size(); ++i)
      if (const auto* other = schema.arguments()[i].alias_info();
          other && other->isWrite() && other->beforeSets() == info->beforeSets())
        return i;
    return {};
  }
  bool only_returns_arguments() const {
    for (size_t i = 0; i < schema.returns().size(); ++i)
      if (!argument_of(i)) return false;
    return true;
  }
};

}  // namespace accelerate::residency
