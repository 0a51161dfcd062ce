#include "codes/cuda/codes_on_gpu.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>
#include <utility>
#include <vector>

#include "codes/cuda/launch.hpp"

namespace accelerate::codes::cuda {
namespace {

/// From the first use on: tests change it before main().
Launcher& current() {
  static Launcher launcher = kNvrtc;
  return launcher;
}

/// The types of kernels.cuh, in Encoding's order.
constexpr std::array<std::string_view, kEncodings> kTypes{"Int8Rowwise", "FourBit", "FourBit", "Q4_0", "Q4_1",
                                                          "Q5_0",        "Q5_1",    "Q8_0",    "Q2_K", "Q3_K",
                                                          "Q4_K",        "Q5_K",    "Q6_K"};

std::string_view type_of(Encoding encoding) { return kTypes[static_cast<size_t>(encoding)]; }

std::string_view type_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? "Float" : dtype == at::kHalf ? "Half" : "BFloat16";
}

/// For kernels that read 16 bytes at a time: views may begin anywhere.
at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  return std::bit_cast<uintptr_t>(whole.const_data_ptr()) % 16 == 0 ? whole : whole.clone();
}

/// A weight as kernels see it, and what holds its memory meanwhile.
struct AlignedCodes {
  Weight weight{};
  at::Tensor data, scales, absmax;

  explicit AlignedCodes(const Codes& codes) : data(aligned(codes.data)), scales(codes.scales) {
    weight.data = static_cast<const unsigned char*>(data.const_data_ptr());
    weight.columns = codes.columns();
    if (is_four_bit(codes.encoding)) {
      weight.block_shift = std::countr_zero(static_cast<uint64_t>(codes.block_size));
      std::ranges::copy(table(codes.encoding), weight.table);
    }
    if (codes.nested && std::has_single_bit(static_cast<uint64_t>(codes.nested->block_size))) {
      absmax = codes.nested->absmax;
      weight.absmax = static_cast<const float*>(absmax.const_data_ptr());
      weight.nested_shift = std::countr_zero(static_cast<uint64_t>(codes.nested->block_size));
      weight.offset = codes.nested->offset;
      std::ranges::copy(dynamic_map(), weight.map);
    } else if (codes.nested) {
      scales = plain_scales(codes);
    }
    if (scales.defined()) weight.scales = scales.const_data_ptr();
  }
};

unsigned pieces(int64_t count, int64_t size) { return static_cast<unsigned>((count + size - 1) / size); }

/// @param indices  int64, or undefined: rows from `first` on
bool decode(const Codes& codes, int64_t first, const at::Tensor& indices, const at::Tensor& values) {
  const int64_t columns = codes.columns(), rows = values.numel() / std::max<int64_t>(1, columns);
  // Else rows of any length.
  const bool in_units = columns % kUnit == 0 && std::bit_cast<uintptr_t>(values.const_data_ptr()) % 16 == 0;
  if (values.numel() == 0 || (!in_units && is_gguf(codes.encoding))) return values.numel() == 0;
  const AlignedCodes held(codes);
  Launch launch{.kernel = fmt::format("{}<{},{}>", in_units ? "decode" : "decode_any", type_of(codes.encoding),
                                      type_of(values.scalar_type())),
                .threads = kThreads,
                .arguments = {.w = held.weight}};
  const int64_t unit = in_units ? kUnit : 1;
  // Kernels count in 31 bits.
  const int64_t step = std::max<int64_t>(1, (int64_t{1} << 31) / (std::max<int64_t>(1, columns / unit)) - 1);
  for (int64_t begin = 0; begin < rows; begin += step) {
    Arguments& arguments = launch.arguments;
    arguments.count = std::min(step, rows - begin);
    arguments.first = first + begin;
    if (indices.defined()) arguments.rows = static_cast<const long long*>(indices.const_data_ptr()) + begin;
    arguments.to = static_cast<char*>(values.mutable_data_ptr()) + begin * columns * values.element_size();
    launch.blocks = pieces(arguments.count * (columns / unit), kThreads);
    if (!current()(launch, codes.device())) return false;
  }
  return true;
}

/// Tests' launchers take codes wherever they are.
bool has_kernels(const Codes& codes) { return current() && (current() != kNvrtc || codes.data.is_cuda()); }

bool kernels_know(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

}  // namespace

Launcher exchange_launcher(Launcher by) { return std::exchange(current(), by); }

bool decode_rows(const Codes& codes, int64_t first, const at::Tensor& values) {
  return has_kernels(codes) && decode(codes, first, {}, values);
}

bool decode_rows(const Codes& codes, const at::Tensor& indices, const at::Tensor& values) {
  return has_kernels(codes) && decode(codes, 0, indices.to(at::kLong).contiguous(), values);
}

at::Tensor linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias) {
  const int64_t columns = w.columns(), outputs = w.rows();
  if (!has_kernels(w) || x.device() != w.device() || !kernels_know(x.scalar_type()) || x.numel() == 0 || outputs == 0 ||
      columns % kUnit != 0 || x.numel() / columns > kMostRows)
    return {};
  const int64_t rows = x.numel() / columns;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = outputs;
  const at::Tensor y = at::empty(sizes, x.options()), inputs = aligned(x);
  const at::Tensor added = bias && bias->defined() ? bias->to(x.scalar_type()).contiguous() : at::Tensor();
  const AlignedCodes held(w);
  const Launch launch{.kernel = fmt::format("product<{},{},{}>", type_of(w.encoding), type_of(x.scalar_type()), rows),
                      .blocks = pieces(outputs, outputs_of_block(static_cast<int>(rows))),
                      .threads = static_cast<unsigned>(std::min<int64_t>(kThreads, (columns / kUnit + 31) / 32 * 32)),
                      .arguments = {.w = held.weight,
                                    .x = inputs.const_data_ptr(),
                                    .bias = added.defined() ? added.const_data_ptr() : nullptr,
                                    .outputs = outputs,
                                    .to = y.mutable_data_ptr()}};
  return current()(launch, w.device()) ? y : at::Tensor();
}

}  // namespace accelerate::codes::cuda
