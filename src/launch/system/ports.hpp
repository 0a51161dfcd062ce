#pragma once

#include <cstdint>

namespace accelerate::launcher {

/// A TCP port at which nobody listens, below the range from which the kernel serves outgoing connections: a rank that
/// tries to connect before rank 0 listens could otherwise be given that very port as its own end and keep rank 0 from
/// opening it.
int64_t choose_port();

/// Whether somebody has it.
bool is_port_busy(int64_t port);

/// @throws LaunchError if somebody listens at `port` on this machine, or if we may not.
void require_free_port(int64_t port);

}  // namespace accelerate::launcher
