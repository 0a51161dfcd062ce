#pragma once

/// Weights in few bits: encodings without policy. `encode` makes codes of a tensor, `decode` makes a tensor of codes;
/// who keeps codes instead of weights, and who computes on them, is said elsewhere.
///
/// - `int8_rowwise`, `nf4` and `fp4` are those of bitsandbytes 0.50, to the bit: codes, scales and decoded values.
/// - `q4_0` to `q6_k` are the blocks of GGUF files, as they lie there; decoded to the bit as the Python package `gguf`.
///
/// Codes are made on the CPU; `to` brings them to another device, where they are decoded by kernels of ours for
/// NVIDIA's GPUs, else by LibTorch's operators. Nothing here changes its arguments, and all functions may be called
/// from any thread.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate::codes {

enum class Encoding : uint8_t {
  int8_rowwise,  ///< LLM.int8()'s weights: a code in [-127, 127] per element, a scale per row
  nf4,           ///< 4 bits, quantiles of a normal distribution; a scale per block of the flattened tensor
  fp4,           ///< 4 bits, sign, two bits of exponent, one of mantissa; a scale per block of the flattened tensor
  q4_0,          ///< 32 elements in 18 bytes: fp16 scale d, 16 bytes of codes; (q - 8) * d
  q4_1,          ///< 32 elements in 20 bytes: fp16 scale d and least value m, 16 bytes of codes; q * d + m
  q5_0,          ///< 32 elements in 22 bytes: fp16 scale, 32 fifth bits, 16 bytes of codes; (q - 16) * d
  q5_1,          ///< 32 elements in 24 bytes: fp16 scale and least value, 32 fifth bits, 16 bytes of codes
  q8_0,          ///< 32 elements in 34 bytes: fp16 scale, 32 signed bytes
  q2_k,          ///< 256 elements in 84 bytes: scales and least values of 4 bits for 16 groups
  q3_k,          ///< 256 elements in 110 bytes: scales of 6 bits for 16 groups
  q4_k,          ///< 256 elements in 144 bytes: scales and least values of 6 bits for 8 groups
  q5_k,          ///< 256 elements in 176 bytes: as q4_k, with a fifth bit
  q6_k,          ///< 256 elements in 210 bytes: scales of 8 bits for 16 groups
};
inline constexpr size_t kEncodings = 13;

/// "int8_rowwise", "nf4", "q4_k" …
ACCELERATE_API std::string_view name(Encoding encoding);
/// The inverse, in small or capital letters (GGUF writes "Q4_K"); none for names that are no encoding of ours.
ACCELERATE_API std::optional<Encoding> encoding_named(std::string_view name);
/// One of GGUF's blocks: `data` holds scales too.
constexpr bool is_gguf(Encoding encoding) { return encoding >= Encoding::q4_0; }
/// nf4 and fp4: two codes in a byte, one scale per block of Codes::block_size elements.
constexpr bool is_four_bit(Encoding encoding) { return encoding == Encoding::nf4 || encoding == Encoding::fp4; }

/// The 16 values that codes of nf4 or fp4 stand for, before they are multiplied by their block's scale.
/// @throws InternalError for other encodings.
ACCELERATE_API c10::ArrayRef<float> table(Encoding encoding);
/// The 256 values that the codes of scales stand for (`Nested`), rising: bitsandbytes' signed dynamic map.
ACCELERATE_API c10::ArrayRef<float> dynamic_map();

/// Scales that are codes themselves ("double quantization"): scale[i] = dynamic_map()[code[i]] * absmax[i / block_size]
/// + offset.
struct Nested {
  at::Tensor absmax;         ///< fp32 [ceil(scales / block_size)]
  int64_t block_size = 256;  ///< scales that share one entry of absmax
  float offset = 0;          ///< the mean of the scales
};

/// The copy that products keep beside codes, see packed_bytes() in kernels.hpp.
struct PackedCache;
ACCELERATE_API std::shared_ptr<PackedCache> new_packed_cache();

/// A tensor in few bits. Copies share the codes. All of its tensors are on one device.
struct Codes {
  Encoding encoding = Encoding::nf4;
  std::vector<int64_t> shape;         ///< of the tensor; int8_rowwise and GGUF's: at least one dimension
  at::ScalarType dtype = at::kFloat;  ///< of the tensor that was encoded, and of what decode() makes by default
  /// Contiguous. By encoding:
  /// - int8_rowwise: int8, of `shape`. Rows are what the tensor has along its last dimension.
  /// - nf4, fp4: uint8 [(numel + 1) / 2, 1]; elements 2i and 2i + 1 of the flattened tensor in the high and the low
  ///   half of byte i. An odd tensor's last half is the code of zero.
  /// - GGUF's: uint8 [rows, bytes of a row]; a row is a whole number of blocks.
  /// On the meta device, without memory, where keep_once() has taken them (kernels.hpp).
  at::Tensor data;
  /// int8_rowwise: fp32 [rows], the largest magnitude of the row; a value is code * scale / 127.
  /// nf4, fp4: fp32 [ceil(numel / block_size)], or uint8 of that shape with `nested`. GGUF's: undefined.
  at::Tensor scales;
  int64_t block_size = 0;  ///< nf4, fp4: elements that share a scale; else 0
  std::optional<Nested> nested;
  std::shared_ptr<PackedCache> packed = new_packed_cache();  ///< shared by copies; null: products keep nothing

  at::Device device() const;  ///< of all tensors
  int64_t numel() const;
  int64_t rows() const;     ///< numel / columns; 1 for a vector
  int64_t columns() const;  ///< size of the last dimension
  int64_t bytes() const;    ///< of all tensors together, without packed_bytes()
};

struct EncodeOptions {
  /// Any. GGUF's blocks of 32 are made to the bit as the Python package `gguf` makes them. It has no encoder for the K
  /// family: ours makes the sum of squared errors small there, with the same codes on all processors.
  Encoding encoding = Encoding::nf4;
  /// Of nf4 and fp4: 32, 64, 128, 256, 512, 1024, 2048 or 4096 elements to a scale.
  int64_t block_size = 64;
  /// Of nf4 and fp4: scales as codes of 8 bits (0.37 bits less per element; the error of a scale is 0.2 %).
  bool double_quantize = false;
};

/// The same codes on another device; shared with `codes` if they are there already. Blocks until they are there.
ACCELERATE_API Codes to(const Codes& codes, const at::Device& device);

/// @param values  fp32, fp16 or bf16, on the CPU, any strides; may be empty. int8_rowwise: [.., K]. GGUF's: a last
/// dimension that is a whole number of blocks.
/// @throws ShapeError for sizes that the encoding can't have; ConfigError for an infinite or undefined (NaN) value,
/// with its place, another dtype, a block size or an encoding that is not offered.
ACCELERATE_API Codes encode(const at::Tensor& values, const EncodeOptions& options);

/// @return  contiguous, of codes.shape, a tensor of its own, where the codes are
/// @param dtype  fp32, fp16 or bf16; default: codes.dtype. Rounded once, from fp32.
/// @throws as check()
ACCELERATE_API at::Tensor decode(const Codes& codes, std::optional<at::ScalarType> dtype = std::nullopt);

/// Decodes rows [first, first + count) only; shape[0 .. n - 1] seen as one dimension.
/// @return  [count, columns]. @throws as check(), and ShapeError for rows that are not there
ACCELERATE_API at::Tensor decode_rows(const Codes& codes, int64_t first, int64_t count,
                                      std::optional<at::ScalarType> dtype = std::nullopt);

/// Rows of a table in few bits: decode() of those rows, to the bit, and of no others.
/// @param indices  int64 or int32, of any shape, where the codes are. @param w  [N, K]. @param dtype  as of decode()
/// @return  [.., K]. @throws as check(), ShapeError for an index that is not there, ConfigError for other indices
ACCELERATE_API at::Tensor embedding(const at::Tensor& indices, const Codes& w,
                                    std::optional<at::ScalarType> dtype = std::nullopt);

/// Writes decode()'s values into memory of the caller where the codes are: contiguous, of as many elements, fp32, fp16
/// or bf16.
ACCELERATE_API void decode_into(const Codes& codes, const at::Tensor& values);

/// fp32, one per row or block: Codes::scales, decoded if they are codes. @throws ShapeError for GGUF's blocks
ACCELERATE_API at::Tensor plain_scales(const Codes& codes);

/// @throws ShapeError naming the first tensor, size, dtype or block size that does not fit the others. `what` begins
/// the message, such as a weight's name.
ACCELERATE_API void check(const Codes& codes, std::string_view what = "codes");

}  // namespace accelerate::codes
