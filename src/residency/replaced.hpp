#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>

namespace accelerate::residency {

/// A listener for replaced values. When a tensor's values are replaced (LibTorch's set_data() leaves nothing of what
/// stood there), a handler that watches operators on it is not asked any more. So the library's own code that replaces
/// values says so here; the listener may be null.
using ReplacedListener = void (*)(const at::Tensor& tensor);
inline std::atomic<ReplacedListener> replaced_listener{nullptr};

inline void say_replaced(const at::Tensor& tensor) {
  if (const auto listener = replaced_listener.load(std::memory_order_acquire)) listener(tensor);
}

}  // namespace accelerate::residency
