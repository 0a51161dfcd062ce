#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/system/process.hpp"

namespace accelerate::launcher {

/// Serves by HTTP, from the launcher's own loop: "/", a page without anything from elsewhere, and what it shows,
/// "/state.json" and "/history.json".
///
/// Only GET and HEAD, one request for each connection, and only with a Host header that names this machine as such (an
/// address, localhost, its name): a page of another site whose name has been made to point here would send that site's
/// name (DNS rebinding).
class WebPage {
 public:
  /// The page's figures as JSON: the ranks now, and over time.
  struct Data {
    std::function<std::string()> state, history;
  };
  /// Listens. @param port  0: any free one
  /// @throws LaunchError when it can't, ConfigError for an address that is none.
  WebPage(const std::string& host, int64_t port);
  /// http://127.0.0.1:8000/
  const std::string& url() const { return url_; }
  /// Others than this machine can reach it.
  bool open_to_others() const { return open_to_others_; }

  void add_to(std::vector<pollfd>& fds) const;
  /// @param polled  what add_to() added, after poll()
  void serve(std::span<const pollfd> polled, const Data& data);

 private:
  struct Connection {
    Fd fd;
    std::chrono::steady_clock::time_point until;
    std::string request, response;
    size_t sent = 0;
    bool over = false;
  };
  void go_on(Connection& connection, const Data& data) const;
  /// The oldest one that has not asked yet, else the oldest.
  std::list<Connection>::iterator slowest();

  std::string host_, url_;
  bool open_to_others_ = false;
  Fd listener_;
  /// No connection is taken until then: there are no descriptors left.
  std::chrono::steady_clock::time_point pause_until_{};
  std::list<Connection> connections_;
};

/// The answer to a whole request (up to the empty line).
/// @param own_name  a name under which this machine is also reached
std::string respond(std::string_view request, const std::string& own_name, const WebPage::Data& data);

/// The page, with a place for the nonce that its policy demands of the script and the style.
std::string page_with(const std::string& nonce);

}  // namespace accelerate::launcher
