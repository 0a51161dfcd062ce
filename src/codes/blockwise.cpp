#include "codes/blockwise.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "utils/parallel.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

constexpr int64_t kMapSize = 256;
constexpr int64_t kExponents = 7;
/// Source: "8-bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561, with 7 bits of exponent.
/// Decades [10^-6, 10^-5] … [0.1, 1], each with twice as many values as the one below it: the middles of equal steps.
at::Tensor make_values(bool with_negative) {
  std::vector<float> values{0.0F, 1.0F};
  for (int64_t i = 0; i < kExponents; ++i) {
    const int64_t steps = int64_t{1} << (with_negative ? i : i + 1);
    const auto ends = at::linspace(0.1, 1, steps + 1, at::TensorOptions(at::kFloat));
    const auto middles = (ends.slice(0, 0, steps) + ends.slice(0, 1)) / 2;
    const auto decade = (middles * std::pow(10.0, static_cast<double>(i - kExponents + 1))).contiguous();
    for (const float value : c10::ArrayRef<float>(decade.const_data_ptr<float>(), static_cast<size_t>(steps))) {
      values.push_back(value);
      if (with_negative) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return at::tensor(values, at::TensorOptions(at::kFloat));
}

/// A map with what finds codes quickly.
struct Finder {
  explicit Finder(const at::Tensor& values) {
    const auto* map = values.const_data_ptr<float>();
    std::copy_n(map, kMapSize, codes.begin());
    codes[kMapSize] = std::numeric_limits<float>::infinity();
    for (uint32_t high = 0; high < below.size(); ++high) {
      // The least value whose upper 16 bits are these; of negative ones it is that with the largest magnitude.
      const auto least = std::bit_cast<float>(high << 16 | (high >> 15 ? 0xffffU : 0U));
      const auto above = std::upper_bound(map, map + kMapSize, least);  // of NaN, which nobody asks for: the end
      below[high] = static_cast<uint8_t>(std::max<int64_t>(0, above - map - 1));
    }
    for (size_t step = 0, code = 0; step < grid.size(); ++step) {
      const float value = -1.0F + 2.0F * static_cast<float>(step) / static_cast<float>(grid.size() - 1);
      while (code + 1 < kMapSize && 0.5F * (codes[code] + codes[code + 1]) < value) ++code;
      grid[step] = static_cast<uint8_t>(code);
    }
  }

  uint8_t nearest(float value) const {
    size_t code = below[std::bit_cast<uint32_t>(value) >> 16];
    while (codes[code + 1] <= value) ++code;
    code += value - codes[code] > codes[code + 1] - value;
    return static_cast<uint8_t>(codes[code] == 0 && value > 0 && codes[0] == 0 ? 1 : code);
  }
  uint8_t on_grid(float value) const {
    // As bitsandbytes rounds. NOLINTNEXTLINE(bugprone-incorrect-roundings)
    return grid[static_cast<size_t>((value + 1.0F) * 0.5F * static_cast<float>(grid.size() - 1) + 0.5F)];
  }

  std::array<float, kMapSize + 1> codes{};
  std::array<uint8_t, 65536> below{};  ///< by a value's upper 16 bits: the last code that is no larger than any such
  std::array<uint8_t, 65536> grid{};
};

const Finder& finder_of(Map map) {
  static const auto with_negative = std::make_unique<const Finder>(values_of(Map::dynamic));
  static const auto without = std::make_unique<const Finder>(values_of(Map::dynamic_unsigned));
  return map == Map::dynamic ? *with_negative : *without;
}

template <class Find>
void encode_block(const float* values, int64_t count, const Find& find, uint8_t* codes, float& absmax) {
  absmax = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite &= std::isfinite(values[i]);
    absmax = std::max(absmax, std::abs(values[i]));
  }
  const float inverse = 1.0F / absmax;
  if (!finite) absmax = std::numeric_limits<float>::quiet_NaN();
  else if (!std::isfinite(inverse)) absmax = 0;  // it is zero, or so little that it counts as zero
  if (!(absmax > 0)) {
    std::fill_n(codes, count, uint8_t{0});
    return;
  }
  for (int64_t i = 0; i < count; ++i) codes[i] = find(std::clamp(values[i] * inverse, -1.0F, 1.0F));
}

template <class Find>
void encode_on_cpu(const at::Tensor& values, int64_t block_size, const Find& find, const Blockwise& to) {
  const auto* from = values.const_data_ptr<float>();
  auto* codes = to.codes.mutable_data_ptr<uint8_t>();
  auto* absmax = to.absmax.mutable_data_ptr<float>();
  const int64_t count = values.numel();
  parallel_ranges(to.absmax.numel(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * block_size;
      encode_block(from + first, std::min(block_size, count - first), find, codes + first, absmax[block]);
    }
  });
}

}  // namespace

const at::Tensor& values_of(Map map) {
  static const at::Tensor with_negative = make_values(true), without = make_values(false);
  return map == Map::dynamic ? with_negative : without;
}

void encode_by_operators(const at::Tensor& values, Map map, int64_t block_size, const Blockwise& to) {
  const int64_t count = values.numel(), blocks = to.absmax.numel();
  const auto by_block =
      at::constant_pad_nd(values.view(-1), {0, blocks * block_size - count}).view({blocks, block_size});
  const auto largest = at::amax(at::abs(by_block), 1);
  const auto finite = largest + largest * 0;  // NaN for infinity
  const auto absmax = at::where(at::isinf(1 / finite), 0, finite);
  const auto inverse = at::where(absmax > 0, 1 / absmax, 0);
  const auto scaled = (by_block * inverse.unsqueeze(1)).clamp(-1, 1);
  const auto& known = values_of(map);
  const auto middles = ((known.slice(0, 0, -1) + known.slice(0, 1)) / 2).to(values.device());
  auto codes = at::bucketize(scaled, middles, /*out_int32=*/true);
  if (map == Map::dynamic_unsigned) codes = at::maximum(codes, (scaled > 0).to(codes.scalar_type()));
  codes = codes * (absmax > 0).unsqueeze(1);  // what is zero throughout gets code 0, as on the CPU
  to.codes.view(-1).copy_(codes.view(-1).slice(0, 0, count));
  to.absmax.copy_(absmax);
}

at::Tensor decode_by_operators(const Blockwise& from, Map map, int64_t block_size) {
  const int64_t count = from.codes.numel(), blocks = from.absmax.numel();
  const auto found = values_of(map).to(from.codes.device()).index_select(0, from.codes.view(-1).to(at::kInt));
  const auto by_block = at::constant_pad_nd(found, {0, blocks * block_size - count}).view({blocks, block_size});
  return (by_block * from.absmax.unsqueeze(1)).view(-1).slice(0, 0, count).reshape(from.codes.sizes());
}

void encode_blockwise(const at::Tensor& values, Map map, int64_t block_size, Search search, const Blockwise& to) {
  if (values.numel() == 0 || values.is_meta()) return;
  if (!values.is_cpu()) {
    if (search != Search::nearest) raise<InternalError>("encode_blockwise: the grid is for tensors on the CPU only");
    return encode_by_operators(values, map, block_size, to);
  }
  const Finder& finder = finder_of(map);
  if (search == Search::nearest)
    encode_on_cpu(
        values, block_size, [&](float value) { return finder.nearest(value); }, to);
  else
    encode_on_cpu(
        values, block_size, [&](float value) { return finder.on_grid(value); }, to);
}

at::Tensor decode_blockwise(const Blockwise& from, Map map, int64_t block_size, const at::Tensor& out) {
  auto values = out.defined() ? out : at::empty_like(from.codes, from.codes.options().dtype(at::kFloat));
  const int64_t count = values.numel();
  if (count == 0) return values;
  if (!values.is_cpu()) return values.is_meta() ? values : decode_by_operators(from, map, block_size);
  const auto& known = finder_of(map).codes;
  const auto* codes = from.codes.const_data_ptr<uint8_t>();
  const auto* absmax = from.absmax.const_data_ptr<float>();
  auto* to = values.mutable_data_ptr<float>();
  parallel_ranges(from.absmax.numel(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t i = block * block_size; i < std::min(count, (block + 1) * block_size); ++i)
        to[i] = known[codes[i]] * absmax[block];
  });
  return values;
}

}  // namespace accelerate::codes
