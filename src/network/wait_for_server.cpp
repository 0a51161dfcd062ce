#include "network/wait_for_server.hpp"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "utils/fd.hpp"

namespace accelerate {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// A port that nobody listens on may be the one from which it is tried: then this has reached itself.
bool has_reached_itself(const Fd& fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof(own), peer_length = sizeof(peer);
  return ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         ::getpeername(fd.get(), reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 && own_length == peer_length &&
         std::memcmp(&own, &peer, own_length) == 0;
}

/// @return 0, or the error's number
int error_of_connecting(const addrinfo& to, Clock::time_point end) {
  const Fd fd(::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return errno;
  if (::connect(fd.get(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return errno;
    pollfd done{fd.get(), POLLOUT, 0};
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
    const int ready = ::poll(&done, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 60000)));
    if (ready == 0) return ETIMEDOUT;
    if (ready < 0) return errno;
    int error = 0;
    socklen_t length = sizeof(error);
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
    if (error) return error;
  }
  return has_reached_itself(fd) ? ECONNREFUSED : 0;
}

}  // namespace

bool wait_for_server(const std::string& host, uint16_t port, Clock::time_point end, std::string& why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  for (milliseconds pause{1};; pause = std::min(2 * pause, milliseconds(50))) {
    addrinfo* found = nullptr;
    const int unknown = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(unknown ? nullptr : found, ::freeaddrinfo);
    if (unknown) why = ::gai_strerror(unknown);
    for (const addrinfo* to = list.get(); to; to = to->ai_next) {
      // A second address may do where nothing answers on the way to the first.
      const int error = error_of_connecting(*to, std::min(end, Clock::now() + std::chrono::seconds(5)));
      if (!error) return true;
      why = std::strerror(error);
    }
    if (Clock::now() + pause > end) return false;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace accelerate
