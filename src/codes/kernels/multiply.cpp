#include "codes/kernels/multiply.hpp"

#include <algorithm>
#include <memory>
#include <string_view>

#include <ATen/Version.h>
#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>

#include "utils/parallel.hpp"

namespace accelerate::codes::kernels {

const std::vector<const InstructionSet*>& instruction_sets() {
  static const std::vector<const InstructionSet*> sets = [] {
    std::vector<const InstructionSet*> found;
    for (const auto* set : {avx512_instructions(), avx2_instructions(), &plain_instructions()})
      if (set) found.push_back(set);
    return found;
  }();
  return sets;
}

const InstructionSet& instruction_set() {
  static const InstructionSet& chosen = []() -> const InstructionSet& {
    const std::string allowed = at::get_cpu_capability();
    for (const auto* set : instruction_sets()) {
      const std::string_view name = set->name;
      if ((name == "avx512" && allowed == "AVX512") ||
          (name == "avx2" && (allowed == "AVX512" || allowed.starts_with("AVX2"))))
        return *set;
    }
    return plain_instructions();
  }();
  return chosen;
}

at::Tensor multiply(const InstructionSet& instructions, const at::Tensor& x, const Packed& packed) {
  at::DimVector sizes(x.sizes());
  sizes.back() = packed.n;
  at::Tensor y = at::empty(sizes, x.options());
  if (y.numel() == 0) return y;
  const int64_t rows = y.numel() / packed.n, k = packed.k, parts = k / kPart;
  const auto form = static_cast<size_t>(packed.form);
  const int sums = instructions.sums[form];
  if (k == 0) return y.zero_();
  const int64_t bytes = rows * k, numbers = rows * parts;
  // No tensors: making one takes longer than rounding a row.
  const auto memory = std::make_unique_for_overwrite<signed char[]>(static_cast<size_t>(bytes));
  const auto floats = std::make_unique_for_overwrite<float[]>(static_cast<size_t>((1 + sums) * numbers));
  auto* const inputs = memory.get();
  auto* const scales = floats.get();
  auto* const input_sums = scales + numbers;
  const auto* const from = x.const_data_ptr<float>();
  constexpr int64_t kQuantizeGrain = 1 << 15;
  parallel_ranges(rows, std::max<int64_t>(1, kQuantizeGrain / k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      instructions.quantize(from + r * packed.columns, packed.columns, k, packed.unit, sums, instructions.factor[form],
                            inputs + r * k, scales + r * parts, input_sums + r * parts * sums);
  });
  const Product product{.codes = packed.codes.const_data_ptr<uint8_t>(),
                        .group_bytes = packed.codes.size(1),
                        .scales = packed.scales.defined() ? packed.scales.const_data_ptr<float>() : nullptr,
                        .period = packed.period,
                        .table = packed.table,
                        .n = packed.n,
                        .k = k,
                        .inputs = inputs,
                        .input_scales = scales,
                        .input_sums = input_sums,
                        .y = y.mutable_data_ptr<float>()};
  // Inputs that the nearer cache has room for, with all groups of the weight, one after another.
  constexpr int64_t kInputBytes = 1 << 17, kTile = 8, kProductGrain = 1 << 16;
  const int64_t chunk = std::max(kTile, kInputBytes / k / kTile * kTile), chunks = (rows + chunk - 1) / chunk,
                groups = packed.groups(), grain = kProductGrain / (kGroup * k * std::min(rows, chunk));
  const auto run = instructions.product[form];
  parallel_ranges(groups * chunks, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      run(product, i % groups, i / groups * chunk, std::min(rows, (i / groups + 1) * chunk));
  });
  return y;
}

}  // namespace accelerate::codes::kernels
