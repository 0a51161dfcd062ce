#include "residency/operator_facts.hpp"

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace accelerate::residency {
namespace {

/// Operators that return views by definition. Others whose schema says "alias" (reshape, contiguous, to) copy when they
/// must, and then read.
const std::unordered_set<std::string_view> kNeedNoBytes = {
    "aten::view",
    "aten::t",
    "aten::transpose",
    "aten::permute",
    "aten::expand",
    "aten::slice",
    "aten::select",
    "aten::narrow",
    "aten::unsqueeze",
    "aten::squeeze",
    "aten::as_strided",
    "aten::detach",
    "aten::alias",
    "aten::unbind",
    "aten::split",
    "aten::split_with_sizes",
    "aten::chunk",
    "aten::diagonal",
    "aten::unfold",
    "aten::movedim",
    "aten::view_as",
    "aten::expand_as",
    "aten::swapaxes",
    "aten::mT",
    "aten::numpy_T",
    "aten::_reshape_alias",
    "aten::detach_",
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::new_empty",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::requires_grad_",
    "aten::is_floating_point",
    "aten::is_complex",
    "aten::_version",
    "aten::output_nr",
    "aten::is_leaf",
};

OperatorFacts work_out(const c10::FunctionSchema& schema) {
  OperatorFacts facts;
  facts.needs_bytes = !kNeedNoBytes.contains(schema.name());
  for (const auto& result : schema.returns())
    facts.makes_tensors |= result.type()->str().find("Tensor") != std::string::npos;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i < 64 && arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) facts.writes |= uint64_t{1} << i;
    if (arguments[i].name() == "device") facts.device = i;
  }
  return facts;
}

}  // namespace

const OperatorFacts& facts_of(const c10::FunctionSchema& schema) {
  // Every operator asks, and a hash table's division alone takes longer than this.
  struct Recent {
    const c10::FunctionSchema* schema;
    const OperatorFacts* facts;
  };
  thread_local std::array<Recent, 256> recent{};
  const auto address = reinterpret_cast<uintptr_t>(&schema);
  Recent& entry = recent[(address >> 4 ^ address >> 12) % recent.size()];
  if (entry.schema != &schema) {
    thread_local std::unordered_map<const c10::FunctionSchema*, OperatorFacts> known;
    auto found = known.find(&schema);
    if (found == known.end()) found = known.emplace(&schema, work_out(schema)).first;
    entry = {&schema, &found->second};
  }
  return *entry.facts;
}

}  // namespace accelerate::residency
