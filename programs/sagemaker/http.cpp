#include "sagemaker/http.hpp"
#include "utils/raise.hpp"

#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <memory>

namespace sagemaker {
namespace {

constexpr size_t kMostBytes = 16 << 20;  // AWS's longest answers here, pages of log lines, have 1 MB

/// @return less than `count`, which libcurl takes for an error, when the body grows too long
size_t take_body(char* data, size_t, size_t count, void* into) {
  auto& body = *static_cast<std::string*>(into);
  if (count > kMostBytes - body.size()) return 0;
  body.append(data, count);
  return count;
}

size_t take_header(char* data, size_t, size_t count, void* into) {
  const std::string line(data, count);
  const size_t colon = line.find(':');
  if (colon == std::string::npos) return count;
  std::string name = line.substr(0, colon);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  const size_t from = line.find_first_not_of(" \t", colon + 1), to = line.find_last_not_of(" \t\r\n");
  (*static_cast<std::map<std::string, std::string>*>(into))[name] =
      from == std::string::npos || from > to ? "" : line.substr(from, to - from + 1);
  return count;
}

}  // namespace

Http::Http() : handle_((curl_global_init(CURL_GLOBAL_DEFAULT), curl_easy_init())) {
  if (!handle_) accelerate::raise<accelerate::ResourceError>("libcurl can't be initialised: is there memory left?");
}

Http::~Http() { curl_easy_cleanup(handle_); }

HttpResponse Http::send(const HttpRequest& request) {
  CURL* const curl = handle_;
  curl_easy_reset(curl);
  char reason[CURL_ERROR_SIZE] = "";
  HttpResponse response;
  std::unique_ptr<curl_slist, decltype(&curl_slist_free_all)> headers(nullptr, curl_slist_free_all);
  const auto add = [&](const std::string& line) {
    curl_slist* const longer = curl_slist_append(headers.get(), line.c_str());
    if (!longer) accelerate::raise<accelerate::ResourceError>("no memory is left for a request");
    (void)headers.release();
    headers.reset(longer);
  };
  for (const auto& [name, value] : request.headers) add(name + ": " + value);
  curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, reason);
  curl_easy_setopt(curl, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(request.connect_timeout.count()));
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, std::max(1L, static_cast<long>(request.timeout.count() / 1000)));
  if (request.direct) curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &response.body);
  curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, take_header);
  curl_easy_setopt(curl, CURLOPT_HEADERDATA, &response.headers);
  if (request.method == "HEAD") {
    curl_easy_setopt(curl, CURLOPT_NOBODY, 1L);
  } else if (request.method != "GET") {
    // A body that libcurl has as a whole is one whose hash it can sign.
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, request.body.data());
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  if (const auto& s = request.signature) {
    curl_easy_setopt(curl, CURLOPT_AWS_SIGV4, ("aws:amz:" + s->region + ":" + s->service).c_str());
    curl_easy_setopt(curl, CURLOPT_USERNAME, s->credentials.key_id.c_str());
    curl_easy_setopt(curl, CURLOPT_PASSWORD, s->credentials.secret.c_str());
    if (!s->credentials.token.empty()) add("X-Amz-Security-Token: " + s->credentials.token);
  }
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers.get());
  const CURLcode code = curl_easy_perform(curl);
  if (code == CURLE_WRITE_ERROR)
    throw AwsNoAnswer("the answer is longer than " + std::to_string(kMostBytes >> 20) + " MB, as none of AWS's is");
  if (code != CURLE_OK) throw AwsNoAnswer(*reason ? reason : curl_easy_strerror(code));
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &response.status);
  return response;
}

}  // namespace sagemaker
