#pragma once

#include <accelerate/parallel/fsdp.hpp>

#include <memory>

namespace support {

/// The engine of a prepared model if it is sharded, else null.
template <class Prepared>
std::shared_ptr<accelerate::parallel::FullyShardedDataParallel> fsdp_of(const Prepared& model) {
  return std::dynamic_pointer_cast<accelerate::parallel::FullyShardedDataParallel>(model.core()->engine);
}

}  // namespace support
