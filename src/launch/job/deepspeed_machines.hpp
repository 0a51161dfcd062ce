#pragma once

#include <string>

namespace accelerate::launcher {

struct Host;
struct Job;
class Settings;

/// Whether --deepspeed_multinode_launcher and --deepspeed_hostfile say who starts the machines: under DeepSpeed, on
/// several, unless each has a launcher of its own (standard) or --hostfile says it.
bool deepspeed_starts_machines(const Settings& settings);

/// --deepspeed_multinode_launcher in small letters; pdsh where nobody named one.
std::string deepspeed_launcher(const Settings& settings);

/// Plans what DeepSpeed's program would do with the hostfile, its filters and the launcher's name: who starts the
/// ranks, how many on which machine, with which devices and variables. For programs that Python doesn't run: that
/// program starts the others.
/// Source: DeepSpeed 0.19.8, launcher/runner.py and multinode_runner.py.
/// @throws ConfigError naming the option at fault.
void plan_deepspeed_machines(Job& job, const Host& host);

}  // namespace accelerate::launcher
