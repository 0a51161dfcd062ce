#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate {

/// The alignment with which memory is made of huge pages alone.
constexpr int64_t kHugePage = 2 << 20;

/// Asks the system to hold memory in huge pages (on Linux, where they may be had for the asking: 2 MB each). For values
/// that are read whole, again and again: with pages of 4 KB, finding them costs a virtual machine more than half of its
/// memory's bandwidth. To be called before the memory is written for the first time. Does nothing elsewhere, for small
/// tensors, and when there are no such pages.
void prefer_huge_pages(const void* begin, int64_t bytes);
void prefer_huge_pages(const at::Tensor& tensor);

/// Memory on the CPU for what is read whole, or stays among much that comes and goes: side by side in huge pages. A
/// tensor's bytes are given back when it ends; small tensors come from LibTorch's allocator.
/// @throws ResourceError where there is no memory
at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, at::ScalarType dtype);

/// Gives the whole pages of a range back to the system, which keeps the addresses; later reads give 0 there, or in
/// a mapped file the file's values.
void give_pages_back(void* begin, int64_t bytes);

/// Gives back what the allocator keeps of memory that has been freed: places of large tensors, between which small
/// things stay. (GNU's C library and jemalloc; nothing elsewhere.) Some milliseconds: for the ends of phases, not
/// for loops.
void give_freed_memory_back();

}  // namespace accelerate
