#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace accelerate::residency {

/// The values of a flat storage that a process keeps for good, while the storage is their image: a shard, or masters of
/// more precision. Without autograd; the caller sees to that.
class Kept {
 public:
  /// @param values  1-D: the flat storage's elements from `begin` on
  Kept(at::Tensor values, int64_t begin) : values_(std::move(values)), begin_(begin) {}

  at::ScalarType dtype() const { return values_.scalar_type(); }
  /// Changes with the values, whoever writes them through tensors.
  int64_t version() const { return values_._version(); }

  /// `values`: elements of the flat storage from `begin` on, 1-D. Those that are kept replace what the image made of
  /// them.
  void refine(int64_t begin, const at::Tensor& values) const;
  /// These are the values now; of what is kept.
  void take(int64_t begin, const at::Tensor& values) const;
  /// Code that goes around operators may have written into the image. Other elements keep the precision that the
  /// image lacks. @param was  the image of the kept elements as it was, if it is not just their conversion
  void take_back(const at::Tensor& flat, const at::Tensor& was = {}) const;

 private:
  at::Tensor values_;
  int64_t begin_;
};

}  // namespace accelerate::residency
