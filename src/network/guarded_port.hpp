#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "network/relay.hpp"
#include "utils/fd.hpp"

namespace accelerate {

/// A port of 127.0.0.1 before a server that believes whoever connects: only this user's processes (and root's) get to
/// it.
///
/// The server listens at the same port of another loopback address. There a second socket listens, too, and a rule that
/// every user may give to sockets of his own (SO_ATTACH_REUSEPORT_CBPF; filters of TCP are root's alone on new kernels)
/// leads connections to it from all source ports but a few. Those are held here, so that no other user can have them,
/// and a Relay, which asks the kernel who connects, carries from them.
class GuardedPort {
 public:
  /// Listens. Where the kernel knows no such rules (it is not Linux but acts so), every process of this machine gets to
  /// the server, and a line on stderr says so. admit_own() says who else is let in.
  /// @param port  0: one that is free
  /// @return nothing, with the system's reason in `why`, when the port is busy or no socket can be had
  static std::optional<GuardedPort> open(int64_t port, std::string& why);

  int64_t port() const { return port_; }
  /// The listening descriptor for the server, which takes it over. Once. The server itself connects to
  /// 127.0.0.1:port(), and goes through the guard.
  int listening() { return listening_.release(); }
  /// A way past the guard, for connections that have shown otherwise who they are: being made, without waiting; none
  /// when no descriptors are left.
  Fd connect();

 private:
  GuardedPort() = default;
  struct Way;  // to the server

  int64_t port_ = 0;
  Fd listening_;
  std::shared_ptr<Way> way_;
  std::unique_ptr<Relay> relay_;
};

}  // namespace accelerate
