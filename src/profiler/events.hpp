#pragma once

#include "accelerate/profiler.hpp"

namespace torch::autograd::profiler {
struct ProfilerResult;
}  // namespace torch::autograd::profiler

namespace accelerate::profiler {

/// The calls of a recording with who called whom, as PyTorch's Python side makes them of Kineto's.
ProfileEvents collect_events(const torch::autograd::profiler::ProfilerResult& recording, ProfileContext context);

}  // namespace accelerate::profiler
