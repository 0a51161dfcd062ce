#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
struct Job;
class Monitor;

/// Starts this command's job on the machines of --hostfile: on each a launcher by ssh (or --remote_shell), with this
/// one's options and folder. Blocking.
///
/// A remote launcher's standard input is its tether: its first line is the rendezvous' token, chosen here unless
/// --rdzv_conf has one, and its end stops the launcher, however this one ends. Through pdsh no line comes; there a
/// token must lie on each machine.
/// @return what the machine that failed first returned, 255 where the shell itself failed; 128 + signal when a signal
/// to this launcher ended the job
int launch_by_hostfile(Job job, const Host& host, Monitor* monitor);

/// In a remote launcher: takes the first line of the input, if the token comes that way, and has this process sent
/// SIGTERM when the input ends.
std::string take_tether(bool with_token);

/// Whether the variable is one that other machines get too: those by which people steer libraries. More can be set by
/// the program's own environment there.
bool is_passed_on(const std::string& name);

/// The words for `name`'s shell; element 0 is the shell. @param rank its --machine_rank
std::vector<std::string> remote_command(const Job& job, const Host& host, size_t rank);

}  // namespace accelerate::launcher
