#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <utility>

#include "accelerate/error.hpp"
#include "accelerate/export.hpp"

namespace accelerate {

/// Whether an exception means "out of memory" (host, CUDA, HIP, XPU, MPS) or one of the failures that a smaller batch also cures.
ACCELERATE_API bool should_reduce_batch_size(const std::exception& error);

/// Gives cached device memory back to the system. Not collective.
ACCELERATE_API void clear_device_cache();

struct FindBatchSizeOptions {
  int64_t starting_batch_size = 128;
  /// The next size to try after one that did not fit; unset: nine tenths, rounded down, as the reference does. `[](int64_t n) { return n / 2; }` halves.
  std::function<int64_t(int64_t)> reduce_batch_size_fn;
};

/// Calls f(batch_size) with smaller and smaller sizes until it does not run out of memory, and returns its result. Build the loader, and what must start
/// afresh, inside f. With several processes each rank decides for itself: let them agree inside f when their memory differs.
/// @throws ResourceError when size 0 is reached; any exception of f that is not about memory.
template <class F>
auto find_executable_batch_size(F&& f, FindBatchSizeOptions options = {}) -> decltype(f(int64_t{})) {
  if (!options.reduce_batch_size_fn) options.reduce_batch_size_fn = [](int64_t size) { return size * 9 / 10; };
  clear_device_cache();
  for (int64_t size = options.starting_batch_size; size > 0;) {
    try {
      return f(size);
    } catch (const std::exception& error) {
      if (!should_reduce_batch_size(error)) throw;
    }
    clear_device_cache();  // outside of the handler: what the exception held is free now
    size = options.reduce_batch_size_fn(size);
  }
  throw ResourceError("find_executable_batch_size: No executable batch size found, reached zero. Even one sample does not fit: use a smaller model, shorter samples or fewer bytes per number");
}
template <class F>
auto find_executable_batch_size(F&& f, int64_t starting_batch_size) -> decltype(f(int64_t{})) {
  return find_executable_batch_size(std::forward<F>(f), FindBatchSizeOptions{.starting_batch_size = starting_batch_size});
}

}  // namespace accelerate
