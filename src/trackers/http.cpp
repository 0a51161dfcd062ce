#include "trackers/http.hpp"

#include <curl/curl.h>
#include <dlfcn.h>

#include <memory>

#include "utils/raise.hpp"

namespace accelerate::http {
namespace {

constexpr size_t kMostBytes = 16 << 20;  // answers here are some kB

/// The functions of libcurl that are used. Its names have kept their meaning since version 7.16 (libcurl.so.4, 2006).
struct Curl {
  decltype(&::curl_global_init) global_init = nullptr;
  decltype(&::curl_easy_init) init = nullptr;
  decltype(&::curl_easy_cleanup) cleanup = nullptr;
  decltype(&::curl_easy_reset) reset = nullptr;
  CURLcode (*set)(CURL*, CURLoption, ...) = nullptr;
  CURLcode (*get)(CURL*, CURLINFO, ...) = nullptr;
  decltype(&::curl_easy_perform) perform = nullptr;
  decltype(&::curl_easy_strerror) text_of = nullptr;
  decltype(&::curl_slist_append) append = nullptr;
  decltype(&::curl_slist_free_all) free_all = nullptr;
  std::string problem;

  Curl() {
    void* const library = ::dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char* const why = ::dlerror();
      problem = why ? why : "it can't be loaded";
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      if (!function) problem = fmt::format("it has no {}", name);
    };
    find(global_init, "curl_global_init");
    find(init, "curl_easy_init");
    find(cleanup, "curl_easy_cleanup");
    find(reset, "curl_easy_reset");
    find(set, "curl_easy_setopt");
    find(get, "curl_easy_getinfo");
    find(perform, "curl_easy_perform");
    find(text_of, "curl_easy_strerror");
    find(append, "curl_slist_append");
    find(free_all, "curl_slist_free_all");
    if (problem.empty() && global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) problem = "it can't be initialised";
  }
};

const Curl& libcurl() {
  static const Curl curl;
  return curl;
}

/// @return less than `count`, which libcurl takes for an error, when the body grows too long
size_t take_body(char* data, size_t, size_t count, void* into) {
  auto& body = *static_cast<std::string*>(into);
  if (count > kMostBytes - body.size()) return 0;
  body.append(data, count);
  return count;
}

}  // namespace

bool is_available() { return libcurl().problem.empty(); }

Client::Client(Server server) : server_(std::move(server)) {
  if (!is_available())
    raise<NotBuiltError>(
        "a tracker's server is reached through libcurl, which can't be used here: {}. Install libcurl4",
        libcurl().problem);
  handle_ = libcurl().init();
  if (!handle_) raise<ResourceError>("libcurl can't be initialised: is there memory left?");
}

Client::~Client() { libcurl().cleanup(handle_); }

Answer Client::send(const Request& request) {
  const Curl& curl = libcurl();
  curl.reset(handle_);
  char reason[CURL_ERROR_SIZE] = "";
  Answer answer;
  std::unique_ptr<curl_slist, decltype(curl.free_all)> headers(nullptr, curl.free_all);
  const auto add = [&](const std::string& name, const std::string& value) {
    curl_slist* const longer = curl.append(headers.get(), (name + ": " + value).c_str());
    if (!longer) raise<ResourceError>("no memory is left for a request");
    (void)headers.release();
    headers.reset(longer);
  };
  for (const auto& [name, value] : request.headers) add(name, value);
  if (request.authorized && !server_.authorization.empty()) add("Authorization", server_.authorization);
  add("Expect", "");  // else libcurl asks whether it may send, and waits a second where nobody answers
  curl.set(handle_, CURLOPT_ERRORBUFFER, reason);
  curl.set(handle_, CURLOPT_URL, request.url.c_str());
  curl.set(handle_, CURLOPT_NOSIGNAL, 1L);
  curl.set(handle_, CURLOPT_TIMEOUT_MS, static_cast<long>(server_.timeout.count()));
  curl.set(handle_, CURLOPT_SSL_VERIFYPEER, server_.verify ? 1L : 0L);
  curl.set(handle_, CURLOPT_SSL_VERIFYHOST, server_.verify ? 2L : 0L);
  if (!server_.certificates.empty()) curl.set(handle_, CURLOPT_CAINFO, server_.certificates.c_str());
  curl.set(handle_, CURLOPT_HTTPHEADER, headers.get());
  curl.set(handle_, CURLOPT_WRITEFUNCTION, take_body);
  curl.set(handle_, CURLOPT_WRITEDATA, &answer.body);
  if (request.method != "GET") {
    curl.set(handle_, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    curl.set(handle_, CURLOPT_POSTFIELDS, request.body.data());
    curl.set(handle_, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  }
  const CURLcode code = curl.perform(handle_);
  if (code != CURLE_OK) throw NoAnswer(*reason ? reason : curl.text_of(code));
  curl.get(handle_, CURLINFO_RESPONSE_CODE, &answer.status);
  return answer;
}

}  // namespace accelerate::http
