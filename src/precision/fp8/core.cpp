#include "precision/fp8/core.hpp"

namespace accelerate::fp8 {
namespace {

const void* storage_address(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

void Core::index() {
  by_storage_.clear();
  for (size_t i = 0; i < weights.size(); ++i) by_storage_.emplace(storage_address(weights[i].tensor), i);
}

std::optional<Found> Core::find(const at::Tensor& operand) {
  if (operand.dim() != 2 || !operand.has_storage()) return {};
  const auto [begin, end] = by_storage_.equal_range(storage_address(operand));
  for (auto entry = begin; entry != end; ++entry) {
    Weight& weight = weights[entry->second];
    const at::Tensor& whole = weight.tensor;
    if (storage_address(whole) != entry->first || operand.storage_offset() != whole.storage_offset()) continue;
    const auto same = [&](int64_t first, int64_t second) {
      return operand.size(0) == whole.size(first) && operand.size(1) == whole.size(second) &&
             operand.stride(0) == whole.stride(first) && operand.stride(1) == whole.stride(second);
    };
    if (same(0, 1)) return Found{&weight, false};
    if (same(1, 0)) return Found{&weight, true};
  }
  return {};
}

void Core::settle() {
  if (forward && forward->has_recorded()) forward->update(reduction), ++counts.updates;
  if (backward && backward->has_recorded()) backward->update(reduction), ++counts.updates;
}

}  // namespace accelerate::fp8
