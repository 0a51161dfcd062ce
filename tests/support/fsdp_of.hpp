#pragma once

#include <memory>

#include "parallel/sharding/sharding.hpp"

namespace support {

/// The engine of a prepared model if it is sharded, else null.
template <class Prepared> std::shared_ptr<accelerate::parallel::Sharding> fsdp_of(const Prepared& model) {
  return std::dynamic_pointer_cast<accelerate::parallel::Sharding>(model.core()->engine);
}

}  // namespace support
