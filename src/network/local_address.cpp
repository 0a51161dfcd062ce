#include "network/local_address.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>
#include <string_view>

#include "utils/fd.hpp"

namespace accelerate {

std::optional<std::string> local_address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> info(found, ::freeaddrinfo);
  const Fd fd(::socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));  // connecting it sends nothing
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  char text[NI_MAXHOST] = "";
  if (!fd || ::connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&own), length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST))
    return std::nullopt;
  return std::string(text).substr(0, std::string_view(text).find('%'));
}

}  // namespace accelerate
