#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <c10/core/ScalarType.h>

#include "formats/torch_container.hpp"

namespace accelerate::formats {

/// How Python's torch.save names one element type. Those that kTorchStorages lacks are saved as bytes together with
/// their dtype.
struct TorchDtype {
  std::string_view name;  ///< The dtype's global.
  at::ScalarType type;
};

inline constexpr TorchDtype kTorchDtypes[] = {
    {"torch.float32", at::kFloat},
    {"torch.float64", at::kDouble},
    {"torch.float16", at::kHalf},
    {"torch.bfloat16", at::kBFloat16},
    {"torch.int64", at::kLong},
    {"torch.int32", at::kInt},
    {"torch.int16", at::kShort},
    {"torch.int8", at::kChar},
    {"torch.uint8", at::kByte},
    {"torch.bool", at::kBool},
    {"torch.complex64", at::kComplexFloat},
    {"torch.complex128", at::kComplexDouble},
    {"torch.complex32", at::kComplexHalf},
    {"torch.uint16", at::kUInt16},
    {"torch.uint32", at::kUInt32},
    {"torch.uint64", at::kUInt64},
    {"torch.float8_e4m3fn", at::kFloat8_e4m3fn},
    {"torch.float8_e5m2", at::kFloat8_e5m2},
    {"torch.float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
    {"torch.float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
    {"torch.float8_e8m0fnu", at::kFloat8_e8m0fnu},
    {"torch.float4_e2m1fn_x2", at::kFloat4_e2m1fn_x2},
};

constexpr const TorchDtype* find_torch_dtype(std::string_view name) {
  for (const auto& row : kTorchDtypes)
    if (row.name == name) return &row;
  return nullptr;
}

constexpr const TorchDtype* find_torch_dtype(at::ScalarType type) {
  for (const auto& row : kTorchDtypes)
    if (row.type == type) return &row;
  return nullptr;
}

/// "float16", as Python and its configuration files name it.
inline std::string python_name(at::ScalarType type) {
  const auto* known = find_torch_dtype(type);
  return known ? std::string(known->name.substr(known->name.find('.') + 1)) : c10::toString(type);
}

/// Null for a dtype that has no typed storage.
constexpr const TorchStorage* storage_of(const TorchDtype& dtype) {
  for (const auto& row : kTorchStorages)
    if (row.dtype == dtype.name.substr(dtype.name.find('.') + 1)) return &row;
  return nullptr;
}

}  // namespace accelerate::formats
