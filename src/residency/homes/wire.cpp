#include "residency/homes/wire.hpp"

#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "accelerate/codes/float8.hpp"
#include "utils/raise.hpp"

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
  // Rounding to the dtype is far less than half a code, and scales stay.
  bool repeats() const override { return true; }

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

/// The scales of a message's blocks, then its numbers.
class Int8Wire final : public Wire {
 public:
  explicit Int8Wire(int64_t block) : block_(block) {
    if (block < 1) raise<ConfigError>("int8_wire: blocks have {} numbers, expected at least 1", block);
  }

  // Messages begin where a scale may.
  int64_t bytes(int64_t numel) const override { return (scales_bytes(numel) + numel + kScale - 1) / kScale * kScale; }
  at::Tensor encode(const at::Tensor& values, int64_t) const override {
    const at::NoGradGuard no_grad;
    const int64_t numel = values.numel(), blocks = blocks_of(numel);
    at::Tensor message = at::zeros({bytes(numel)}, values.options().dtype(at::kByte));
    if (values.is_meta() || numel == 0) return message;
    const at::Tensor rows = at::zeros({blocks, block_}, values.options().dtype(at::kFloat));
    rows.view({-1}).narrow(0, 0, numel).copy_(values);
    const at::Tensor scale = at::amax(at::abs(rows), 1, /*keepdim=*/true).div_(127);
    const at::Tensor inverse = at::where(at::gt(scale, 0), at::reciprocal(scale), 0);
    scales_in(message, numel).copy_(scale.view({-1}));
    message.narrow(0, scales_bytes(numel), numel)
        .view(at::kChar)
        .copy_(at::mul(rows, inverse).round_().clamp_(-127, 127).view({-1}).narrow(0, 0, numel));
    return message;
  }
  void decode(const at::Tensor& message, int64_t, const at::Tensor& to) const override {
    const int64_t numel = to.numel();
    if (to.is_meta() || numel == 0) return;
    const at::NoGradGuard no_grad;
    const at::Tensor rows = at::zeros({blocks_of(numel), block_}, to.options().dtype(at::kFloat));
    rows.view({-1}).narrow(0, 0, numel).copy_(message.narrow(0, scales_bytes(numel), numel).view(at::kChar));
    rows.mul_(scales_in(message, numel).view({-1, 1}));
    to.copy_(rows.view({-1}).narrow(0, 0, numel));
  }
  bool repeats() const override { return false; }  // a rounded largest one changes the others

 private:
  static constexpr int64_t kScale = sizeof(float);
  int64_t blocks_of(int64_t numel) const { return (numel + block_ - 1) / block_; }
  int64_t scales_bytes(int64_t numel) const { return kScale * blocks_of(numel); }
  at::Tensor scales_in(const at::Tensor& message, int64_t numel) const {
    return message.narrow(0, 0, scales_bytes(numel)).view(at::kFloat);
  }

  int64_t block_;
};

}  // namespace

std::unique_ptr<Wire> float8_wire(std::vector<WireSlice> slices, at::Tensor scales) {
  return std::make_unique<Float8Wire>(std::move(slices), std::move(scales));
}
std::unique_ptr<Wire> int8_wire(int64_t block) { return std::make_unique<Int8Wire>(block); }

}  // namespace accelerate::residency
