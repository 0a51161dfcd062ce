#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codes/blockwise.hpp"
#include "codes/encodings.hpp"
#include "codes/half_scale.hpp"
#include "codes/k_blocks.hpp"
#include "memory/huge_pages.hpp"
#include "utils/parallel.hpp"
#include "utils/raise.hpp"

// Numbers are worked out with the operations, in the order, and with the roundings that bitsandbytes and gguf use, so
// that codes agree to the bit. (gguf has none for the K family: k_blocks.cpp is our own.)

namespace accelerate::codes {
namespace {

constexpr int64_t kGrain = 1 << 15;  ///< elements that are worth a thread

/// Codes, and values on the way to them: what stays between the places of what comes and goes would keep those from
/// being used for the next, larger values (2 GB for a model of 1.5 billion).
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) { return empty_in_huge_pages(sizes, dtype); }

void refuse_values_without_codes(const at::Tensor& flat) {
  const auto* values = flat.const_data_ptr<float>();
  const int64_t count = flat.numel();
  constexpr uint32_t kExponent = 0x7F800000;
  uint32_t odd = 0;
  for (int64_t i = 0; i < count; ++i) odd |= (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent ? 1 : 0;
  if (!odd) return;
  const int64_t place = std::find_if(values, values + count, [](float x) { return !std::isfinite(x); }) - values;
  raise<ConfigError>(
      "encode: element {} of the flattened tensor is {}, expected finite values: no code stands for it. A weight that "
      "was trained into it, or a damaged file, is likely; look where it comes from",
      place, values[place]);
}

/// The inverse of zero, or of so little that fp32 has no inverse of it, counts as zero.
float finite_or_zero(float x) { return std::isfinite(x) ? x : 0; }

void encode_rows(const at::Tensor& flat, Codes& codes) {
  const int64_t columns = codes.columns(), rows = codes.rows();
  codes.data = empty(codes.shape, at::kChar);
  codes.scales = empty({rows}, at::kFloat);
  const auto* from = flat.const_data_ptr<float>();
  auto* to = codes.data.mutable_data_ptr<int8_t>();
  auto* scales = codes.scales.mutable_data_ptr<float>();
  parallel_ranges(rows, std::max<int64_t>(kGrain / std::max<int64_t>(columns, 1), 1), [&](int64_t begin, int64_t end) {
    for (const int64_t row : c10::irange(begin, end)) {
      const float* values = from + row * columns;
      float most = 0;
      for (int64_t k = 0; k < columns; ++k) most = std::max(most, std::abs(values[k]));
      const float inverse = finite_or_zero(1 / most * 127);  // in this order: PyTorch divides so
      scales[row] = most;
      for (int64_t k = 0; k < columns; ++k)
        to[row * columns + k] = static_cast<int8_t>(std::nearbyint(values[k] * inverse));
    }
  });
}

/// The 15 values between neighbours of the table, and the code of each place between them.
struct Nearest {
  std::array<float, 15> middles{};
  std::array<uint8_t, 16> codes{};

  explicit Nearest(Encoding encoding) {
    // fp4 has two zeros: the positive one is for zero and what is below it, the negative one for what is above.
    constexpr std::array<uint8_t, 16> kFp4{11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3};
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = encoding == Encoding::nf4 ? static_cast<uint8_t>(i) : kFp4[i];
    for (size_t i = 0; i < middles.size(); ++i)
      middles[i] = (table(encoding)[codes[i]] + table(encoding)[codes[i + 1]]) / 2;
  }
};

/// One block: at most 4096 elements. Without branches, so that compilers vectorise it.
void nearest_codes(const Nearest& nearest, const float* __restrict values, int64_t count, bool whole, float most,
                   uint8_t* __restrict codes) {
  constexpr float kLeast = 1e-38F;
  const float divisor = std::max(most, kLeast), inverse = 1 / divisor;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = std::clamp(whole ? values[i] * inverse : values[i] / divisor, -1.0F, 1.0F);
    int place = 0;
    for (const float middle : nearest.middles) place += scaled > middle ? 1 : 0;
    codes[i] = static_cast<uint8_t>(place);
  }
  for (int64_t i = 0; i < count; ++i) codes[i] = nearest.codes[codes[i]];
}

void encode_four_bits(const at::Tensor& flat, Codes& codes) {
  const Nearest nearest(codes.encoding);
  const int64_t numel = flat.numel(), size = codes.block_size, blocks = (numel + size - 1) / size;
  codes.data = empty({(numel + 1) / 2, 1}, at::kByte);
  codes.scales = empty({blocks}, at::kFloat);
  const auto* from = flat.const_data_ptr<float>();
  auto* to = codes.data.mutable_data_ptr<uint8_t>();
  auto* scales = codes.scales.mutable_data_ptr<float>();
  parallel_ranges(blocks, std::max<int64_t>(kGrain / size, 1), [&](int64_t begin, int64_t end) {
    std::array<uint8_t, 4097> halves{};
    for (const int64_t block : c10::irange(begin, end)) {
      const float* values = from + block * size;
      const int64_t count = std::min(size, numel - block * size);
      float most = 0;
      for (int64_t i = 0; i < count; ++i) most = std::max(most, std::abs(values[i]));
      const bool whole = count == size;
      scales[block] = whole ? most : std::max(most, 1e-38F);  // bitsandbytes stores the least divisor of a rest only
      nearest_codes(nearest, values, count, whole, most, halves.data());
      if (count % 2) halves[static_cast<size_t>(count)] = nearest.codes[7];  // of zero
      for (int64_t i = 0; i < count; i += 2)
        to[(block * size + i) / 2] =
            static_cast<uint8_t>(halves[static_cast<size_t>(i)] << 4 | halves[static_cast<size_t>(i) + 1]);
    }
  });
}

void double_quantize(Codes& codes) {
  const at::Tensor plain = codes.scales;
  if (plain.numel() == 0)
    raise<ShapeError>("encode: the tensor is empty, so its scales have no mean; expected double_quantize = false");
  const at::Tensor mean = plain.mean(), rest = empty(plain.sizes(), at::kFloat).copy_(plain).sub_(mean);
  Nested nested;
  nested.offset = mean.item<float>();
  nested.absmax = empty({(rest.numel() + nested.block_size - 1) / nested.block_size}, at::kFloat);
  codes.scales = empty({rest.numel()}, at::kByte);
  // bitsandbytes' files hold what its grid for CPUs gives.
  encode_blockwise(rest, Map::dynamic, nested.block_size, Search::on_grid,
                   {.codes = codes.scales, .absmax = nested.absmax});
  codes.nested = std::move(nested);
}

// --- GGUF's blocks of 32
// -----------------------------------------------------------------------------------------------

constexpr int kBlock = 32;

void put_half(float value, uint8_t*& to) {
  const c10::Half half = half_scale(value);
  std::memcpy(to, &half.x, sizeof half.x);
  to += sizeof half.x;
}

/// 1 / x; 0 where that can't be had.
float inverse_of(float x) { return finite_or_zero(1 / x); }

/// Low halves of the bytes are the first 16 codes, high halves the others; fifth bits come before, if there are.
void put_codes(const std::array<uint8_t, kBlock>& codes, bool fifth, uint8_t*& to) {
  if (fifth) {
    uint32_t bits = 0;
    for (size_t i = 0; i < kBlock; ++i) bits |= static_cast<uint32_t>(codes[i] >> 4) << i;
    std::memcpy(to, &bits, sizeof bits);
    to += sizeof bits;
  }
  for (size_t i = 0; i < kBlock / 2; ++i) *to++ = static_cast<uint8_t>((codes[i] & 15) | codes[i + kBlock / 2] << 4);
}

/// q4_0, q5_0: the element of the largest magnitude gets the least code.
void encode_symmetric(const float* x, int bits, uint8_t* to) {
  const float most = *std::max_element(x, x + kBlock, [](float a, float b) { return std::abs(a) < std::abs(b); });
  const auto half = static_cast<float>(1 << (bits - 1));
  const float d = most / -half, inverse = inverse_of(d);
  std::array<uint8_t, kBlock> codes{};
  for (size_t i = 0; i < kBlock; ++i)
    codes[i] = static_cast<uint8_t>(std::clamp(std::trunc(x[i] * inverse + (half + 0.5F)), 0.0F, 2 * half - 1));
  put_half(d, to);
  put_codes(codes, bits == 5, to);
}

/// q4_1, q5_1: from the least to the largest element.
void encode_from_least(const float* x, int bits, uint8_t* to) {
  const auto [least, most] = std::minmax_element(x, x + kBlock);
  const auto last = static_cast<float>((1 << bits) - 1);
  const float d = (*most - *least) / last, inverse = inverse_of(d);
  std::array<uint8_t, kBlock> codes{};
  for (size_t i = 0; i < kBlock; ++i)
    codes[i] = static_cast<uint8_t>(std::clamp(std::trunc((x[i] - *least) * inverse + 0.5F), 0.0F, last));
  put_half(d, to);
  put_half(*least, to);
  put_codes(codes, bits == 5, to);
}

void encode_q8_0(const float* x, uint8_t* to) {
  float most = 0;
  for (int i = 0; i < kBlock; ++i) most = std::max(most, std::abs(x[i]));
  const float d = most / 127, inverse = inverse_of(d);
  put_half(d, to);
  for (int i = 0; i < kBlock; ++i)  // halves go away from zero
    *to++ = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(std::round(x[i] * inverse), -127.0F, 127.0F)));
}

void encode_gguf(const at::Tensor& flat, Codes& codes) {
  const auto& form = gguf_encoding(codes.encoding);
  const int64_t blocks = flat.numel() / form.block;
  codes.data = empty({codes.rows(), codes.columns() / form.block * form.block_bytes}, at::kByte);
  const auto* from = flat.const_data_ptr<float>();
  auto* to = codes.data.mutable_data_ptr<uint8_t>();
  if (codes.encoding >= Encoding::q2_k)
    return parallel_ranges(blocks, 8, [&](int64_t begin, int64_t end) {
      encode_k_blocks(codes.encoding, from + begin * form.block, end - begin, to + begin * form.block_bytes);
    });
  parallel_ranges(blocks, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    for (const int64_t i : c10::irange(begin, end)) {
      const float* x = from + i * kBlock;
      uint8_t* place = to + i * form.block_bytes;
      switch (codes.encoding) {
        case Encoding::q4_0:
          encode_symmetric(x, 4, place);
          break;
        case Encoding::q5_0:
          encode_symmetric(x, 5, place);
          break;
        case Encoding::q4_1:
          encode_from_least(x, 4, place);
          break;
        case Encoding::q5_1:
          encode_from_least(x, 5, place);
          break;
        default:
          encode_q8_0(x, place);
      }
    }
  });
}

void check_options(const at::Tensor& values, const EncodeOptions& options) {
  const Encoding encoding = options.encoding;
  const auto dtype = values.scalar_type();
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16)
    raise<ConfigError>("encode: found a tensor of {}, expected fp32, fp16 or bf16", c10::toString(dtype));
  if (!values.is_cpu())
    raise<ConfigError>("encode: found a tensor on {}, expected one on the CPU", values.device().str());
  const int64_t size = options.block_size;
  if (is_four_bit(encoding) && (size < 32 || size > 4096 || (size & (size - 1)) != 0))
    raise<ConfigError>(
        "encode: found block_size = {}, expected 32, 64, 128, 256, 512, 1024, 2048 or 4096 elements to a scale", size);
  if (options.double_quantize && !is_four_bit(encoding))
    raise<ConfigError>("encode: found double_quantize with {}, expected nf4 or fp4", name(encoding));
  if (!is_four_bit(encoding) && values.dim() == 0)
    raise<ShapeError>("encode: a single number can't be {}, expected at least one dimension", name(encoding));
  if (is_gguf(encoding) && values.size(-1) % gguf_encoding(encoding).block != 0)
    raise<ShapeError>("encode: rows of {} elements can't be {}, whose blocks have {}. Use {}nf4, fp4 or int8_rowwise",
                      values.size(-1), name(encoding), gguf_encoding(encoding).block,
                      values.size(-1) % kBlock == 0 ? "q8_0, q5_1, q4_1, " : "");
}

}  // namespace

Codes encode(const at::Tensor& values, const EncodeOptions& options) {
  check_options(values, options);
  at::Tensor flat = values.detach().reshape({-1});
  if (flat.scalar_type() != at::kFloat) flat = empty(flat.sizes(), at::kFloat).copy_(flat);
  refuse_values_without_codes(flat);
  Codes codes{.encoding = options.encoding, .shape = values.sizes().vec(), .dtype = values.scalar_type()};
  if (is_gguf(options.encoding)) {
    encode_gguf(flat, codes);
  } else if (options.encoding == Encoding::int8_rowwise) {
    encode_rows(flat, codes);
  } else {
    codes.block_size = options.block_size;
    encode_four_bits(flat, codes);
    if (options.double_quantize) double_quantize(codes);
  }
  return codes;
}

}  // namespace accelerate::codes
