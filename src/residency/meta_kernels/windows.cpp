/// Convolution, pooling, padding: operators that slide over an image.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <tuple>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;

/// Item `i` of a list in which one number stands for all dimensions.
int64_t item(c10::SymIntArrayRef list, size_t i) { return list[list.size() == 1 ? 0 : i].expect_int(); }

at::MemoryFormat format_of(const Tensor& input, const Tensor& weight) {
  const auto weights = weight.suggest_memory_format();
  return weights != at::MemoryFormat::Contiguous ? weights : input.suggest_memory_format();
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>&, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const bool batched = input.dim() == weight.dim();
  const auto spatial = static_cast<size_t>(weight.dim() - 2);
  std::vector<int64_t> sizes;
  if (batched) sizes.push_back(input.size(0));
  sizes.push_back(transposed ? weight.size(1) * groups.expect_int() : weight.size(0));
  for (size_t i = 0; i < spatial; ++i) {
    const int64_t length = input.size(static_cast<int64_t>(i) + (batched ? 2 : 1)),
                  reach = item(dilation, i) * (weight.size(static_cast<int64_t>(i) + 2) - 1);
    sizes.push_back(transposed
                        ? (length - 1) * item(stride, i) - 2 * item(padding, i) + reach + item(output_padding, i) + 1
                        : (length + 2 * item(padding, i) - reach - 1) / item(stride, i) + 1);
  }
  return at::empty(sizes,
                   input.options().memory_format(batched ? format_of(input, weight) : at::MemoryFormat::Contiguous));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::OptionalSymIntArrayRef bias_sizes, c10::SymIntArrayRef,
                                                        c10::SymIntArrayRef, c10::SymIntArrayRef, bool,
                                                        c10::SymIntArrayRef, c10::SymInt, std::array<bool, 3> wanted) {
  const auto format = format_of(input, weight);
  return {wanted[0] ? at::empty(input.sizes(), input.options().memory_format(format)) : Tensor(),
          wanted[1] ? at::empty(weight.sizes(), weight.options().memory_format(format)) : Tensor(),
          wanted[2] && bias_sizes ? at::empty(C10_AS_INTARRAYREF_SLOW(*bias_sizes), grad.options()) : Tensor()};
}

Tensor adaptive_pool(const Tensor& input, c10::SymIntArrayRef output) {
  auto sizes = input.sizes().vec();
  for (size_t i = 0; i < output.size(); ++i) sizes[sizes.size() - output.size() + i] = output[i].expect_int();
  return at::empty(sizes, input.options().memory_format(input.suggest_memory_format()));
}
Tensor adaptive_pool_backward(const Tensor&, const Tensor& input) {
  return at::empty_like(input, input.suggest_memory_format());
}

Tensor im2col(const Tensor& input, at::IntArrayRef kernel, at::IntArrayRef dilation, at::IntArrayRef padding,
              at::IntArrayRef stride) {
  int64_t windows = 1, channels = input.size(-3);
  for (size_t i = 0; i < 2; ++i) {
    windows *=
        (input.size(static_cast<int64_t>(i) - 2) + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) / stride[i] + 1;
    channels *= kernel[i];
  }
  return input.dim() == 4 ? at::empty({input.size(0), channels, windows}, input.options())
                          : at::empty({channels, windows}, input.options());
}

Tensor col2im(const Tensor& input, c10::SymIntArrayRef output, at::IntArrayRef kernel, at::IntArrayRef, at::IntArrayRef,
              at::IntArrayRef) {
  const int64_t channels = input.size(-2) / (kernel[0] * kernel[1]), height = output[0].expect_int(),
                width = output[1].expect_int();
  return input.dim() == 3 ? at::empty({input.size(0), channels, height, width}, input.options())
                          : at::empty({channels, height, width}, input.options());
}

Tensor grid_sampler_2d(const Tensor& input, const Tensor& grid, int64_t, int64_t, bool) {
  return at::empty({input.size(0), input.size(1), grid.size(1), grid.size(2)}, input.options());
}

Tensor reflection_pad2d(const Tensor& input, c10::SymIntArrayRef padding) {
  auto sizes = input.sizes().vec();
  sizes[sizes.size() - 1] += padding[0].expect_int() + padding[1].expect_int();
  sizes[sizes.size() - 2] += padding[2].expect_int() + padding[3].expect_int();
  return at::empty(sizes, input.options().memory_format(input.suggest_memory_format()));
}
Tensor reflection_pad2d_backward(const Tensor&, const Tensor& input, c10::SymIntArrayRef) {
  return at::empty_like(input, input.suggest_memory_format());
}

}  // namespace

void add_windows(torch::Library& library) {
  library.impl("convolution", TORCH_FN(convolution));
  library.impl("convolution_backward", TORCH_FN(convolution_backward));
  library.impl("_adaptive_avg_pool2d", TORCH_FN(adaptive_pool));
  library.impl("_adaptive_avg_pool3d", TORCH_FN(adaptive_pool));
  library.impl("_adaptive_avg_pool2d_backward", TORCH_FN(adaptive_pool_backward));
  library.impl("_adaptive_avg_pool3d_backward", TORCH_FN(adaptive_pool_backward));
  library.impl("im2col", TORCH_FN(im2col));
  library.impl("col2im", TORCH_FN(col2im));
  library.impl("grid_sampler_2d", TORCH_FN(grid_sampler_2d));
  library.impl("reflection_pad2d", TORCH_FN(reflection_pad2d));
  library.impl("reflection_pad2d_backward", TORCH_FN(reflection_pad2d_backward));
}

}  // namespace accelerate::meta_memory
