#include "codes/decode_by_operators.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "codes/blockwise.hpp"
#include "codes/encodings.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

// Blocks are rows of a matrix of bytes here. Each number is worked out with the operations, and in the order, of
// formats/gguf_encodings.cpp, so that both agree to the bit; what bytes mean is said there.

at::Tensor bytes_of(const at::Tensor& blocks, int64_t first, int64_t count) { return blocks.narrow(1, first, count); }

/// The fp16 number at this byte of each block: fp32 [blocks, 1].
at::Tensor half_at(const at::Tensor& blocks, int64_t first) {
  return bytes_of(blocks, first, 2).contiguous().view(at::kHalf).to(at::kFloat);
}

at::Tensor bits(const at::Tensor& bytes, int64_t mask) { return bytes.bitwise_and(mask); }
at::Tensor right(const at::Tensor& bytes, int64_t distance) { return bytes.bitwise_right_shift(distance); }
at::Tensor left(const at::Tensor& bytes, int64_t distance) { return bytes.bitwise_left_shift(distance); }
at::Tensor as_signed(const at::Tensor& bytes) { return bytes.contiguous().view(at::kChar); }

/// 16 bytes, 32 codes: low halves, then high halves.
at::Tensor nibbles(const at::Tensor& bytes) { return at::cat({bits(bytes, 15), right(bytes, 4)}, -1); }

/// For parts of as many codes as `bytes` has, which follow each other from the lowest bit on: [blocks, parts * bytes].
at::Tensor fields(const at::Tensor& bytes, int64_t width) {
  std::vector<at::Tensor> parts;
  for (int64_t shift = 0; shift < 8; shift += width)
    parts.push_back(bits(right(bytes, shift), (int64_t{1} << width) - 1));
  return at::cat(parts, -1);
}

/// 4 bytes, 32 bits, little-endian, each times 16.
at::Tensor fifth_bits(const at::Tensor& bytes) {
  const at::Tensor distance = at::arange(8, bytes.options());
  return left(bits(bytes.unsqueeze(-1).bitwise_right_shift(distance), 1), 4).flatten(1);
}

at::Tensor q4_0(const at::Tensor& b) { return half_at(b, 0) * (nibbles(bytes_of(b, 2, 16)).to(at::kFloat) - 8); }
at::Tensor q4_1(const at::Tensor& b) {
  return half_at(b, 0) * nibbles(bytes_of(b, 4, 16)).to(at::kFloat) + half_at(b, 2);
}
at::Tensor q5_0(const at::Tensor& b) {
  const at::Tensor codes = nibbles(bytes_of(b, 6, 16)).bitwise_or(fifth_bits(bytes_of(b, 2, 4)));
  return half_at(b, 0) * (codes.to(at::kFloat) - 16);
}
at::Tensor q5_1(const at::Tensor& b) {
  const at::Tensor codes = nibbles(bytes_of(b, 8, 16)).bitwise_or(fifth_bits(bytes_of(b, 4, 4)));
  return half_at(b, 0) * codes.to(at::kFloat) + half_at(b, 2);
}
at::Tensor q8_0(const at::Tensor& b) { return as_signed(bytes_of(b, 2, 32)).to(at::kFloat) * half_at(b, 0); }

/// [blocks, groups * n] seen as [blocks, groups, n].
at::Tensor grouped(const at::Tensor& values, int64_t groups) { return values.unflatten(1, {groups, -1}); }

at::Tensor q2_k(const at::Tensor& b) {
  const at::Tensor q = bytes_of(b, 16, 64), scales = bytes_of(b, 0, 16);
  const at::Tensor codes = at::cat({fields(q.narrow(1, 0, 32), 2), fields(q.narrow(1, 32, 32), 2)}, 1);
  const at::Tensor scale = half_at(b, 80) * bits(scales, 15).to(at::kFloat),
                   least = half_at(b, 82) * right(scales, 4).to(at::kFloat);
  return scale.unsqueeze(-1) * grouped(codes, 16).to(at::kFloat) - least.unsqueeze(-1);
}

at::Tensor q3_k(const at::Tensor& b) {
  const at::Tensor q = bytes_of(b, 32, 64), packed = bytes_of(b, 96, 12);
  const at::Tensor low = at::cat({fields(q.narrow(1, 0, 32), 2), fields(q.narrow(1, 32, 32), 2)}, 1);
  const at::Tensor third = fields(bytes_of(b, 0, 32), 1);  // part i is bit i of each of the 32 bytes
  const at::Tensor codes = low.to(at::kFloat) - (1 - third.to(at::kFloat)) * 4;
  const at::Tensor lower = nibbles(packed.narrow(1, 0, 8)), upper = fields(packed.narrow(1, 8, 4), 2);
  const at::Tensor scale = half_at(b, 108) * (lower.bitwise_or(left(upper, 4)).to(at::kFloat) - 32);
  return scale.unsqueeze(-1) * grouped(codes, 16);
}

/// Scales and least values of Q4_K and Q5_K, each [blocks, 8, 1].
std::pair<at::Tensor, at::Tensor> six_bit_pairs(const at::Tensor& b) {
  const at::Tensor first = bytes_of(b, 4, 4), second = bytes_of(b, 8, 4), third = bytes_of(b, 12, 4);
  const at::Tensor scale = at::cat({bits(first, 63), bits(third, 15).bitwise_or(bits(right(first, 2), 48))}, 1),
                   least = at::cat({bits(second, 63), right(third, 4).bitwise_or(bits(right(second, 2), 48))}, 1);
  return {(half_at(b, 0) * scale.to(at::kFloat)).unsqueeze(-1), (half_at(b, 2) * least.to(at::kFloat)).unsqueeze(-1)};
}

/// Each 32 of 128 bytes hold the codes of two parts.
at::Tensor pairs_of_parts(const at::Tensor& bytes) {
  const at::Tensor parts = grouped(bytes, 4);
  return at::stack({bits(parts, 15), right(parts, 4)}, 2).flatten(1, 2);  // [blocks, 8, 32]
}

at::Tensor q4_k(const at::Tensor& b) {
  const auto [scale, least] = six_bit_pairs(b);
  return scale * pairs_of_parts(bytes_of(b, 16, 128)).to(at::kFloat) - least;
}

at::Tensor q5_k(const at::Tensor& b) {
  const auto [scale, least] = six_bit_pairs(b);
  const at::Tensor fifth = grouped(fields(bytes_of(b, 16, 32), 1), 8);
  return scale * pairs_of_parts(bytes_of(b, 48, 128)).bitwise_or(left(fifth, 4)).to(at::kFloat) - least;
}

at::Tensor q6_k(const at::Tensor& b) {
  std::vector<at::Tensor> halves;
  for (int64_t half = 0; half < 2; ++half) {
    // 128 codes: low halves of 64 bytes, then their high halves; two bits each of 32 bytes.
    const at::Tensor low = fields(bytes_of(b, 64 * half, 64), 4), high = fields(bytes_of(b, 128 + 32 * half, 32), 2);
    halves.push_back(low.bitwise_or(left(high, 4)));
  }
  const at::Tensor scale = half_at(b, 208) * as_signed(bytes_of(b, 192, 16)).to(at::kFloat);
  return scale.unsqueeze(-1) * (grouped(at::cat(halves, 1), 16).to(at::kFloat) - 32);
}

at::Tensor decoded_blocks(Encoding encoding, const at::Tensor& blocks) {
  switch (encoding) {
    case Encoding::q4_0:
      return q4_0(blocks);
    case Encoding::q4_1:
      return q4_1(blocks);
    case Encoding::q5_0:
      return q5_0(blocks);
    case Encoding::q5_1:
      return q5_1(blocks);
    case Encoding::q8_0:
      return q8_0(blocks);
    case Encoding::q2_k:
      return q2_k(blocks);
    case Encoding::q3_k:
      return q3_k(blocks);
    case Encoding::q4_k:
      return q4_k(blocks);
    case Encoding::q5_k:
      return q5_k(blocks);
    case Encoding::q6_k:
      return q6_k(blocks);
    default:
      raise<InternalError>("codes: {} is not made of blocks", name(encoding));
  }
}

at::Tensor on_device_of(c10::ArrayRef<float> values, const at::Tensor& other) {
  return at::tensor(values, at::TensorOptions().dtype(at::kFloat)).to(other.device());
}

/// fp32 [end - begin]: scales of these blocks.
at::Tensor scales_of(const Codes& codes, int64_t begin, int64_t end) {
  const at::Tensor scales = codes.scales.narrow(0, begin, end - begin);
  if (!codes.nested) return scales;
  const at::Tensor which = at::arange(begin, end, scales.options().dtype(at::kLong));
  return on_device_of(dynamic_map(), scales).index_select(0, scales.to(at::kInt)) *
             codes.nested->absmax.index_select(0, which.floor_divide(codes.nested->block_size)) +
         codes.nested->offset;
}

/// Elements [begin, end) of the flattened tensor.
at::Tensor four_bits(const Codes& codes, int64_t begin, int64_t end) {
  const int64_t size = codes.block_size, first = begin / size, last = (end + size - 1) / size;
  const int64_t from = first * size, until = std::min(last * size, codes.numel());
  const at::Tensor bytes = codes.data.view({-1}).narrow(0, from / 2, (until + 1) / 2 - from / 2);
  const at::Tensor indices = at::stack({right(bytes, 4), bits(bytes, 15)}, -1).view({-1}).to(at::kInt);
  at::Tensor values = on_device_of(table(codes.encoding), bytes).index_select(0, indices);
  values = at::constant_pad_nd(values, {0, (last - first) * size - values.numel()}).view({last - first, size});
  return (values * scales_of(codes, first, last).unsqueeze(1)).view({-1}).narrow(0, begin - from, end - begin);
}

}  // namespace

at::Tensor rows_by_operators(const Codes& codes, const at::Tensor& indices) {
  const int64_t count = indices.numel();
  Codes chosen = codes;
  chosen.shape = {count, codes.columns()};
  if (!is_four_bit(codes.encoding)) {
    chosen.data = codes.data.index_select(0, indices);
    if (codes.scales.defined()) chosen.scales = codes.scales.index_select(0, indices);
    return decode_by_operators(chosen, 0, count, at::kFloat);
  }
  if (codes.columns() % codes.block_size == 0) {
    chosen.data = codes.data.view({codes.rows(), -1}).index_select(0, indices);
    chosen.scales = scales_by_operators(codes).view({codes.rows(), -1}).index_select(0, indices).view({-1});
    chosen.nested.reset();
    return decode_by_operators(chosen, 0, count, at::kFloat);
  }
  const at::Tensor values = codes.data.new_empty({count, codes.columns()}, at::kFloat);
  const at::Tensor rows = indices.to(at::kCPU, at::kLong);
  for (int64_t i = 0; i < count; ++i)
    values.select(0, i).copy_(decode_by_operators(codes, rows[i].item<int64_t>(), 1, at::kFloat).select(0, 0));
  return values;
}

at::Tensor scales_by_operators(const Codes& codes) { return scales_of(codes, 0, codes.scales.numel()); }

at::Tensor decode_by_operators(const Codes& codes, int64_t first, int64_t count, at::ScalarType dtype) {
  const int64_t columns = codes.columns();
  at::Tensor values;
  if (count == 0 || columns == 0) {
    values = codes.data.new_empty({0}, at::kFloat);
  } else if (codes.encoding == Encoding::int8_rowwise) {
    constexpr float kInverse = 7.874015718698502e-3F;  // 1 / 127, as bitsandbytes writes it
    values = codes.data.view({-1, columns}).narrow(0, first, count).to(at::kFloat) *
             codes.scales.narrow(0, first, count).unsqueeze(1) * kInverse;
  } else if (is_four_bit(codes.encoding)) {
    values = four_bits(codes, first * columns, (first + count) * columns);
  } else {
    values = decoded_blocks(
        codes.encoding, codes.data.narrow(0, first, count).reshape({-1, gguf_encoding(codes.encoding).block_bytes}));
  }
  return values.reshape({count, columns}).to(dtype);
}

}  // namespace accelerate::codes
