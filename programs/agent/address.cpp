#include "agent/address.hpp"
#include "network/local_address.hpp"
#include "utils/raise.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <thread>

namespace accelerate::agent {
namespace {

struct FreeInfo {
  void operator()(addrinfo* info) const { ::freeaddrinfo(info); }
};
using Info = std::unique_ptr<addrinfo, FreeInfo>;

Info resolve(const std::string& host, int64_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found))
    raise<LaunchError>(
        "the address '{}' means nothing on this machine: {}. Correct --main_process_ip (or local_addr, bind in "
        "--rdzv_conf)",
        host, ::gai_strerror(error));
  return Info(found);
}

std::string text_of(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = "";
  ::getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return std::string(text).substr(0, std::string_view(text).find('%'));
}

}  // namespace

bool is_own_address(const std::string& host) {
  std::set<std::string> own;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return false;
  for (const ifaddrs* entry = all; entry; entry = entry->ifa_next)
    if (entry->ifa_addr && (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6))
      own.insert(
          text_of(entry->ifa_addr, entry->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6)));
  ::freeifaddrs(all);
  const Info info = resolve(host, 0);
  for (const addrinfo* address = info.get(); address; address = address->ai_next) {
    const std::string text = text_of(address->ai_addr, address->ai_addrlen);
    if (text.starts_with("127.") || own.contains(text)) return true;
  }
  return false;
}

int listen_at(const std::string& host, int64_t& port) {
  const Info info = resolve(host, port);
  const int fd = ::socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -errno;
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (::bind(fd, info->ai_addr, info->ai_addrlen) != 0 || ::listen(fd, 1024) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    const int error = errno;
    ::close(fd);
    return -error;
  }
  port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  return fd;
}

std::string address_towards(const std::string& host, int64_t port) {
  resolve(host, port);
  if (auto own = local_address_towards(host)) return std::move(*own);
  raise<LaunchError>("there is no way from this machine to {}: {}. Check --main_process_ip and the network", host,
                     std::strerror(errno));
}

launcher::Fd connect_to(const std::string& host, int64_t port) {
  const Info info = resolve(host, port);
  for (const addrinfo* address = info.get(); address; address = address->ai_next) {
    launcher::Fd fd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) continue;
    if (::connect(fd.get(), address->ai_addr, address->ai_addrlen) == 0) return fd;
    pollfd ready{fd.get(), POLLOUT, 0};
    int error = 0;
    socklen_t length = sizeof(error);
    if (errno == EINPROGRESS && ::poll(&ready, 1, 5000) > 0 &&
        ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0)
      return fd;
  }
  return launcher::Fd();
}

launcher::Fd wait_for_port(const std::string& host, int64_t port, std::chrono::milliseconds timeout) {
  for (const auto end = std::chrono::steady_clock::now() + timeout; std::chrono::steady_clock::now() < end;
       std::this_thread::sleep_for(std::chrono::milliseconds(50)))
    if (launcher::Fd fd = connect_to(host, port)) return fd;
  raise<LaunchError>(
      "the machine that hosts the rendezvous can't be reached at {}:{} within {} s. Was the command started there too, "
      "is the address right, does a firewall let the port through?",
      host, port, timeout.count() / 1000);
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace accelerate::agent
