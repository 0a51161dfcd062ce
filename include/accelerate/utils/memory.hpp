#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <type_traits>
#include <utility>

#include "accelerate/utils/error.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/release_memory.hpp"

namespace accelerate {

/// The use of memory, where a dry run counts it (dry_run.hpp).
enum class MemoryUse {
  parameters,  ///< this rank's: its shards, or all of them where nothing is sharded
  gradients,   ///< averaged ones, in this rank's shards; without sharding the buckets in which they travel
  optimizer,   ///< its states, and what a step needs meanwhile
  gathered,    ///< whole parameters of units that are present, and buffers kept for the next ones
  staging,     ///< whole gradients of units until they are reduced, and casts that are sent
  other,       ///< activations, gradients on their way through autograd, inputs, temporaries
};
ACCELERATE_API const char* to_string(MemoryUse use);

/// Bytes by use.
struct MemoryByUse {
  std::array<int64_t, 6> bytes{};
  int64_t& operator[](MemoryUse use) { return bytes[static_cast<size_t>(use)]; }
  int64_t operator[](MemoryUse use) const { return bytes[static_cast<size_t>(use)]; }
  int64_t total() const;
  /// Parameters, gradients and optimizer states: what the ZeRO paper calls model states.
  int64_t model_states() const {
    return (*this)[MemoryUse::parameters] + (*this)[MemoryUse::gradients] + (*this)[MemoryUse::optimizer];
  }
};

/// Whether an exception means "out of memory" (host, CUDA, HIP, XPU, MPS) or one of the failures that a smaller batch
/// also cures.
ACCELERATE_API bool should_reduce_batch_size(const std::exception& error);

/// Gives cached device memory back to the system. Not collective.
ACCELERATE_API void clear_device_cache();

namespace detail {

/// Ends an attempt. @return whether it failed, on any rank. Of the accumulation group that a failed one leaves half
/// done nothing stays: neither its gradients nor its place, of all Accelerators of the process. Collective where
/// all_ranks.
ACCELERATE_API bool has_failed(bool here, bool all_ranks);

}  // namespace detail

struct FindBatchSizeOptions {
  int64_t starting_batch_size = 128;
  /// The next size to try after one that did not fit; unset: nine tenths, rounded down, as the reference does.
  /// `[](int64_t n) { return n / 2; }` halves.
  std::function<int64_t(int64_t)> reduce_batch_size_fn;
  /// All ranks call it, and go on together: where an attempt fails on one of them, all take the next size. false: each
  /// for itself, as where one rank alone looks for a size.
  bool all_ranks = true;
};

/// Calls f(batch_size) with smaller and smaller sizes until it does not run out of memory, and returns its result.
/// Build the loader, and what must start afresh, inside f; gradients that an attempt has accumulated and not stepped on
/// are dropped, and the next one begins an accumulation group. With several processes all ranks end up with one size.
/// @throws ResourceError when size 0 is reached; CommError on all ranks where one fails while others wait for it in a
/// collective, whose parts can't be taken back; any exception of f that is not about memory.
template <class F> auto find_executable_batch_size(F&& f, FindBatchSizeOptions options = {}) -> decltype(f(int64_t{})) {
  if (!options.reduce_batch_size_fn) options.reduce_batch_size_fn = [](int64_t size) { return size * 9 / 10; };
  clear_device_cache();
  for (int64_t size = options.starting_batch_size; size > 0;) {
    bool failed = false;
    try {
      using Result = decltype(f(size));
      if constexpr (std::is_void_v<Result>) {
        f(size);
        if (!detail::has_failed(false, options.all_ranks)) return;
      } else {
        Result result = f(size);
        if (!detail::has_failed(false, options.all_ranks)) return std::forward<Result>(result);
      }
    } catch (const std::exception& error) {
      if (!should_reduce_batch_size(error)) throw;
      failed = true;
    }
    if (failed) detail::has_failed(true, options.all_ranks);  // outside of the handler: what the exception held is free
    clear_device_cache();
    size = options.reduce_batch_size_fn(size);
  }
  throw ResourceError(
      "find_executable_batch_size: No executable batch size found, reached zero. Even one sample does not fit: use a "
      "smaller model, shorter samples or fewer bytes per number");
}
template <class F> auto find_executable_batch_size(F&& f, int64_t starting_batch_size) -> decltype(f(int64_t{})) {
  return find_executable_batch_size(std::forward<F>(f),
                                    FindBatchSizeOptions{.starting_batch_size = starting_batch_size});
}

}  // namespace accelerate
