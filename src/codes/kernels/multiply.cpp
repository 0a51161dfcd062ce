#include "codes/kernels/multiply.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include <ATen/Version.h>
#include <ATen/core/DimVector.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "utils/parallel.hpp"
#include "utils/raise.hpp"

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

bool has_fast_instructions() { return &instruction_set() != &plain_instructions(); }

namespace {

int64_t chunk_of(int64_t k) {
  constexpr int64_t kInputBytes = 1 << 17, kTile = 8;  // inputs that the nearer cache has room for
  return std::max(kTile, kInputBytes / k / kTile * kTile);
}

Product product_of(const Packed& packed, float* y) {
  return {.codes = packed.codes.const_data_ptr<uint8_t>(),
          .group_bytes = packed.codes.size(1),
          .period = packed.period,
          .table = packed.table,
          .n = packed.n,
          .k = packed.k,
          .y = y};
}

/// All groups of the weight for some inputs, one after another, then for the next.
/// @param part  (group, groups, first row of x, last)  @param together  groups of which a part is better than of one
template <class F> void run(F part, const Packed& packed, int64_t rows, int64_t together) {
  constexpr int64_t kProductGrain = 1 << 16;
  const int64_t chunk = chunk_of(packed.k), chunks = (rows + chunk - 1) / chunk, groups = packed.groups(),
                steps = (groups + together - 1) / together,
                grain = kProductGrain / (kGroup * packed.k * std::min(rows, chunk));
  parallel_ranges(steps * chunks, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i % steps * together, first = i / steps * chunk;
      part(group, std::min(together, groups - group), first, std::min(rows, first + chunk));
    }
  });
}

}  // namespace

at::Tensor multiply(const InstructionSet& instructions, const at::Tensor& x, const Packed& packed) {
  at::DimVector sizes(x.sizes());
  sizes.back() = packed.n;
  at::Tensor y = at::empty(sizes, x.options());
  if (y.numel() == 0) return y;
  const int64_t rows = y.numel() / packed.n, k = packed.k, parts = k / kPart;
  const auto form = static_cast<size_t>(packed.form);
  const int sums = instructions.sums[form];
  const bool takes_words = packed.form == GroupForm::table && instructions.table_takes_words;
  if (k == 0) return y.zero_();
  const int64_t bytes = rows * k, numbers = rows * parts;
  // No tensors: making one takes longer than rounding a row.
  const auto memory = std::make_unique_for_overwrite<signed char[]>(static_cast<size_t>(bytes));
  const auto words = std::make_unique_for_overwrite<int16_t[]>(static_cast<size_t>(takes_words ? bytes : 0));
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
    if (takes_words) std::copy(inputs + begin * k, inputs + end * k, words.get() + begin * k);
  });
  Product product = product_of(packed, y.mutable_data_ptr<float>());
  product.scales = packed.scales.defined() ? packed.scales.const_data_ptr<float>() : nullptr;
  product.inputs = inputs;
  product.words = words.get();
  product.input_scales = scales;
  product.input_sums = input_sums;
  const auto part = instructions.product[form];
  run([&](int64_t group, int64_t, int64_t first, int64_t last) { part(product, group, first, last); }, packed, rows, 1);
  return y;
}

RoundedRow::RoundedRow(const InstructionSet& instructions, const float* x, const Packed& weight)
    : instructions_(instructions),
      k_(weight.k),
      unit_(weight.unit),
      factor_(instructions.factor[static_cast<size_t>(weight.form)]),
      sums_(instructions.sums[static_cast<size_t>(weight.form)]),
      takes_words_(weight.form == GroupForm::table && instructions.table_takes_words),
      inputs_(static_cast<size_t>(k_)),
      scales_(static_cast<size_t>(k_ / kPart)),
      input_sums_(static_cast<size_t>(k_ / kPart * sums_)) {
  instructions.quantize(x, weight.columns, k_, unit_, sums_, factor_, inputs_.data(), scales_.data(),
                        input_sums_.data());
  if (takes_words_) words_.assign(inputs_.begin(), inputs_.end());
}

bool RoundedRow::suits(const Packed& weight) const {
  const auto form = static_cast<size_t>(weight.form);
  return weight.k == k_ && weight.unit == unit_ && instructions_.factor[form] == factor_ &&
         instructions_.sums[form] == sums_ &&
         takes_words_ == (weight.form == GroupForm::table && instructions_.table_takes_words);
}

void RoundedRow::multiply(const Packed& weight, int64_t begin, int64_t end, float* y) const {
  Product product = product_of(weight, y);
  product.scales = weight.scales.defined() ? weight.scales.const_data_ptr<float>() : nullptr;
  product.inputs = inputs_.data();
  product.words = words_.data();
  product.input_scales = scales_.data();
  product.input_sums = input_sums_.data();
  const auto run = instructions_.product[static_cast<size_t>(weight.form)];
  for (int64_t group = begin; group < end; ++group) run(product, group, 0, 1);
}

at::Tensor multiply_whole(const InstructionSet& instructions, const at::Tensor& x, const Packed& packed) {
  if (!x.is_contiguous()) throw InternalError("multiply_whole: x is not contiguous");
  at::Tensor y = at::empty({x.size(0), packed.n}, x.options().dtype(at::kFloat));
  if (y.numel() == 0) return y;
  const int64_t rows = x.size(0), k = packed.k;
  if (k == 0) return y.zero_();
  const at::Tensor padded = k == packed.columns ? x : at::constant_pad_nd(x, {0, k - packed.columns});
  const auto* const inputs = padded.const_data_ptr<int8_t>();
  std::vector<int32_t> sums(static_cast<size_t>(rows), 0);
  if (const auto factor = static_cast<int32_t>(instructions.factor[static_cast<size_t>(GroupForm::bytes)]); factor != 0)
    for (int64_t r = 0; r < rows; ++r)
      sums[static_cast<size_t>(r)] = factor * std::accumulate(inputs + r * k, inputs + (r + 1) * k, 0);
  Product product = product_of(packed, y.mutable_data_ptr<float>());
  product.inputs = reinterpret_cast<const signed char*>(inputs);
  product.whole_sums = sums.data();
  run([&](int64_t group, int64_t groups, int64_t first,
          int64_t last) { instructions.whole_product(product, group, groups, first, last); },
      packed, rows, 2);
  return y;
}

}  // namespace accelerate::codes::kernels
