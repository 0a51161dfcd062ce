#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace accelerate {

/// Calls work(begin, end) for ranges that make up 0 to `count`, on LibTorch's own threads (at::get_num_threads() of
/// them, OMP_NUM_THREADS and all). Blocks. Rethrows what a call throws. at::parallel_for() is compiled into its caller,
/// which needs the OpenMP that LibTorch has, or runs alone.
/// @param grain  So many are worth a thread.
void parallel_ranges(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> work);

}  // namespace accelerate
