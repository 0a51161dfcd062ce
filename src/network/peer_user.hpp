#pragma once

#include <sys/types.h>

#include <optional>

namespace accelerate {

/// The user whose process is at the other end of a TCP connection within this machine. Nothing when that is not known:
/// the other end has closed it, or is on another machine.
std::optional<uid_t> user_of_peer(int socket);

/// The same from the tables under /proc/net, which takes longer the more connections the machine has: for kernels that
/// don't answer otherwise.
std::optional<uid_t> user_of_peer_by_table(int socket);

/// Whether the other end's address is one of this machine's.
bool is_on_this_machine(int socket);

/// Whether the other end may come to a job's store: it is this user's or root's, who may do everything anyway. Stderr
/// is told once of another user: it may be a rank of the job, which would wait and not know why. Where the kernel
/// does not say whose connections are (it is not Linux but acts so), everybody may.
bool admit_own(int socket);

/// The same, but those on other machines may come, of whom nothing is known.
bool admit_own_or_remote(int socket);

}  // namespace accelerate
