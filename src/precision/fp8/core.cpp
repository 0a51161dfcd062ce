#include "precision/fp8/core.hpp"

#include "residency/products.hpp"

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

std::optional<FoundWeight> Core::find(const at::Tensor& operand) {
  if (operand.dim() != 2 || !operand.has_storage()) return {};
  const auto [begin, end] = by_storage_.equal_range(storage_address(operand));
  for (auto entry = begin; entry != end; ++entry) {
    Fp8Weight& weight = weights[entry->second];
    const at::Tensor& whole = weight.tensor;
    if (storage_address(whole) != entry->first) continue;
    if (const auto extent = residency::weight_view(operand, whole); extent != residency::WeightView::part)
      return FoundWeight{&weight, extent == residency::WeightView::turned};
  }
  return {};
}

void Core::settle() {
  if (forward && forward->has_recorded()) forward->update(reduction), ++counts.updates;
  if (backward && backward->has_recorded()) backward->update(reduction), ++counts.updates;
}

}  // namespace accelerate::fp8
