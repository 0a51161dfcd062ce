#pragma once

#include "parallel/sharding/sharding.hpp"

namespace support {

/// The layer that shards a prepared model; null where none does. The model's engine owns it.
template <class Prepared> accelerate::parallel::Sharding* fsdp_of(const Prepared& model) {
  if (!model.core()->engine) return nullptr;
  for (const auto& layer : model.core()->engine->layers())
    if (auto* sharding = dynamic_cast<accelerate::parallel::Sharding*>(layer.get())) return sharding;
  return nullptr;
}

}  // namespace support
