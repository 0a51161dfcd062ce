#include "trackers/mlflow_server.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <thread>

#include "accelerate/trackers/tracker.hpp"
#include "input/base64.hpp"
#include "input/json.hpp"
#include "input/plain_text.hpp"
#include "trackers/tracker_timeout.hpp"
#include "trackers/url.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using config::Value;
using std::chrono::milliseconds;

constexpr size_t kLongestName = 250;
constexpr milliseconds kFirstPause{250}, kLongestPause{8000};

/// Scheme, host and port.
std::string_view origin_of(std::string_view url) {
  return url.substr(0, url.find_first_of("/?#", url.find("://") + 3));
}

bool busy(long status) { return status == 408 || status == 429 || status >= 500; }

}  // namespace

MlflowServer::MlflowServer() {
  uri_ = environment::text("MLFLOW_TRACKING_URI").value_or("");
  if (uri_.rfind("http://", 0) != 0 && uri_.rfind("https://", 0) != 0)
    raise<ConfigError>(
        "mlflow: MLFLOW_TRACKING_URI is '{}', expected the address of a server (http://… or https://…): this tracker "
        "speaks with servers and writes neither folders nor databases. Start one on this machine with `mlflow server` "
        "and set MLFLOW_TRACKING_URI=http://127.0.0.1:5000",
        uri_);
  while (uri_.back() == '/') uri_.pop_back();
  const auto user = environment::text("MLFLOW_TRACKING_USERNAME"),
             password = environment::text("MLFLOW_TRACKING_PASSWORD");
  if (user && password) server_.authorization = "Basic " + base64_encode(*user + ":" + *password);
  else if (const auto token = environment::text("MLFLOW_TRACKING_TOKEN")) server_.authorization = "Bearer " + *token;
  server_.verify = !environment::flag("MLFLOW_TRACKING_INSECURE_TLS").value_or(false);
  server_.certificates = environment::text("MLFLOW_TRACKING_SERVER_CERT_PATH").value_or("");
  if (!server_.verify && !server_.certificates.empty())
    throw ConfigError(
        "mlflow: both MLFLOW_TRACKING_INSECURE_TLS and MLFLOW_TRACKING_SERVER_CERT_PATH are set, expected one: the "
        "server's certificate is either checked or not");
  if (const auto seconds = environment::number("MLFLOW_HTTP_REQUEST_TIMEOUT"))
    server_.timeout = milliseconds(static_cast<int64_t>(std::clamp(*seconds, 0.001, 1e6) * 1000));
  most_retries_ = environment::integer({"MLFLOW_HTTP_REQUEST_MAX_RETRIES"}).value_or(7);
}

Value MlflowServer::post(const std::string& what, const Value& body) {
  return send(what, {.method = "POST",
                     .url = uri_ + "/api/2.0/mlflow/" + what,
                     .headers = {{"Content-Type", "application/json"}},
                     .body = body.dump(-1, ' ', false, Value::error_handler_t::replace)});
}

Value MlflowServer::get(const std::string& what, const std::map<std::string, std::string>& query) {
  std::string url = uri_ + "/api/2.0/mlflow/" + what;
  char between = '?';
  for (const auto& [name, value] : query) {
    url += between + name + "=" + url_encoded(value);
    between = '&';
  }
  return send(what, {.url = url});
}

void MlflowServer::put(const std::string& url, const std::string& content_type, std::string bytes) {
  send("artifacts", {.method = "PUT",
                     .url = url,
                     .headers = {{"Content-Type", content_type}},
                     .body = std::move(bytes),
                     .authorized = origin_of(url) == origin_of(uri_)});
}

Value MlflowServer::send(const std::string& what, const http::Request& request) {
  if (!client_) client_.emplace(server_);
  const auto begin = std::chrono::steady_clock::now();
  auto pause = kFirstPause;
  for (int64_t attempt = 0;; ++attempt) {
    std::string why;
    try {
      const http::Answer answer = client_->send(request);
      const auto body = parse_json<Value>(answer.body);
      if (answer.status >= 200 && answer.status < 300) return body.is_object() ? body : Value::object();
      std::string code, text = answer.body.substr(0, 300);
      if (body.is_object()) {
        if (body.contains("error_code") && body["error_code"].is_string()) code = body["error_code"].get<std::string>();
        if (body.contains("message") && body["message"].is_string())
          text = body["message"].get<std::string>().substr(0, 1000);
      }
      why = fmt::format("{} {} {}", answer.status, plain_text(code), plain_lines(text));
      if (answer.status == 401 || answer.status == 403)
        throw TrackerGone(
            fmt::format("mlflow: {} refuses this user ({}). MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                        "MLFLOW_TRACKING_TOKEN, say who it is",
                        what, why));
      if (!busy(answer.status)) throw MlflowRefusal(code, fmt::format("mlflow: the server refused {}: {}", what, why));
    } catch (const http::NoAnswer& error) {
      why = error.what();
    }
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (attempt >= most_retries_ || spent + pause > tracker_timeout())
      // The address may hold a password.
      throw TrackerGone(fmt::format(
          "mlflow: no answer to {} from the server of MLFLOW_TRACKING_URI after {} attempts in {:.1f} s: {}. Does it "
          "run there?",
          what, attempt + 1, spent.count(), why));
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

Value mlflow_metric(const std::string& name, double value, int64_t milliseconds, int64_t step) {
  // As protobuf's JSON writes numbers that JSON has no words for.
  const Value number = std::isnan(value)   ? Value("NaN")
                       : std::isinf(value) ? Value(value < 0 ? "-Infinity" : "Infinity")
                                           : Value(value);
  return {{"key", name}, {"value", number}, {"timestamp", milliseconds}, {"step", step}};
}

std::string mlflow_name_problem(const std::string& name) {
  if (name.empty()) return "it is empty";
  if (name.size() > kLongestName)
    return fmt::format("it has {} bytes, at most {} are allowed", name.size(), kLongestName);
  for (const unsigned char byte : name)
    if (byte < 0x80 && !std::isalnum(byte) &&
        std::string_view("_-. /:").find(static_cast<char>(byte)) == std::string_view::npos)
      return fmt::format("it holds '{}'; letters, digits, _ - . / : and blanks are allowed", static_cast<char>(byte));
  if (name.front() == '/' || name.back() == '/' || name.find("//") != std::string::npos ||
      ("/" + name + "/").find("/../") != std::string::npos || ("/" + name + "/").find("/./") != std::string::npos)
    return "as a path it has a shorter form";
  return "";
}

}  // namespace accelerate
