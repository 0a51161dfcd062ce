#include "network/guarded_port.hpp"

#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <vector>

#include "network/peer_user.hpp"

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

/// Chooses between the first two sockets of a group (SO_REUSEPORT): connections from other source ports than these get
/// to the first. Looks at the header of IP, before which nothing but the usual length and so no option may stand, and
/// at the half word after it, which is that port. @param source_ports  at most 250: a jump is so far
bool admit_only(const Fd& first, const std::vector<int64_t>& source_ports) {
  const auto ip = static_cast<uint32_t>(SKF_NET_OFF);
  const auto count = static_cast<uint8_t>(source_ports.size());
  std::vector<sock_filter> program = {BPF_STMT(BPF_LD | BPF_B | BPF_ABS, ip),
                                      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x45, 0, static_cast<uint8_t>(count + 1)),
                                      BPF_STMT(BPF_LD | BPF_H | BPF_ABS, ip + 20)};
  for (uint8_t i = 0; i < count; ++i)
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(source_ports[i]),
                               static_cast<uint8_t>(count - i), 0));
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 1));
  const sock_fprog choice{static_cast<uint16_t>(program.size()), program.data()};
  return ::setsockopt(first.get(), SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &choice, sizeof(choice)) == 0;
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

void say_unguarded() {
  std::fprintf(stderr,
               "this kernel can't tell connections apart (%s): every user of this machine gets to this job's store\n",
               std::strerror(errno));
}

/// At an address that several sockets may share, all of this user.
Fd shared_socket(const sockaddr_in& where) {
  Fd fd = new_socket();
  return set(fd, SO_REUSEADDR) && set(fd, SO_REUSEPORT) && bind_to(fd, where) ? std::move(fd) : Fd();
}

constexpr int kBacklog = 2048;

}  // namespace

/// Several sockets of one user may share a port (SO_REUSEPORT), each with an address of its own; nobody else's may.
struct GuardedPort::Way {
  /// Enough for a host's ranks to come from 127.0.0.1, whose name every machine knows: c10d's store asks for the name
  /// of whoever connects before it goes on, which takes seconds where a name server is asked and does not answer.
  static constexpr int64_t kPorts = 64;
  std::vector<Fd> holders;  ///< of the source ports, at all addresses
  Fd strangers;  ///< at the server's address: connections from other ports get here, where nobody ever answers
  std::vector<int64_t> source_ports;
  sockaddr_in server{};
  std::atomic<uint32_t> connections = 0;

  bool hold() {
    for (int64_t i = 0; i < kPorts; ++i) {
      Fd holder = new_socket();
      if (!set(holder, SO_REUSEPORT) || !bind_to(holder, place(INADDR_ANY, 0))) return !holders.empty();
      source_ports.push_back(port_of(holder));
      holders.push_back(std::move(holder));
    }
    return true;
  }
  Fd connect() {
    constexpr int kFromLoopback = 8;
    // A port and an address may be in use together, also by a connection that ended just now.
    for (int attempt = 0; attempt < 1000; ++attempt) {
      Fd fd = new_socket(SOCK_NONBLOCK);
      if (!set(fd, SO_REUSEPORT)) return {};
      const uint32_t number = connections++;
      const uint32_t address = INADDR_LOOPBACK + (attempt < kFromLoopback ? 0 : number % kAddresses);
      if (!bind_to(fd, place(address, source_ports[number % source_ports.size()]))) continue;
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
    result.way_->server = place(INADDR_LOOPBACK + i, result.port_);
    result.way_->strangers = shared_socket(result.way_->server);
    if (result.way_->strangers) break;
    if (i == 100) return fails();
  }
  // Never without the rule: it is there before the first of them listens, and before there is a second to choose.
  const bool ruled = admit_only(result.way_->strangers, result.way_->source_ports);
  if (!ruled) say_unguarded();
  if (ruled && ::listen(result.way_->strangers.get(), 0) != 0) return fails();
  result.listening_ = shared_socket(result.way_->server);
  if (!result.listening_ || ::listen(result.listening_.get(), kBacklog) != 0) return fails();
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
