#pragma once

#include <cstdint>
#include <optional>

namespace accelerate {

/// Optimizers hold columns of each parameter: AcceleratorOptions::layer_plugins = {ColumnsPlugin{.size = 2}}. Fields
/// that are left out come from the environment that `accelerate launch` sets.
struct ColumnsPlugin {
  /// So many ranks share a parameter's columns, a divisor of all ranks. ACCELERATE_COLUMNS_SIZE, else 1.
  std::optional<int64_t> size;
};

}  // namespace accelerate
