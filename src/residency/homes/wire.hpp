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

  /// The size of the message that holds so many elements.
  virtual int64_t bytes(int64_t numel) const = 0;
  /// @param values  [numel], floating point: the flat storage's elements from `begin` on. May be meta.
  /// @return uint8 [bytes(numel)], on the device of the values
  virtual at::Tensor encode(const at::Tensor& values, int64_t begin) const = 0;
  /// @param to  [numel], floating point: gets the elements from `begin` on
  virtual void decode(const at::Tensor& message, int64_t begin, const at::Tensor& to) const = 0;
  /// Whether messages of neighbouring slices, one behind the other, are the message of all of them: then what came
  /// from a thousand ranks is decoded at once.
  virtual bool joins() const { return false; }
};

struct WireSlice {
  int64_t begin, length;
};

/// E4M3 codes, a scale for each of some slices of the flat storage; what lies between them is of no interest.
/// @param scales  [slices], fp32, on the device: codes are of values times these; they may change, on all ranks
/// alike
std::unique_ptr<Wire> float8_wire(std::vector<WireSlice> slices, at::Tensor scales);

/// Elements of a flat storage that have one scale below. Slices and messages are whole blocks, and members begin with
/// one (lay_out()): so what a member's elements come as depends on how many ranks there are as little as on its
/// neighbours.
inline constexpr int64_t kWireBlock = 256;

/// Whole numbers times a scale of their block, in bf16, behind each block's numbers. The largest one becomes 127 (of 4
/// bits: 7), so each is off by at most half a scale; a block with a number that is not finite comes as NaN.
/// Source: ZeRO++, arXiv:2306.10209 (block-based quantization: qwZ, qgZ).
std::unique_ptr<Wire> int8_wire();
std::unique_ptr<Wire> int4_wire();

}  // namespace accelerate::residency
