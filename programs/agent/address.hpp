#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "launch/system/process.hpp"

namespace accelerate::agent {

/// Names of this machine's own addresses include all of 127.0.0.0/8.
bool is_own_address(const std::string& host);
/// An open port on one address, for a server that takes the descriptor over. `port` 0 becomes the one that the system
/// chose.
/// @return the descriptor, or minus an error number: -EADDRINUSE, -EADDRNOTAVAIL (not an address of this machine), ...
/// @throws LaunchError when `host` has no address.
int listen_at(const std::string& host, int64_t& port);
/// The address from which this machine sends to `host`: how others of its network reach this machine.
std::string address_towards(const std::string& host, int64_t port);
std::string host_name();
/// A connection, or none.
launcher::Fd connect_to(const std::string& host, int64_t port);
/// Tries until somebody listens there. c10d's client would do so too, but with pauses that grow to minutes.
/// @throws LaunchError when nobody does in time.
launcher::Fd wait_for_port(const std::string& host, int64_t port, std::chrono::milliseconds timeout);

}  // namespace accelerate::agent
