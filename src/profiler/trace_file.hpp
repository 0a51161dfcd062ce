#pragma once

#include <filesystem>

#include <nlohmann/json.hpp>

#include "observe/trace.hpp"
#include "profiler/native_stacks.hpp"

namespace accelerate::profiler {

/// Adds to a trace that Kineto has written what it has not: this library's spans, steps, and more members of the head.
/// Only the end of the file is rewritten, however long it is.
/// @throws ResourceError if it can't be written; InternalError if its end is not as Kineto writes it.
void complete_trace(const std::filesystem::path& file, const trace::Recording& recording, nlohmann::json head);

/// Adds "Call stack" and "Module Hierarchy" to operators of such a file that have none, in the form that Kineto writes
/// of TorchScript's. The file is written anew. @throws ResourceError if it can't be written.
void add_call_sites(const std::filesystem::path& file, const CallSites& sites);

}  // namespace accelerate::profiler
