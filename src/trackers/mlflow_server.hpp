#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "config/value.hpp"
#include "trackers/http.hpp"

namespace accelerate {

/// The answer of an MLflow server to a request that it refused.
struct MlflowRefusal : std::runtime_error {
  MlflowRefusal(std::string code, const std::string& text) : std::runtime_error(text), code(std::move(code)) {}
  std::string code;  ///< RESOURCE_DOES_NOT_EXIST, ...
};

/// MLflow's REST interface, version 2.0: requests are JSON, and repeated while the server is busy or does not answer.
class MlflowServer {
 public:
  /// By the variables MLFLOW_TRACKING_*. @throws ConfigError
  MlflowServer();

  /// Begins or ends with no slash.
  const std::string& uri() const { return uri_; }
  /// @param what  "runs/log-batch"
  /// @return the answer, an object. @throws MlflowRefusal; TrackerGone when there is no answer that says anything.
  config::Value post(const std::string& what, const config::Value& body);
  config::Value get(const std::string& what, const std::map<std::string, std::string>& query);
  /// Sends a file to an address, which the server has named: another one than the server itself does not get its
  /// authorization. @throws as post
  void put(const std::string& url, const std::string& content_type, std::string bytes);

 private:
  config::Value send(const std::string& what, const http::Request& request);

  std::string uri_;
  http::Server server_;
  int64_t most_retries_ = 7;
  std::optional<http::Client> client_;  ///< made when first needed: loading libcurl is for the tracker's thread
};

/// Metrics that wait to be sent, and the run that they belong to.
config::Value mlflow_metric(const std::string& name, double value, int64_t milliseconds, int64_t step);
/// Why MLflow would refuse a metric, parameter or tag of this name; empty: it would not.
std::string mlflow_name_problem(const std::string& name);

}  // namespace accelerate
