#include "launch/system/ports.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <string>

#include "utils/raise.hpp"

namespace accelerate::launcher {
namespace {

/// Tries to bind `port` on all addresses and gives it back at once. Returns 0 or the error number; `port` 0 is replaced
/// by what the kernel chose.
int try_port(int64_t& port) {
  // LibTorch's store listens on IPv6 and IPv4 in one socket and allows reuse after a recent close; so do we, to get the
  // same answer.
  bool v6 = true;
  int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) v6 = false, fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int on = 1, off = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (v6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_port = htons(static_cast<uint16_t>(port));
  auto* address = v6 ? reinterpret_cast<sockaddr*>(&any6) : reinterpret_cast<sockaddr*>(&any4);
  socklen_t length = v6 ? sizeof(any6) : sizeof(any4);
  int error = 0;
  if (::bind(fd, address, length) != 0 || ::getsockname(fd, address, &length) != 0) error = errno;
  if (error == 0) port = ntohs(v6 ? any6.sin6_port : any4.sin_port);
  ::close(fd);
  return error;
}

}  // namespace

int64_t choose_port() {
  constexpr int64_t kLowest = 15000;
  int64_t outgoing = 32768;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> outgoing;
  std::random_device random;
  for (int attempt = 0; attempt < 64 && outgoing > kLowest + 1000; ++attempt) {
    int64_t port = std::uniform_int_distribution<int64_t>(kLowest, outgoing - 1)(random);
    if (try_port(port) == 0) return port;
  }
  int64_t port = 0;  // no room below: take what the kernel has
  if (const int error = try_port(port)) raise<LaunchError>("no free TCP port was found: {}", std::strerror(error));
  return port;
}

bool is_port_busy(int64_t port) { return try_port(port) == EADDRINUSE; }

void require_free_port(int64_t port) {
  const int error = try_port(port);
  if (error == 0) return;
  if (error == EADDRINUSE)
    raise<LaunchError>(
        "--main_process_port {}: the port is already in use on this machine, probably by another training run. Choose "
        "another port, or leave the option out (or give 0) to have a free one chosen on a single machine",
        port);
  raise<LaunchError>("--main_process_port {}: the port can't be opened: {}{}", port, std::strerror(error),
                     error == EACCES ? " (ports below 1024 need privileges)" : "");
}

}  // namespace accelerate::launcher
