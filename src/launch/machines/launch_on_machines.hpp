#pragma once

#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
struct Job;
class Monitor;

/// Meets the other machines of the job, starts this one's ranks, and does so again in every new round until the job is
/// over. Blocking.
/// @param job  afterwards as its last round was
/// @param command  what each rank runs
/// @param monitor  shows the ranks; may be null
/// @return 0 if all ranks of all machines returned 0; else what the rank that failed first on any machine returned (128
///         + signal if a signal ended it), 69 if a machine was lost, 71 if machines did not come or could not be
///         reached; 128 + signal when a signal to this launcher ended its part.
int launch_on_machines(Job& job, const Host& host, const std::vector<std::string>& command, Monitor* monitor);

}  // namespace accelerate::launcher
