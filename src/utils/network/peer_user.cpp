#include "utils/network/peer_user.hpp"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "utils/fd.hpp"

namespace accelerate {
namespace {

constexpr int kEstablished = 1;  // TCP_ESTABLISHED; in other states the kernel says that root is the owner

struct Ends {
  sockaddr_in own{}, peer{};
};

std::optional<Ends> ends_of(int socket) {
  Ends ends;
  socklen_t own = sizeof(ends.own), peer = sizeof(ends.peer);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&ends.own), &own) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&ends.peer), &peer) != 0 || ends.peer.sin_family != AF_INET)
    return std::nullopt;
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
  request.body.sdiag_family = AF_INET;
  request.body.sdiag_protocol = IPPROTO_TCP;
  request.body.idiag_states = ~0U;
  // The other end's socket: what is near for it is far from here.
  request.body.id.idiag_sport = ends.peer.sin_port;
  request.body.id.idiag_dport = ends.own.sin_port;
  request.body.id.idiag_src[0] = ends.peer.sin_addr.s_addr;
  request.body.id.idiag_dst[0] = ends.own.sin_addr.s_addr;
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
  const auto text = [](const sockaddr_in& end) {
    char place[32];
    std::snprintf(place, sizeof(place), "%08X:%04X", end.sin_addr.s_addr, ntohs(end.sin_port));
    return std::string(place);
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

bool is_own_peer(int socket) {
  const auto user = user_of_peer(socket);
  return user && (*user == ::getuid() || *user == 0);
}

}  // namespace accelerate
