#pragma once

/// Products of codes without decoding them as a whole. Which weights are codes and when these are called is the codes
/// handler's matter (src/residency); these are plain functions for whoever has codes.

#include <ATen/core/Tensor.h>

#include <optional>

#include "accelerate/codes/codes.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::codes {

struct LinearOptions {
  /// Computes with decoded weights, a part of them at a time, in x's dtype, as at::linear would. Otherwise x is rounded
  /// to 8 bits in parts of 32 columns with a scale each, which changes products by about half a percent of their norm;
  /// sums are fp32.
  bool exact = false;
  /// Of int8_rowwise: columns of x with a magnitude of at least this in any row keep their numbers, as LLM.int8() does;
  /// bitsandbytes' default is 6. 0: none do.
  double outlier_threshold = 0;
};

/// y = x w^T + bias for a weight in few bits, for codes on the CPU with AVX-512 (VNNI), AVX2 or neither, as the
/// processor has it and ATEN_CPU_CAPABILITY allows. At the first product, codes are copied in the order of products
/// (packed_bytes()); q2_k and q3_k, and nf4 and fp4 whose blocks go on from row to row, have none and are always exact.
///
/// On another device, where codes::to() brought the weight, all products are exact.
///
/// Where a gradient is wanted for x or the bias it is computed exactly, forwards and backwards. The weight has none.
/// @param x  [.., K], fp32, fp16 or bf16. @param w  [N, K]. @param bias  [N] or none
/// @return  [.., N] of x's dtype. Rows of x that have a NaN or an infinite number become NaN.
/// @throws ShapeError for sizes that don't fit; ConfigError for another device or dtype, or outliers of another
/// encoding
ACCELERATE_API at::Tensor linear(const at::Tensor& x, const Codes& w,
                                 const std::optional<at::Tensor>& bias = std::nullopt,
                                 const LinearOptions& options = {});

/// Bytes that products keep beside these codes: as many as the codes have, in another order (and what fills up groups
/// of 16 rows). 0 before the first product.
ACCELERATE_API int64_t packed_bytes(const Codes& codes);
/// Frees them. The next product makes them again; products that are under way keep theirs.
ACCELERATE_API void drop_packed(const Codes& codes);

/// y = x w^T + bias for a weight in few bits, where that is faster than decoding it.
/// @param x  [.., K], fp32, fp16 or bf16. @param w  [N, K]. @param bias  [N] or none
/// @return  [.., N] of x's dtype, or undefined where nothing is faster than decoding: then the caller decodes
using LinearKernel = at::Tensor (*)(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias);

/// What is there for an encoding; null where there is nothing.
struct Kernels {
  LinearKernel linear = nullptr;
};

/// The registry: one entry per encoding, filled at the start (src/codes/kernels.cpp has the table) and changed by tests
/// only.
ACCELERATE_API Kernels kernels_of(Encoding encoding);
/// @return the ones before. Not while others compute.
ACCELERATE_API Kernels exchange_kernels(Encoding encoding, const Kernels& kernels);

}  // namespace accelerate::codes
