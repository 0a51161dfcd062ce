#include "network/peer_user.hpp"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "utils/fd.hpp"

namespace accelerate {
namespace {

constexpr int kEstablished = 1;  // TCP_ESTABLISHED; in other states the kernel says that root is the owner

/// The ends of a connection. Addresses of version 4 also where they are written as those of version 6: a socket of that
/// version may have either at its other end.
struct Ends {
  struct End {
    std::array<uint32_t, 4> address{};  // as they travel; of version 4 the first
    uint16_t port = 0;
  };
  uint8_t family = AF_INET;
  End own, peer;
};

std::optional<Ends> ends_of(int socket) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof(own), peer_length = sizeof(peer);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_length) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0)
    return std::nullopt;
  Ends ends;
  const auto read = [&ends](const sockaddr_storage& from, Ends::End& end) {
    if (from.ss_family == AF_INET) {
      const auto& place = reinterpret_cast<const sockaddr_in&>(from);
      end = {{place.sin_addr.s_addr}, place.sin_port};
      return true;
    }
    if (from.ss_family != AF_INET6) return false;
    const auto& place = reinterpret_cast<const sockaddr_in6&>(from);
    std::memcpy(end.address.data(), &place.sin6_addr, sizeof(place.sin6_addr));
    end.port = place.sin6_port;
    if (IN6_IS_ADDR_V4MAPPED(&place.sin6_addr)) end.address = {end.address[3]};
    else ends.family = AF_INET6;
    return true;
  };
  if (!read(own, ends.own) || !read(peer, ends.peer)) return std::nullopt;
  return ends;
}

/// Asks the kernel for the one socket. @return false when it does not answer such questions
bool ask_kernel(const Ends& ends, std::optional<uid_t>& user) {
  struct {
    nlmsghdr header;
    inet_diag_req_v2 body;
  } request{};
  request.header.nlmsg_len = sizeof(request);
  request.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.body.sdiag_family = ends.family;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = ~0U;
  // The other end's socket: what is near for it is far from here.
  request.body.id.idiag_sport = ends.peer.port;
  request.body.id.idiag_dport = ends.own.port;
  std::copy(ends.peer.address.begin(), ends.peer.address.end(), request.body.id.idiag_src);
  std::copy(ends.own.address.begin(), ends.own.address.end(), request.body.id.idiag_dst);
  request.body.id.idiag_cookie[0] = request.body.id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  const Fd netlink(::socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  const timeval limit{1, 0};
  if (!netlink || ::setsockopt(netlink.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) != 0 ||
      ::send(netlink.get(), &request, sizeof(request), 0) != static_cast<ssize_t>(sizeof(request)))
    return false;
  alignas(nlmsghdr) char bytes[4096];
  const ssize_t got = ::recv(netlink.get(), bytes, sizeof(bytes), 0);
  if (got < static_cast<ssize_t>(sizeof(nlmsghdr))) return false;
  nlmsghdr answer;
  std::memcpy(&answer, bytes, sizeof(answer));
  if (answer.nlmsg_type == NLMSG_ERROR && got >= static_cast<ssize_t>(NLMSG_LENGTH(sizeof(nlmsgerr)))) {
    nlmsgerr error;
    std::memcpy(&error, bytes + NLMSG_HDRLEN, sizeof(error));
    return error.error == -ENOENT;  // no such socket
  }
  if (answer.nlmsg_type != SOCK_DIAG_BY_FAMILY || got < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(inet_diag_msg))))
    return false;
  inet_diag_msg found;
  std::memcpy(&found, bytes + NLMSG_HDRLEN, sizeof(found));
  if (found.idiag_state == kEstablished) user = found.idiag_uid;
  return true;
}

/// Tries it with a connection to itself.
bool users_are_known() {
  const Fd server(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* place = reinterpret_cast<sockaddr*>(&where);
  socklen_t length = sizeof(where);
  if (!server || !client || ::bind(server.get(), place, length) != 0 || ::listen(server.get(), 1) != 0 ||
      ::getsockname(server.get(), place, &length) != 0 || ::connect(client.get(), place, length) != 0)
    return true;
  const Fd accepted(::accept4(server.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return !accepted || user_of_peer(accepted.get());
}

}  // namespace

std::optional<uid_t> user_of_peer(int socket) {
  std::optional<uid_t> user;
  const auto ends = ends_of(socket);
  if (!ends) return user;
  return ask_kernel(*ends, user) ? user : user_of_peer_by_table(socket);
}

std::optional<uid_t> user_of_peer_by_table(int socket) {
  const auto ends = ends_of(socket);
  if (!ends) return std::nullopt;
  const auto text = [words = ends->family == AF_INET ? 1U : 4U](const Ends::End& end) {
    std::string place;
    for (size_t i = 0; i < words; ++i) place += fmt::format("{:08X}", end.address[i]);
    return place + fmt::format(":{:04X}", ntohs(end.port));
  };
  const std::string near = text(ends->peer), far = text(ends->own);
  // A socket of version 6 may speak version 4: its addresses end like those of that one.
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream words(line);
      std::string slot, local, remote, state, queues, timer, retries;
      uid_t uid = 0;
      if (words >> slot >> local >> remote >> state >> queues >> timer >> retries >> uid && local.ends_with(near) &&
          remote.ends_with(far) && state == "01")
        return uid;
    }
  }
  return std::nullopt;
}

bool is_on_this_machine(int socket) {
  const auto ends = ends_of(socket);
  if (!ends) return true;  // it has gone: nobody on another machine loses anything
  const auto& address = ends->peer.address;
  if (ends->family == AF_INET && (ntohl(address[0]) >> 24) == IN_LOOPBACKNET) return true;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return true;
  bool found = false;
  for (const ifaddrs* entry = all; entry && !found; entry = entry->ifa_next) {
    if (!entry->ifa_addr || entry->ifa_addr->sa_family != ends->family) continue;
    found = ends->family == AF_INET
                ? reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr.s_addr == address[0]
                : std::memcmp(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr, address.data(),
                              sizeof(in6_addr)) == 0;
  }
  ::freeifaddrs(all);
  return found;
}

bool admit_own(int socket) {
  const auto user = user_of_peer(socket);
  if (user && (*user == ::getuid() || *user == 0)) return true;
  static const bool known = users_are_known();
  if (!known) return true;
  static std::atomic<bool> said = false;
  if (user && !said.exchange(true))
    std::fputs(fmt::format("a process of user {} tried to connect to the store of this job, which is user {}'s, and "
                           "was refused\n",
                           *user, ::getuid())
                   .c_str(),
               stderr);
  return false;
}

bool admit_own_or_remote(int socket) { return !is_on_this_machine(socket) || admit_own(socket); }

}  // namespace accelerate
