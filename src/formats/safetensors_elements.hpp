#pragma once

#include <cstdint>
#include <string_view>

namespace accelerate::formats {

/// One element type of the format. Needs no LibTorch.
struct SafetensorsElement {
  std::string_view name;
  int64_t bits;                 ///< Size of one element of the header's shape.
  std::string_view torch = {};  ///< PyTorch's name; empty where it has no such type.
  int64_t packed = 1;           ///< Elements of the shape in one element of PyTorch's type, along the last dimension.
};

/// The one table of element types, used by readers and writer. The order is the format's: the writer lays out later
/// rows first, which puts tensors of large elements before small ones, so that each lies on a multiple of its element
/// size without padding.
inline constexpr SafetensorsElement kSafetensorsElements[] = {
    {"BOOL", 8, "bool"},
    {"F4", 4, "float4_e2m1fn_x2", 2},
    {"F6_E2M3", 6},
    {"F6_E3M2", 6},
    {"U8", 8, "uint8"},
    {"I8", 8, "int8"},
    {"F8_E5M2", 8, "float8_e5m2"},
    {"F8_E4M3", 8, "float8_e4m3fn"},
    {"F8_E8M0", 8, "float8_e8m0fnu"},
    {"F8_E4M3FNUZ", 8, "float8_e4m3fnuz"},
    {"F8_E5M2FNUZ", 8, "float8_e5m2fnuz"},
    {"I16", 16, "int16"},
    {"U16", 16, "uint16"},
    {"F16", 16, "float16"},
    {"BF16", 16, "bfloat16"},
    {"I32", 32, "int32"},
    {"U32", 32, "uint32"},
    {"F32", 32, "float32"},
    {"C64", 64, "complex64"},
    {"F64", 64, "float64"},
    {"I64", 64, "int64"},
    {"U64", 64, "uint64"},
};

constexpr const SafetensorsElement* find_element(std::string_view name) {
  for (const auto& row : kSafetensorsElements)
    if (row.name == name) return &row;
  return nullptr;
}

}  // namespace accelerate::formats
