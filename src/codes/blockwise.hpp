#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace accelerate::codes {

/// Which values 8-bit codes stand for, before they are multiplied by their block's scale: bitsandbytes' dynamic maps,
/// whose 256 values lie closer together the nearer they are to zero.
enum class Map : uint8_t {
  dynamic,  ///< [-0.993, 1]; code 127 is zero
  /// [0, 1], twice as fine; code 0 is zero, and of zeros alone: a division by the root of a second moment must not
  /// find a zero where there was a gradient.
  dynamic_unsigned,
};
/// fp32 [256] on the CPU, rising. Made once.
const at::Tensor& values_of(Map map);

/// How a value finds its code.
enum class Search : uint8_t {
  nearest,  ///< the nearest value of the map, the lower one of two
  /// The value is rounded to one of 65536 steps in [-1, 1] first, as bitsandbytes 0.50 does on CPUs: next to zero that
  /// is coarser than the map, and zero itself becomes 1.5e-5 of the block's largest.
  on_grid,
};

/// A tensor as 8-bit codes with a scale per block of the flattened tensor.
struct Blockwise {
  at::Tensor codes;   ///< uint8, of the tensor's shape, contiguous
  at::Tensor absmax;  ///< fp32 [ceil(numel / block_size)]: the block's largest magnitude
};

/// Writes the codes of `values` into `to`, whose tensors have the sizes that they need. Nothing on the meta device.
/// A block with a NaN or an infinity gets NaN for its scale, so that all of it decodes to NaN; one whose largest
/// magnitude has no inverse in fp32 (below 2.9e-39) is zeros.
/// @param values  fp32, contiguous, on any device; elsewhere than on the CPU `nearest` only
void encode_blockwise(const at::Tensor& values, Map map, int64_t block_size, Search search, const Blockwise& to);
/// value = map[code] * absmax of its block; fp32, of the codes' shape.
/// @param out  on the CPU: contiguous memory to write to. Undefined: a tensor of its own
at::Tensor decode_blockwise(const Blockwise& from, Map map, int64_t block_size, const at::Tensor& out = {});

/// The same by operators that all devices have, `nearest`; the two above use them elsewhere than on the CPU.
void encode_by_operators(const at::Tensor& values, Map map, int64_t block_size, const Blockwise& to);
at::Tensor decode_by_operators(const Blockwise& from, Map map, int64_t block_size);

}  // namespace accelerate::codes
