#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "residency/home.hpp"
#include "residency/homes/wire.hpp"

namespace accelerate::residency {

/// Elements of a flat storage that are kept as 8-bit codes alone (int8_wire()), zeros at first. Writes to them are
/// rounded at once, together with what else is in their block; other blocks stay as they are.
class CodedValues {
 public:
  /// @param numel  whole blocks (kWireBlock)  @param dtype  in which they are read and written
  CodedValues(int64_t numel, at::ScalarType dtype, const at::Device& device);

  int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  /// The message of all of them, uint8: it is changed in place.
  const at::Tensor& codes() const { return codes_; }
  int64_t version() const { return changes_; }

  /// @param to  [numel], of any floating-point dtype and device
  void decode(const at::Tensor& to) const;
  /// @param values  [numel]; a value that decode() gave for an element leaves it as it is
  void put(const at::Tensor& values);

 private:
  int64_t numel_;
  at::ScalarType dtype_;
  std::unique_ptr<Wire> wire_;
  at::Tensor codes_;
  int64_t changes_ = 0;
};

/// A home of all of them, one of any number.
std::unique_ptr<Home> coded_home(std::shared_ptr<CodedValues> values);

}  // namespace accelerate::residency
