#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/mesh.hpp"
#include "parallel/sharding/settings.hpp"
#include "parallel/zero/zero_settings.hpp"

namespace accelerate::parallel {

/// How so many ranks hold a model: stage 0 replicates it, the others split it over all.
std::vector<comm::AxisSize> axes_of(const zero::ZeroSettings& zero, int64_t ranks);

/// The dtype of parameters and activations; unset: the model's own.
std::optional<at::ScalarType> compute_dtype(const zero::ZeroSettings& zero);

/// The dtype that torch_autocast computes in; unset: it is off.
std::optional<at::ScalarType> autocast_dtype(const zero::ZeroSettings& zero);

/// The settings of ZeRO's stages for the engine that shards. Source: arXiv:1910.02054; deepspeed 0.19.8.
ShardingSettings settings_of(const zero::ZeroSettings& zero, int64_t ranks);

}  // namespace accelerate::parallel
