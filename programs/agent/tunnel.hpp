#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "network/guarded_port.hpp"

/// c10d's TCPStore believes whoever connects. So it listens on loopback only, and a gate stands before it. With a token
/// that speaks TLS 1.3 with the token as the pre-shared key (OpenSSL), which proves to either end that the other knows
/// the token, and encrypts what follows: nothing that a stranger sends reaches the store. Without one it passes on what
/// comes from other machines, and of this one what comes from this user's processes.
namespace accelerate::agent {

/// The host's end: passes connections that may come on to the store.
class Gate {
 public:
  /// @param listening  a listening socket, which it takes over
  /// @param token      empty: none is asked for
  /// @throws LaunchError when no further port can be opened
  Gate(int listening, const std::string& token);
  ~Gate();
  Gate(const Gate&) = delete;
  /// The port on which the store is to listen: other users of this machine get there through the gate only.
  GuardedPort& store();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A client's end: a port of 127.0.0.1 that leads to the gate. Only processes of this user get in.
class Door {
 public:
  /// Tries until `timeout` has passed whether the gate is there and accepts the token.
  /// @throws LaunchError when it is not there, ConfigError when it refuses.
  Door(const std::string& host, int64_t port, const std::string& token, std::chrono::milliseconds timeout);
  ~Door();
  Door(const Door&) = delete;
  int64_t port() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate::agent
