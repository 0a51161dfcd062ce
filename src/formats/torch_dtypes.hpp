#pragma once

#include <cstdint>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace accelerate::formats {

/// How Python's torch.save names one element type.
struct TorchDtype {
  std::string_view name;     ///< The dtype's global.
  std::string_view storage;  ///< The typed storage's global; empty for the newer types, which are saved as bytes together with their dtype.
  at::ScalarType type;
};

inline constexpr std::string_view kUntypedStorage = "torch.storage.UntypedStorage";

inline constexpr TorchDtype kTorchDtypes[] = {
    {"torch.float32", "torch.FloatStorage", at::kFloat},
    {"torch.float64", "torch.DoubleStorage", at::kDouble},
    {"torch.float16", "torch.HalfStorage", at::kHalf},
    {"torch.bfloat16", "torch.BFloat16Storage", at::kBFloat16},
    {"torch.int64", "torch.LongStorage", at::kLong},
    {"torch.int32", "torch.IntStorage", at::kInt},
    {"torch.int16", "torch.ShortStorage", at::kShort},
    {"torch.int8", "torch.CharStorage", at::kChar},
    {"torch.uint8", "torch.ByteStorage", at::kByte},
    {"torch.bool", "torch.BoolStorage", at::kBool},
    {"torch.complex64", "torch.ComplexFloatStorage", at::kComplexFloat},
    {"torch.complex128", "torch.ComplexDoubleStorage", at::kComplexDouble},
    {"torch.complex32", "", at::kComplexHalf},
    {"torch.uint16", "", at::kUInt16},
    {"torch.uint32", "", at::kUInt32},
    {"torch.uint64", "", at::kUInt64},
    {"torch.float8_e4m3fn", "", at::kFloat8_e4m3fn},
    {"torch.float8_e5m2", "", at::kFloat8_e5m2},
    {"torch.float8_e4m3fnuz", "", at::kFloat8_e4m3fnuz},
    {"torch.float8_e5m2fnuz", "", at::kFloat8_e5m2fnuz},
    {"torch.float8_e8m0fnu", "", at::kFloat8_e8m0fnu},
    {"torch.float4_e2m1fn_x2", "", at::kFloat4_e2m1fn_x2},
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

constexpr const TorchDtype* find_torch_storage(std::string_view storage) {
  for (const auto& row : kTorchDtypes)
    if (!row.storage.empty() && row.storage == storage) return &row;
  return nullptr;
}

}  // namespace accelerate::formats
