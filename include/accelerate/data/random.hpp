#pragma once

/// Seeds and random generators over ranks. Source: reference features table 1.7; conformance: set_seed.json,
/// collective_ops.json ("shuffled").

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "accelerate/utils/core_kwargs.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

struct SetSeedOptions {
  /// Adds the rank to the seed, so that ranks draw different numbers.
  bool device_specific = false;
  /// Also makes LibTorch use deterministic algorithms, and fail where it has none. Slower.
  bool deterministic = false;
};

/// Seeds LibTorch's default generators on all devices. Not collective. C's rand() and <random> engines are the caller's
/// own.
ACCELERATE_API void set_seed(int64_t seed, const SetSeedOptions& options = {});

/// Gives every rank the state that rank 0's generator has. Collective; does nothing alone.
/// @throws ConfigError when `type` is `generator` and none is passed.
ACCELERATE_API void synchronize_rng_state(RNGType type, const std::optional<at::Generator>& generator = std::nullopt);
/// The same for several, in the order given (which must be equal on all ranks).
ACCELERATE_API void synchronize_rng_states(const std::vector<RNGType>& types,
                                           const std::optional<at::Generator>& generator = std::nullopt);

}  // namespace accelerate
