#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>

#include <c10/core/ScalarType.h>

#include "formats/safetensors_elements.hpp"
#include "formats/torch_dtypes.hpp"

namespace accelerate::formats {

/// A row of kSafetensorsElements with LibTorch's type.
struct SafetensorsDtype {
  std::string_view name;
  int64_t bits = 0;                                    ///< Size of one element of the header's shape.
  std::optional<at::ScalarType> torch = std::nullopt;  ///< Empty where LibTorch has no such type.
  int64_t packed = 1;  ///< Elements of the shape in one element of the LibTorch type, along the last dimension.
};

inline constexpr auto kSafetensorsDtypes = [] {
  std::array<SafetensorsDtype, std::size(kSafetensorsElements)> rows{};
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& element = kSafetensorsElements[i];
    rows[i] = {element.name, element.bits, std::nullopt, element.packed};
    for (const auto& dtype : kTorchDtypes)
      if (dtype.name.substr(dtype.name.find('.') + 1) == element.torch) rows[i].torch = dtype.type;
  }
  return rows;
}();

constexpr const SafetensorsDtype* find_dtype(std::string_view name) {
  for (const auto& row : kSafetensorsDtypes)
    if (row.name == name) return &row;
  return nullptr;
}

constexpr const SafetensorsDtype* find_dtype(at::ScalarType type) {
  for (const auto& row : kSafetensorsDtypes)
    if (row.torch == type) return &row;
  return nullptr;
}

}  // namespace accelerate::formats
