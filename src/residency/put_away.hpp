#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace accelerate::residency {

/// Tensors whose bytes lie on the host for a while. They stay the same objects: whoever holds one finds it there, and
/// on its device again afterwards. Views of them are tensors for themselves, and are put away by themselves.
class PutAway {
 public:
  /// Nothing for what lies on the host, and for undefined ones. @param non_blocking  returns before the bytes are there
  void put(const at::Tensor& tensor, bool pin_memory, bool non_blocking);
  /// All of them, on the stream behind what put() has started.
  void bring_back(bool non_blocking);

 private:
  std::vector<std::pair<at::Tensor, at::Device>> away_;  ///< and where they come from
};

}  // namespace accelerate::residency
