#pragma once

#include "accelerate/profiler.hpp"
#include "observe/trace.hpp"
#include "profiler/native_stacks.hpp"

namespace torch::autograd::profiler {
struct ProfilerResult;
}  // namespace torch::autograd::profiler

namespace accelerate::profiler {

/// The calls of a recording with who called whom, as PyTorch's Python side makes them of Kineto's.
/// @param spans  this library's of the same time, which become calls among them
/// @param sites  where calls were made, for those of which Kineto does not say
ProfileEvents collect_events(const torch::autograd::profiler::ProfilerResult& recording,
                             const std::vector<trace::Event>& spans, const CallSites& sites, ProfileContext context);

}  // namespace accelerate::profiler
