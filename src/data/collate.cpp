#include "accelerate/data/collate.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <cstring>

#include "utils/raise.hpp"

namespace accelerate::data::detail {
namespace {

/// Rows can be copied byte by byte, without the dispatcher.
bool plain(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.requires_grad() && !tensor.is_conj() && !tensor.is_neg() && tensor.storage().data() != nullptr;
}

}  // namespace

at::Tensor stack_samples(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return at::empty({0});
  const at::Tensor& first = tensors[0];
  bool all_plain = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].sizes() != first.sizes())
      raise<ShapeError>(
          "DataLoader: sample {} of the batch has shape [{}], expected [{}] as sample 0 has, because the samples are "
          "stacked; pass a collate function that pads or truncates them",
          i, fmt::join(tensors[i].sizes(), ", "), fmt::join(first.sizes(), ", "));
    all_plain = all_plain && tensors[i].scalar_type() == first.scalar_type() && plain(tensors[i]);
  }
  if (!all_plain) return at::stack(tensors);
  std::vector<int64_t> sizes{static_cast<int64_t>(tensors.size())};
  sizes.insert(sizes.end(), first.sizes().begin(), first.sizes().end());
  at::Tensor batch = at::empty(sizes, at::TensorOptions().dtype(first.scalar_type()));
  const size_t bytes = first.nbytes();
  auto* out = static_cast<char*>(batch.mutable_data_ptr());
  for (size_t i = 0; i < tensors.size(); ++i) std::memcpy(out + i * bytes, tensors[i].const_data_ptr(), bytes);
  return batch;
}

at::Tensor tensor_of(const void* data, const std::vector<int64_t>& sizes, at::ScalarType type) {
  at::Tensor tensor = at::empty(sizes, at::TensorOptions().dtype(type));
  if (tensor.nbytes() > 0) std::memcpy(tensor.mutable_data_ptr(), data, tensor.nbytes());
  return tensor;
}

void throw_lengths_differ(size_t sample, size_t found, size_t expected) {
  raise<ShapeError>(
      "DataLoader: sample {} of the batch has a list of {} items, expected {} as sample 0 has; pass a collate function "
      "that pads or truncates the lists",
      sample, found, expected);
}

void throw_keys_differ(size_t sample) {
  raise<ShapeError>(
      "DataLoader: sample {} of the batch has other keys than sample 0, expected the same keys in all samples; pass a "
      "collate function that handles them",
      sample);
}

}  // namespace accelerate::data::detail
