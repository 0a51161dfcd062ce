#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace accelerate::detail {

/// A parameter of the model of which an adapter has a value of its own, or of some of its rows.
struct OwnValues {
  std::string name;           ///< of the parameter
  at::Tensor parameter;       ///< the model's, with its identity
  std::vector<int64_t> rows;  ///< none: the adapter has all of it
  at::Tensor other;           ///< the value that is not in the model: the model's own, or while it is off the adapter's
  bool enabled = true;
  std::string in_file = {};  ///< what PEFT calls it

  /// The parameter, or its rows. @param whole  that parameter, or its value elsewhere
  at::Tensor part_of(const at::Tensor& whole) const;
  /// The adapter's value.
  at::Tensor value() const { return enabled ? part_of(parameter) : other; }
  /// Puts the value where it belongs.
  void set_enabled(bool wanted);
  /// @throws ConfigError for bytes that a residency keeps. @param operation  begins the message
  void require_own_bytes(const char* operation) const;
};

/// Puts a value into the model. @param value  of the shape of part_of()
void put(OwnValues& own, const at::Tensor& value);

}  // namespace accelerate::detail
