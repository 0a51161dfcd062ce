#include <ATen/autocast_mode.h>

#include "accelerate/precision.hpp"
#include "precision/counts.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

void require_autocast(const char* operation, at::DeviceType type) {
  if (at::autocast::is_autocast_available(type)) return;
  raise<ConfigError>(
      "{}: found device type '{}', which has no autocast; expected cpu, cuda, xpu, mps or another accelerator. Train "
      "with mixed_precision \"no\" there.",
      operation, c10::DeviceTypeName(type, /*lower_case=*/true));
}

}  // namespace

std::optional<at::ScalarType> autocast_dtype(PrecisionType precision) {
  switch (precision) {
    case PrecisionType::FP16:
      return at::kHalf;
    case PrecisionType::BF16:
    case PrecisionType::FP8:
      return at::kBFloat16;
    case PrecisionType::NO:
      return std::nullopt;
  }
  return std::nullopt;
}

void check_precision(PrecisionType precision, const at::Device& device) {
  // In dry runs, on the meta device, sharding brings the precision; nothing is computed that autocast could change.
  if (precision != PrecisionType::NO && !device.is_meta()) require_autocast("check_precision", device.type());
}

AutocastGuard::AutocastGuard(at::DeviceType device_type, std::optional<at::ScalarType> dtype,
                             const AutocastKwargs& kwargs)
    : device_type_(device_type) {
  require_autocast("autocast", device_type);
  if (dtype && *dtype != at::kHalf && *dtype != at::kBFloat16)
    raise<ConfigError>("autocast: found dtype {}, expected Half (fp16) or BFloat16 (bf16).", c10::toString(*dtype));
  previous_enabled_ = at::autocast::is_autocast_enabled(device_type);
  previous_dtype_ = at::autocast::get_autocast_dtype(device_type);
  previous_cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  const bool enabled = kwargs.enabled && dtype.has_value();
  if (enabled) counts::add(PrecisionCount::autocast_regions);
  at::autocast::set_autocast_enabled(device_type, enabled);
  if (dtype) at::autocast::set_autocast_dtype(device_type, *dtype);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(kwargs.cache_enabled.value_or(previous_cache_enabled_));
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_type_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_enabled_);
}

}  // namespace accelerate
