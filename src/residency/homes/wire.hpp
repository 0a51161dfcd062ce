#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace accelerate::residency {

/// How elements of a flat storage travel between ranks: in messages, one of each rank's slice.
class Wire {
 public:
  virtual ~Wire() = default;

  /// Of the message that holds so many elements.
  virtual int64_t bytes(int64_t numel) const = 0;
  /// @param values  [numel], floating point: the flat storage's elements from `begin` on. May be meta.
  /// @return uint8 [bytes(numel)], on the device of the values
  virtual at::Tensor encode(const at::Tensor& values, int64_t begin) const = 0;
  /// @param to  [numel], floating point: gets the elements from `begin` on
  virtual void decode(const at::Tensor& message, int64_t begin, const at::Tensor& to) const = 0;
  /// Whether messages of neighbouring slices, one behind the other, are the message of all of them: then what came
  /// from a thousand ranks is decoded at once.
  virtual bool joins() const { return false; }
  /// Whether what was decoded, and rounded to a dtype of 16 bits or more, encodes to the same values, in messages of
  /// other slices, too.
  virtual bool repeats() const = 0;
};

struct WireSlice {
  int64_t begin, length;
};

/// E4M3 codes, a scale for each of some slices of the flat storage; what lies between them is of no interest.
/// @param scales  [slices], fp32, on the device: codes are of values times these; they may change, on all ranks
/// alike
std::unique_ptr<Wire> float8_wire(std::vector<WireSlice> slices, at::Tensor scales);

/// Whole numbers from -127 to 127 times a scale of each `block` neighbours (the largest becomes 127), which travels
/// with them: off by at most half of that scale. One that is not finite makes all of its block NaN. Source: ZeRO++,
/// arXiv:2306.10209 (block-based quantization of weights, qwZ).
std::unique_ptr<Wire> int8_wire(int64_t block = 2048);

}  // namespace accelerate::residency
