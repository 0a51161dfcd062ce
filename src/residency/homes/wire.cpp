#include "residency/homes/wire.hpp"

#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "accelerate/codes/float8.hpp"

namespace accelerate::residency {
namespace {

class Float8Wire final : public Wire {
 public:
  Float8Wire(std::vector<WireSlice> slices, at::Tensor scales)
      : slices_(std::move(slices)), scales_(std::move(scales)) {}

  int64_t bytes(int64_t numel) const override { return numel; }
  at::Tensor encode(const at::Tensor& values, int64_t begin) const override {
    const at::NoGradGuard no_grad;
    at::Tensor message = at::zeros(values.sizes(), values.options().dtype(at::kByte));
    if (values.is_meta()) return message;  // a dry run
    const at::Tensor codes = message.view(codes::scalar_type(codes::Float8::e4m3));
    for_each(values, begin, [&](int64_t at, int64_t length, const at::Tensor& scale) {
      codes.narrow(0, at, length).copy_(codes::encode(values.narrow(0, at, length), scale, codes::Float8::e4m3));
    });
    return message;
  }
  void decode(const at::Tensor& message, int64_t begin, const at::Tensor& to) const override {
    if (to.is_meta()) return;
    const at::NoGradGuard no_grad;
    const at::Tensor codes = message.view(codes::scalar_type(codes::Float8::e4m3));
    for_each(to, begin, [&](int64_t at, int64_t length, const at::Tensor& scale) {
      to.narrow(0, at, length).copy_(codes::decode(codes.narrow(0, at, length), scale, to.scalar_type()));
    });
  }
  bool joins() const override { return true; }

 private:
  /// f(where in the tensor, length, scale) for what `tensor`, elements from `begin` on, has of each slice.
  template <class F> void for_each(const at::Tensor& tensor, int64_t begin, F&& f) const {
    for (size_t i = 0; i < slices_.size(); ++i) {
      const int64_t from = std::max(slices_[i].begin, begin);
      const int64_t to = std::min(slices_[i].begin + slices_[i].length, begin + tensor.numel());
      if (from < to) f(from - begin, to - from, scales_[static_cast<int64_t>(i)]);
    }
  }

  std::vector<WireSlice> slices_;
  at::Tensor scales_;
};

/// Whole numbers of so many bits: the largest, and how rows of them lie in bytes.
struct Bits8 {
  static constexpr int64_t kMost = 127, kInByte = 1;
  static at::Tensor packed(const at::Tensor& numbers) { return numbers.to(at::kChar).view(at::kByte); }
  static at::Tensor unpacked(const at::Tensor& bytes) { return bytes.view(at::kChar); }
};
/// Two in a byte, the first one in the low half; 8 is zero.
struct Bits4 {
  static constexpr int64_t kMost = 7, kInByte = 2, kZero = 8;
  static at::Tensor packed(const at::Tensor& numbers) {
    const at::Tensor pairs = numbers.add(kZero).to(at::kByte).view({-1, kWireBlock / kInByte, kInByte});
    return pairs.select(2, 0).bitwise_or(pairs.select(2, 1).bitwise_left_shift(4));
  }
  static at::Tensor unpacked(const at::Tensor& bytes) {
    const at::Tensor pairs = at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, 2);
    return pairs.view({-1, kWireBlock}).to(at::kChar).sub_(kZero);
  }
};

template <class Bits> class BlockWire final : public Wire {
 public:
  int64_t bytes(int64_t numel) const override { return numel / kWireBlock * kRow; }
  at::Tensor encode(const at::Tensor& values, int64_t) const override {
    const at::NoGradGuard no_grad;
    const at::Tensor message = at::empty({bytes(values.numel())}, values.options().dtype(at::kByte));
    if (values.is_meta()) return message;  // a dry run
    const at::Tensor numbers = values.view({-1, kWireBlock}).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    at::Tensor scales = at::amax(at::abs(numbers), 1, /*keepdim=*/true).div_(Bits::kMost);
    scales = scales.masked_fill_(at::isfinite(scales).logical_not_(), kNaN).to(at::kBFloat16);
    // Nothing is left of numbers so small that their scale has no inverse.
    const at::Tensor exact = scales.to(at::kFloat);
    const at::Tensor inverse = at::where(at::gt(exact, std::numeric_limits<float>::min()), at::reciprocal(exact), 0);
    const at::Tensor rows = message.view({-1, kRow});
    numbers.mul_(inverse).round_().clamp_(-Bits::kMost, Bits::kMost);
    rows.narrow(1, 0, kNumbers).copy_(Bits::packed(numbers));
    rows.narrow(1, kNumbers, kScale).copy_(scales.view(at::kByte));
    return message;
  }
  void decode(const at::Tensor& message, int64_t, const at::Tensor& to) const override {
    if (to.is_meta()) return;
    const at::NoGradGuard no_grad;
    const at::Tensor rows = message.view({-1, kRow}), numbers = Bits::unpacked(rows.narrow(1, 0, kNumbers));
    const at::Tensor scales = rows.narrow(1, kNumbers, kScale).view(at::kBFloat16).to(at::kFloat);
    const at::Tensor values = to.view({-1, kWireBlock});
    if (to.scalar_type() == at::kFloat) values.copy_(numbers).mul_(scales);
    else values.copy_(numbers.to(at::kFloat).mul_(scales));
  }
  bool joins() const override { return true; }

 private:
  static constexpr int64_t kNumbers = kWireBlock / Bits::kInByte, kScale = sizeof(c10::BFloat16),
                           kRow = kNumbers + kScale;
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
};

}  // namespace

std::unique_ptr<Wire> float8_wire(std::vector<WireSlice> slices, at::Tensor scales) {
  return std::make_unique<Float8Wire>(std::move(slices), std::move(scales));
}
std::unique_ptr<Wire> int8_wire() { return std::make_unique<BlockWire<Bits8>>(); }
std::unique_ptr<Wire> int4_wire() { return std::make_unique<BlockWire<Bits4>>(); }

}  // namespace accelerate::residency
