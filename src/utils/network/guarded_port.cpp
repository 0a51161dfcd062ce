#include "utils/network/guarded_port.hpp"

#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <system_error>

#include "utils/network/peer_user.hpp"

namespace accelerate {
namespace {

constexpr uint32_t kAddresses = 0xfffffe;  // of 127.0.0.0/8

sockaddr_in place(uint32_t address, int64_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(static_cast<uint16_t>(port));
  result.sin_addr.s_addr = htonl(address);
  return result;
}

Fd new_socket(int flags = 0) { return Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0)); }

bool set(const Fd& fd, int option) {
  const int on = 1;
  return fd && ::setsockopt(fd.get(), SOL_SOCKET, option, &on, sizeof(on)) == 0;
}
bool bind_to(const Fd& fd, const sockaddr_in& where) {
  return ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0;
}

int64_t port_of(const Fd& fd) {
  sockaddr_in own{};
  socklen_t length = sizeof(own);
  return ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0 ? ntohs(own.sin_port) : 0;
}

/// Packets from another source port than this are as if they had never come. The filter sees the header of TCP, whose
/// first half word is that port.
void admit_only(const Fd& listening, int64_t source_port) {
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_H | BPF_ABS, 0),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(source_port), 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, 0xffffffff), BPF_STMT(BPF_RET | BPF_K, 0)};
  const sock_fprog filter{static_cast<uint16_t>(std::size(program)), program};
  ::setsockopt(listening.get(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter));
}

/// A connection takes two descriptors here and one of the server's, and the usual limit is 1024. No more than is of
/// use: there are programs that go through all numbers that a descriptor may have.
void raise_limit_of_descriptors() {
  constexpr rlim_t kEnough = 65536;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kEnough) return;
  limit.rlim_cur = std::min(limit.rlim_max, kEnough);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

void say_exhausted() {
  std::fputs("no file descriptors are left for connections to this job's store: raise the limit (`ulimit -n`)\n",
             stderr);
}

constexpr int kBacklog = 2048;

}  // namespace

/// Several sockets of one user may share a port (SO_REUSEPORT), each with an address of its own; nobody else's may.
struct GuardedPort::Way {
  Fd holder;  ///< of the source port, at all addresses
  int64_t source_port = 0;
  sockaddr_in server{};
  std::atomic<uint32_t> connections = 0;

  bool hold() {
    holder = new_socket();
    if (!set(holder, SO_REUSEPORT) || !bind_to(holder, place(INADDR_ANY, 0))) return false;
    source_port = port_of(holder);
    return true;
  }
  Fd connect() {
    for (int attempt = 0; attempt < 1000; ++attempt) {  // an address may be in use by a connection that ended just now
      Fd fd = new_socket(SOCK_NONBLOCK);
      if (!set(fd, SO_REUSEPORT)) return {};
      if (!bind_to(fd, place(INADDR_LOOPBACK + connections++ % kAddresses, source_port))) continue;
      if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&server), sizeof(server)) == 0 || errno == EINPROGRESS)
        return fd;
    }
    return {};
  }
};

std::optional<GuardedPort> GuardedPort::open(int64_t port, std::string& why) {
  raise_limit_of_descriptors();
  GuardedPort result;
  result.way_ = std::make_shared<Way>();
  Fd outside = new_socket();
  const auto fails = [&why]() -> std::optional<GuardedPort> {
    why = std::strerror(errno);
    return std::nullopt;
  };
  if (!result.way_->hold() || !set(outside, SO_REUSEADDR) || !bind_to(outside, place(INADDR_LOOPBACK, port)) ||
      ::listen(outside.get(), kBacklog) != 0)
    return fails();
  result.port_ = port_of(outside);
  for (uint32_t i = 1;; ++i) {
    result.listening_ = new_socket();
    result.way_->server = place(INADDR_LOOPBACK + i, result.port_);
    if (set(result.listening_, SO_REUSEADDR) && bind_to(result.listening_, result.way_->server)) break;
    if (i == 100) return fails();
  }
  admit_only(result.listening_, result.way_->source_port);
  if (::listen(result.listening_.get(), kBacklog) != 0) return fails();
  try {
    result.relay_ = std::make_unique<Relay>(outside.release(),
                                            Relay::Ends{.admit = admit_own,
                                                        .near = [](Fd fd) { return plain_stream(std::move(fd)); },
                                                        .far = [way = result.way_]() -> std::unique_ptr<Stream> {
                                                          Fd fd = way->connect();
                                                          return fd ? plain_stream(std::move(fd)) : nullptr;
                                                        },
                                                        .exhausted = say_exhausted});
  } catch (const std::system_error& error) {
    why = error.code().message();
    return std::nullopt;
  }
  return result;
}

Fd GuardedPort::connect() { return way_->connect(); }

}  // namespace accelerate
