#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "accelerate/profiler.hpp"

namespace torch::autograd::profiler {
struct ProfilerResult;
}  // namespace torch::autograd::profiler

namespace accelerate::profiler {

/// The use of memory, in the order of PyTorch's files.
enum class Category { parameter, optimizer_state, input, temporary, activation, gradient, autograd_detail, unknown };
constexpr size_t kCategories = 8;

/// Memory of one storage, from its allocation to its release.
struct Lifetime {
  static constexpr int64_t kOutside = -1;
  const void* data = nullptr;
  at::Device device = at::kCPU;
  int64_t bytes = 0;
  int64_t begin_ns = kOutside, end_ns = kOutside;  ///< since 1970; outside of the recording: kOutside
  Category category = Category::unknown;
};

/// All that the recording saw, by the time of its begin, and to what it belonged, as far as operators and `known` tell.
/// Needs a recording with memory and shapes.
/// @param known  storages that live at the end of the recording
std::vector<Lifetime> memory_lifetimes(const torch::autograd::profiler::ProfilerResult& recording,
                                       const std::vector<ProfileStorage>& known);

/// Bytes of each category from a moment on.
struct MemoryMoment {
  int64_t time_us = 0;
  std::array<int64_t, kCategories> bytes{};
};
/// A memory event of PyTorch's.
struct MemoryChange {
  enum class Action { preexisting = 1, create = 2, destroy = 4 };  ///< PyTorch's numbers
  int64_t time_ns = 0;                                             ///< -1: before the recording
  Action action = Action::create;
  int64_t bytes = 0;  ///< negative: released
  Category category = Category::unknown;
};

/// The changes on one device. @throws ConfigError for a device of which nothing was recorded.
std::vector<MemoryChange> memory_changes(const std::vector<Lifetime>& lifetimes, at::Device device);
std::vector<MemoryMoment> memory_moments(const std::vector<MemoryChange>& changes);

/// The files of PyTorch's export, and a page with a plot that needs no network.
std::string to_json(const std::vector<MemoryChange>& changes);
std::string to_json(const std::vector<MemoryMoment>& moments);
std::string to_page(const std::vector<MemoryMoment>& moments, at::Device device);

}  // namespace accelerate::profiler
