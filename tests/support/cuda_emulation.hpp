#pragma once

#include <string>

#include "codes/cuda/launch.hpp"

namespace accelerate::codes::cuda {

/// Runs a kernel of src/codes/cuda/kernels.cuh on the CPU, with memory of the host: a Launcher for tests. The threads
/// of a block are fibers of one thread, which go on to the next barrier one after the other; blocks run one after the
/// other. Numbers are those of a GPU to the bit, since both round as IEEE 754 says (NaN may differ in its bits). Not
/// from two threads at a time.
/// @throws std::out_of_range for a kernel that is not there: products are compiled for 1, 3 and 8 rows of x only;
/// std::logic_error where a GPU would fail: threads don't all come to the same barrier, or memory is not aligned
bool emulate(const Launch& launch, const c10::Device& device);
bool has_emulated(const std::string& kernel);

}  // namespace accelerate::codes::cuda
