#include "launch/monitor/web_page.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "launch/system/random_hex.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kConnections = 64;         // a browser opens up to six; whoever comes then takes an older one's place
constexpr size_t kRequestBytes = 16 << 10;  // cookies of other programs on this address come along
constexpr std::chrono::seconds kPatience{5};  // from the connection to the end of the answer

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return result;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

bool is_address(const std::string& text) {
  if (text.find('\0') != std::string::npos) return false;  // behind which C's functions would not look
  in_addr four{};
  in6_addr six{};
  return ::inet_pton(AF_INET, text.c_str(), &four) == 1 || ::inet_pton(AF_INET6, text.c_str(), &six) == 1;
}

/// Whether a Host header names this machine in a way that no other site's name can.
bool is_ours(std::string_view host, const std::string& own_name) {
  std::string name;
  if (host.starts_with('[')) {
    const size_t end = host.find(']');
    if (end == std::string_view::npos) return false;
    name = host.substr(1, end - 1);
  } else {
    name = lower(host.substr(0, host.rfind(':')));
  }
  if (name == "localhost" || is_address(name)) return true;
  char machine[256] = "";
  ::gethostname(machine, sizeof(machine) - 1);
  return !name.empty() && (name == lower(own_name) || name == lower(machine));
}

std::string response(const char* status, const char* type, const std::string& body, bool with_body = true,
                     const std::string& more = "") {
  return std::string("HTTP/1.1 ") + status + "\r\nContent-Type: " + type +
         "; charset=utf-8\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\nConnection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: "
         "no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n" +
         more + "\r\n" + (with_body ? body : "");
}

std::string refusal(const char* status, const std::string& why, const std::string& more = "") {
  return response(status, "text/plain", why + "\n", true, more);
}

}  // namespace

std::string respond(std::string_view request, const std::string& own_name, const WebPage::Data& data) {
  const size_t line_end = request.find("\r\n");
  const std::string_view line = request.substr(0, line_end);
  const size_t first = line.find(' '), second = line.rfind(' ');
  if (line_end == std::string_view::npos || first == std::string_view::npos || first == second ||
      !line.substr(second + 1).starts_with("HTTP/1."))
    return refusal("400 Bad Request", "not a request of HTTP/1");
  const std::string_view method = line.substr(0, first), target = line.substr(first + 1, second - first - 1);
  int hosts = 0;
  std::string_view host;
  for (size_t at = line_end + 2; at < request.size();) {
    const size_t end = std::min(request.find("\r\n", at), request.size());
    const std::string_view header = request.substr(at, end - at);
    if (const size_t colon = header.find(':');
        colon != std::string_view::npos && lower(header.substr(0, colon)) == "host")
      ++hosts, host = trimmed(header.substr(colon + 1));
    at = end + 2;
  }
  if (hosts != 1) return refusal("400 Bad Request", "a request has one Host header");
  if (!is_ours(host, own_name))
    return refusal("403 Forbidden",
                   "this page is served under the machine's address, as localhost or under its name only");
  if (method != "GET" && method != "HEAD")
    return refusal("405 Method Not Allowed", "only GET and HEAD", "Allow: GET, HEAD\r\n");
  const std::string_view path = target.substr(0, target.find('?'));
  const bool body = method == "GET";
  if (path == "/state.json") return response("200 OK", "application/json", data.state(), body);
  if (path == "/history.json") return response("200 OK", "application/json", data.history(), body);
  if (path != "/") return refusal("404 Not Found", "there are /, /state.json and /history.json");
  const std::string nonce = random_hex(16);
  return response(
      "200 OK", "text/html", page_with(nonce), body,
      "Content-Security-Policy: default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
          "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n");
}

WebPage::WebPage(const std::string& host, int64_t port) : host_(host) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  wanted.ai_socktype = SOCK_STREAM;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found); error != 0)
    raise<ConfigError>("--monitor_host is '{}', expected an address of this machine: {}", host, ::gai_strerror(error));
  listener_ = Fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  // The page's last connections linger for a minute after a job.
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = listener_ && ::bind(listener_.get(), found->ai_addr, found->ai_addrlen) == 0 &&
                     ::listen(listener_.get(), 64) == 0;
  const int error = errno;
  const bool loopback = found->ai_family == AF_INET6
                            ? IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<sockaddr_in6*>(found->ai_addr)->sin6_addr)
                            : (ntohl(reinterpret_cast<sockaddr_in*>(found->ai_addr)->sin_addr.s_addr) >> 24) == 127;
  ::freeaddrinfo(found);
  if (!bound)
    raise<LaunchError>("the monitor's page can't be served at {}:{}: {}{}", host, port, std::strerror(error),
                       error == EADDRINUSE ? ". Another program uses that port; --monitor_port 0 finds a free one"
                       : error == EACCES   ? ". Ports below 1024 are for root"
                                           : "");
  open_to_others_ = !loopback;
  sockaddr_storage bound_to{};
  socklen_t length = sizeof(bound_to);
  ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound_to), &length);
  const int given = ntohs(bound_to.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound_to)->sin6_port
                                                         : reinterpret_cast<sockaddr_in*>(&bound_to)->sin_port);
  url_ = fmt::format("http://{}:{}/", host.find(':') == std::string::npos ? host : "[" + host + "]", given);
}

void WebPage::add_to(std::vector<pollfd>& fds) const {
  fds.push_back({Clock::now() >= pause_until_ ? listener_.get() : -1, POLLIN, 0});
  for (const auto& connection : connections_)
    fds.push_back(
        {connection.fd.get(), static_cast<short>(connection.sent < connection.response.size() ? POLLOUT : POLLIN), 0});
}

void WebPage::serve(std::span<const pollfd> polled, const WebPage::Data& data) {
  const auto now = Clock::now();
  size_t i = 1;
  for (auto connection = connections_.begin(); connection != connections_.end();) {
    if (polled[i++].revents) go_on(*connection, data);
    connection = connection->over || now > connection->until ? connections_.erase(connection) : std::next(connection);
  }
  if (!polled[0].revents) return;
  for (size_t taken = 0; taken < kConnections; ++taken) {
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) pause_until_ = now + std::chrono::seconds(1);
      break;
    }
    if (connections_.size() == kConnections) connections_.erase(slowest());
    connections_.push_back({.fd = std::move(fd), .until = now + kPatience, .request = {}, .response = {}});
    go_on(connections_.back(), data);  // before the next one could take its place
    if (connections_.back().over) connections_.pop_back();
  }
}

std::list<WebPage::Connection>::iterator WebPage::slowest() {
  const auto silent = std::find_if(connections_.begin(), connections_.end(),
                                   [](const Connection& connection) { return connection.response.empty(); });
  return silent == connections_.end() ? connections_.begin() : silent;
}

void WebPage::go_on(Connection& c, const WebPage::Data& data) const {
  char bytes[4096];
  ssize_t got = 1;
  while (got > 0 && c.request.size() <= kRequestBytes) {
    got = ::recv(c.fd.get(), bytes, sizeof(bytes), 0);
    if (got > 0 && c.response.empty()) c.request.append(bytes, static_cast<size_t>(got));
  }
  const bool ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  if (c.response.empty()) {
    const size_t end = c.request.find("\r\n\r\n");
    if (end != std::string::npos) c.response = respond(std::string_view(c.request).substr(0, end + 2), host_, data);
    else if (c.request.size() > kRequestBytes)
      c.response = refusal("431 Request Header Fields Too Large", "the request is too long");
  }
  while (c.sent < c.response.size()) {
    const ssize_t written = ::send(c.fd.get(), c.response.data() + c.sent, c.response.size() - c.sent, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      c.over = errno != EAGAIN;
      return;
    }
    c.sent += static_cast<size_t>(written);
    // The client closes first: closing with something unread would make the kernel throw the answer away.
    if (c.sent == c.response.size()) ::shutdown(c.fd.get(), SHUT_WR);
  }
  c.over = ended;
}

}  // namespace accelerate::launcher
