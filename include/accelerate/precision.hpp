#pragma once

/// In which number format? Autocast regions and what goes with them.

#include <optional>

#include "accelerate/state.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate {

/// fp16 -> Half, bf16 and fp8 (what is no fp8 product) -> BFloat16, no -> nothing.
ACCELERATE_API std::optional<at::ScalarType> autocast_dtype(PrecisionType precision);
/// @throws ConfigError when `device` can't run autocast in `precision`, naming what it can.
ACCELERATE_API void check_precision(PrecisionType precision, const at::Device& device);

/// Autocast for the calling thread from construction to destruction; regions nest, and the state found is restored also
/// when an exception passes. Leaving the outermost region drops the cache of cast weights.
/// @param dtype  Half or BFloat16. Unset: autocast is off within the region (as for kwargs.enabled = false).
/// @throws ConfigError for a device type without autocast or another dtype.
class ACCELERATE_API AutocastGuard {
 public:
  AutocastGuard(at::DeviceType device_type, std::optional<at::ScalarType> dtype, const AutocastKwargs& kwargs = {});
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  ~AutocastGuard();

 private:
  at::DeviceType device_type_;
  bool previous_enabled_;
  at::ScalarType previous_dtype_;
  bool previous_cache_enabled_;
};

/// `auto region = autocast(at::kCPU, at::kBFloat16);`
[[nodiscard]] inline AutocastGuard autocast(at::DeviceType device_type, std::optional<at::ScalarType> dtype,
                                            const AutocastKwargs& kwargs = {}) {
  return AutocastGuard(device_type, dtype, kwargs);
}

/// A copy of a model's result under autocast, in which fp16 and bf16 tensors are fp32 at any depth.
template <class T> T convert_outputs_to_fp32(const T& outputs) { return convert_to_fp32(outputs); }

}  // namespace accelerate
