#pragma once

/// Operations over nested batches that need no other rank. Source: features table 1.7; conformance nested_ops.json.

#include <c10/core/Device.h>

#include "accelerate/utils/nested.hpp"

namespace accelerate {

struct PadOptions {
  int64_t dim = 0;         ///< dimension to pad; negative counts from the end
  double pad_index = 0;    ///< value of the padding
  bool pad_first = false;  ///< padding goes in front
};

namespace ops {
/// The same on one tensor; sources in src/utils/ops.cpp.
ACCELERATE_API at::Tensor to_device(const at::Tensor& tensor, const at::Device& device, bool non_blocking);
ACCELERATE_API at::Tensor slice(const at::Tensor& tensor, int64_t begin, int64_t end);
ACCELERATE_API at::Tensor concatenate(const std::vector<at::Tensor>& tensors, int64_t dim);
ACCELERATE_API at::Tensor stack(const std::vector<at::Tensor>& tensors);
ACCELERATE_API at::Tensor pin_memory(const at::Tensor& tensor);
/// Pads `dim` to `size`. @throws ShapeError when the tensor is already longer.
ACCELERATE_API at::Tensor pad_to(const at::Tensor& tensor, int64_t size, const PadOptions& options);
/// Appends rows of zeros by the reference's own formula, up to ceil(batch_size / P) * P rows in total.
ACCELERATE_API at::Tensor pad_rows(const at::Tensor& tensor, int64_t batch_size, int64_t num_processes, int64_t dim);
ACCELERATE_API at::Tensor to_fp32(const at::Tensor& tensor);
ACCELERATE_API int64_t batch_size(const at::Tensor& tensor);
}  // namespace ops

/// A copy of `data` with f(tensor) in place of each tensor.
template <class F, class T> T recursively_apply(F&& f, const T& data) { return nested::map_tensors(data, f); }

/// Moves every tensor. With non_blocking and pinned memory copies may run on when this returns; streams keep the order.
template <class T> T send_to_device(const T& data, const at::Device& device, bool non_blocking = false) {
  return nested::map_tensors(data, [&](const at::Tensor& t) { return ops::to_device(t, device, non_blocking); });
}

/// Rows [begin, end) of every tensor, as views.
template <class T> T slice_tensors(const T& data, int64_t begin, int64_t end) {
  return nested::map_tensors(data, [&](const at::Tensor& t) { return ops::slice(t, begin, end); });
}

/// Concatenates batches of equal structure, tensor by tensor. @throws ShapeError for differing structures or no data.
template <class T> T concatenate(const std::vector<T>& data, int64_t dim = 0) {
  std::vector<const T*> pointers;
  for (const T& item : data) pointers.push_back(&item);
  return nested::combine_tensors<T>(std::span<const T* const>(pointers), [dim](const std::vector<at::Tensor>& tensors) {
    return ops::concatenate(tensors, dim);
  });
}

/// Rows of the first tensor found (depth first), or nothing without one. @throws ShapeError for a scalar tensor.
template <class T> std::optional<int64_t> ignorant_find_batch_size(const T& data) {
  std::optional<int64_t> found;
  nested::for_each_tensor(data, [&](const at::Tensor& t) {
    if (!found) found = ops::batch_size(t);
  });
  return found;
}

/// As above, but having no tensor is an error. @throws ShapeError.
template <class T> int64_t find_batch_size(const T& data) {
  if (const auto found = ignorant_find_batch_size(data)) return *found;
  throw ShapeError(
      "find_batch_size: found no tensor in the batch, expected at least one whose first dimension is the batch; the "
      "batch may be empty or hold plain values only");
}

template <class T> T pad_input_tensors(const T& data, int64_t batch_size, int64_t num_processes, int64_t dim = 0) {
  return nested::map_tensors(data,
                             [&](const at::Tensor& t) { return ops::pad_rows(t, batch_size, num_processes, dim); });
}

/// fp16 and bf16 tensors become fp32; all else stays.
template <class T> T convert_to_fp32(const T& data) {
  return nested::map_tensors(data, [](const at::Tensor& t) { return ops::to_fp32(t); });
}

}  // namespace accelerate
