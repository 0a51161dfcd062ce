#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// One HTTP request at a time, by libcurl.
namespace sagemaker {

/// Nobody ever prints these: errors name where they came from.
struct Credentials {
  std::string key_id, secret;
  std::string token;  ///< of temporary credentials, else empty
};

/// The values that libcurl needs to sign a request with AWS's Signature Version 4.
struct Signature {
  Credentials credentials;
  std::string region, service;
};

struct HttpRequest {
  std::string method = "GET", url;
  /// Values must not be empty: libcurl would leave those out, and sign them.
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string body = {};
  std::optional<Signature> signature = {};
  std::chrono::milliseconds connect_timeout{10000};
  std::chrono::milliseconds timeout{60000};  ///< without any byte moving; a long upload may take longer
  bool direct = false;                       ///< past a proxy: for addresses that only this machine can reach
};

struct HttpResponse {
  long status = 0;
  std::map<std::string, std::string> headers;  ///< names in small letters
  std::string body;
};

/// No answer came: nobody listens, no such host, no time left. The text is libcurl's.
struct AwsNoAnswer : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Keeps connections open between requests. Not for several threads.
class Http {
 public:
  Http();
  ~Http();
  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;
  /// Blocking. Any status is an answer; redirections are not followed, since their target would get a signature for
  /// another host. @throws AwsNoAnswer
  HttpResponse send(const HttpRequest& request);

 private:
  void* handle_;
};

}  // namespace sagemaker
