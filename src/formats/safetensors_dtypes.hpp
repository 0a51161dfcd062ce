#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace accelerate::formats {

/// One element type of the format.
struct SafetensorsDtype {
  std::string_view name;
  int64_t bits;                         ///< Size of one element of the header's shape.
  std::optional<at::ScalarType> torch;  ///< Empty where LibTorch has no such type.
  int64_t packed = 1;  ///< Elements of the shape in one element of the LibTorch type, along the last dimension.
};

/// The one table of element types, used by reader and writer. The order is the format's: the writer lays out later rows
/// first, which puts tensors of large elements before small ones, so that each lies on a multiple of its element size
/// without padding.
inline constexpr SafetensorsDtype kSafetensorsDtypes[] = {
    {"BOOL", 8, at::kBool},
    {"F4", 4, at::kFloat4_e2m1fn_x2, 2},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"U8", 8, at::kByte},
    {"I8", 8, at::kChar},
    {"F8_E5M2", 8, at::kFloat8_e5m2},
    {"F8_E4M3", 8, at::kFloat8_e4m3fn},
    {"F8_E8M0", 8, at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", 8, at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", 8, at::kFloat8_e5m2fnuz},
    {"I16", 16, at::kShort},
    {"U16", 16, at::kUInt16},
    {"F16", 16, at::kHalf},
    {"BF16", 16, at::kBFloat16},
    {"I32", 32, at::kInt},
    {"U32", 32, at::kUInt32},
    {"F32", 32, at::kFloat},
    {"C64", 64, at::kComplexFloat},
    {"F64", 64, at::kDouble},
    {"I64", 64, at::kLong},
    {"U64", 64, at::kUInt64},
};

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
