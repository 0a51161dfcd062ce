#pragma once

#include <sys/types.h>

#include <optional>

namespace accelerate {

/// Whose process is at the other end of a TCP connection within this machine (IPv4). Nothing when that is not known:
/// the other end has closed it, or is on another machine.
std::optional<uid_t> user_of_peer(int socket);

/// The same from the tables under /proc/net, which takes longer the more connections the machine has: for kernels that
/// don't answer otherwise.
std::optional<uid_t> user_of_peer_by_table(int socket);

/// This user's or root's, who may do everything anyway.
bool is_own_peer(int socket);

}  // namespace accelerate
