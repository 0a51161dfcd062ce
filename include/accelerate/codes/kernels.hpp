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

/// y = x w^T + bias for a weight in few bits, for codes on the CPU with AVX-512 (VNNI) or AVX2, as the processor
/// has it and ATEN_CPU_CAPABILITY allows; with neither, products are exact. At the first product, codes are copied in
/// the order of products (packed_bytes()); q2_k and q3_k, and nf4 and fp4 whose blocks go on from row to row, have none
/// and are always exact.
///
/// On another device, where codes::to() brought the weight, all products are exact: sums of decoded weights times x, in
/// fp32 up to 8 rows of x on NVIDIA's GPUs (a kernel that decodes nothing to memory), else as at::linear's.
///
/// If x or the bias wants a gradient, the product is computed exactly, forwards and backwards. The weight has no
/// gradient.
/// @param x  [.., K], fp32, fp16 or bf16. @param w  [N, K]. @param bias  [N] or none
/// @return  [.., N] of x's dtype. Rows of x that have a NaN or an infinite number become NaN, but for
/// infinite ones in columns that outlier_threshold leaves as they are.
/// @throws ShapeError for sizes that don't fit; ConfigError for another device or dtype, or outliers of another
/// encoding
ACCELERATE_API at::Tensor linear(const at::Tensor& x, const Codes& w,
                                 const std::optional<at::Tensor>& bias = std::nullopt,
                                 const LinearOptions& options = {});

/// Bytes that products keep beside these codes, or in their place (keep_once()): as many as the codes have, in another
/// order (and what fills up groups of 16 rows, and scales of nf4 and fp4 as fp32). 0 before the first product.
ACCELERATE_API int64_t packed_bytes(const Codes& codes);
/// Frees them; of codes that are kept once, it puts these into their own order again. The next product makes them anew;
/// products that are under way keep theirs.
ACCELERATE_API void drop_packed(const Codes& codes);

/// Gives the codes' memory up as soon as a product has put them into its own order: then there is one copy of them, and
/// not two. The codes keep their data themselves from now on; in the place of `codes.data`, and of scales of nf4 and
/// fp4 that are no codes, are tensors without memory (on the meta device) of the same sizes. The functions here
/// (decode(), embedding(), linear() …) work as before; unpacked() has them to the bit.
/// @param codes    of its copies from before, each keeps the data that it has
/// @param in_file  the data is in a mapped file, where it stays; its pages, which the file has anyway, may go from
///                 memory instead. Nobody may have written to them
/// @return false where products have no order of their own: then nothing has changed. @throws as check()
ACCELERATE_API bool keep_once(Codes& codes, bool in_file = false);
/// The same codes with data: themselves, or those that are kept once, put back into their own order.
ACCELERATE_API Codes unpacked(const Codes& codes);

/// y = x w^T + bias for a weight in few bits, where that is faster than decoding it.
/// @param x  [.., K], fp32, fp16 or bf16. @param w  [N, K]. @param bias  [N] or none
/// @return  [.., N] of x's dtype, or undefined where nothing is faster than decoding: then the caller decodes
using LinearKernel = at::Tensor (*)(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias);

/// The kernels for an encoding; null where there is none.
struct Kernels {
  LinearKernel linear = nullptr;
};

/// The registry: one entry per encoding, filled at the start (src/codes/kernels.cpp has the table) and changed by tests
/// only.
ACCELERATE_API Kernels kernels_of(Encoding encoding);
/// @return the ones before. Not while others compute.
ACCELERATE_API Kernels exchange_kernels(Encoding encoding, const Kernels& kernels);

}  // namespace accelerate::codes
