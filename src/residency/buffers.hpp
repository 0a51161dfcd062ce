#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "memory/held_bytes.hpp"

namespace accelerate::residency {

/// Flat storages that were given back wait here for the next unit of their size: a fresh allocation costs page faults
/// for every byte. Its owner has a mutex.
class Buffers {
 public:
  /// 1-D, uninitialised. @throws ResourceError when memory is exhausted, after what is kept here has been freed.
  at::Tensor take(int64_t numel, at::ScalarType dtype, const at::Device& device);
  void give(at::Tensor flat);
  /// Frees of what nobody uses as much as it takes for no more than `bytes` to be kept.
  void keep_at_most(int64_t bytes);
  /// Frees what nobody uses.
  void trim() { free_.clear(), kept_.add(-kept_.bytes()); }

 private:
  static constexpr size_t kKept = 2;  ///< of each size: the unit in use and the one on its way
  using Size = std::tuple<int64_t, at::ScalarType, at::DeviceType, at::DeviceIndex>;
  std::map<Size, std::vector<at::Tensor>> free_;
  HeldBytes kept_{HeldFor::communication};
};

}  // namespace accelerate::residency
