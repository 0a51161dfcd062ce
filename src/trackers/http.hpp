#pragma once

#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// Requests to the servers of trackers. libcurl is loaded when the first of them is made, so that programs which send
/// nothing don't need it: `http.cpp` where its headers were found, else `no_http.cpp`.
namespace accelerate::http {

struct Request {
  std::string method = "GET", url;
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string body = {};
  bool authorized = true;  ///< it is the server that the authorization is for
};

struct Answer {
  long status = 0;
  std::string body;
};

/// Whom to believe and how long to wait; never printed.
struct Server {
  std::string authorization;                  ///< value of that header; empty: none
  bool verify = true;                         ///< the server's certificate
  std::filesystem::path certificates;         ///< PEM file of authorities; empty: the system's
  std::chrono::milliseconds timeout{120000};  ///< of one request, altogether
};

/// No answer came: nobody listens, no such host, no time left.
struct NoAnswer : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Whether libcurl can be loaded here.
bool is_available();

/// Keeps its connection open between requests. Not for several threads.
class Client {
 public:
  /// @throws NotBuiltError when there is no libcurl.
  explicit Client(Server server);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  /// Blocking; any status is an answer. Redirections are not followed, for they would get the authorization.
  /// @throws NoAnswer
  Answer send(const Request& request);

 private:
  Server server_;
  void* handle_ = nullptr;
};

}  // namespace accelerate::http
