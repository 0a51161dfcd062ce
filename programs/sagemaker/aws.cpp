#include "sagemaker/aws.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <random>
#include <thread>

namespace sagemaker {
namespace {

bool starts(const std::string& text, const char* begin) { return text.rfind(begin, 0) == 0; }

std::string url_encoded(const std::string& text) {
  std::string result;
  for (const unsigned char c : text) {
    if (std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == '~') result += static_cast<char>(c);
    else {
      char digits[4];
      std::snprintf(digits, sizeof(digits), "%%%02X", c);
      result += digits;
    }
  }
  return result;
}

std::string sha256(const std::string& bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  if (!EVP_Digest(bytes.data(), bytes.size(), digest, &length, EVP_sha256(), nullptr))
    accelerate::raise<accelerate::InternalError>("OpenSSL has no SHA-256");
  std::string text;
  for (unsigned i = 0; i < length; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", digest[i]);
    text += digits;
  }
  return text;
}

bool is_busy(const std::string& code) {
  for (const char* name :
       {"Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException",
        "TooManyRequestsException", "RequestLimitExceeded", "SlowDown", "PriorRequestNotComplete",
        "TransactionInProgressException", "RequestTimeout", "RequestTimeoutException"})
    if (code == name) return true;
  return false;
}

std::string advice(const std::string& code, const std::string& source) {
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return code == name; });
  };
  if (is({"InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "AuthFailure", "InvalidToken",
          "MissingAuthenticationToken", "MissingAuthenticationTokenException"}))
    return "AWS doesn't know the access key. It comes from " + source +
           ": is it complete, still active, and of this partition?";
  if (is({"SignatureDoesNotMatch", "InvalidSignatureException"}))
    return "The secret doesn't fit the access key; both come from " + source + ". Or is this machine's clock wrong?";
  if (is({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}))
    return "The credentials from " + source + " have expired: get new ones";
  if (is({"RequestTimeTooSkewed"})) return "This machine's clock is wrong by minutes: set it";
  if (is({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "OptInRequired", "403"}))
    return "The credentials from " + source +
           " are valid but may not do this: ask who administers the account for the permission";
  return "";
}

}  // namespace

std::string variable_of(const Environment& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

std::string partition_of(const std::string& region) {
  if (starts(region, "cn-")) return "aws-cn";
  if (starts(region, "us-gov-")) return "aws-us-gov";
  if (starts(region, "us-iso-")) return "aws-iso";
  if (starts(region, "us-isob-")) return "aws-iso-b";
  return "aws";
}

std::string domain_of(const std::string& region) {
  if (starts(region, "cn-")) return "amazonaws.com.cn";
  if (starts(region, "us-iso-")) return "c2s.ic.gov";
  if (starts(region, "us-isob-")) return "sc2s.sgov.gov";
  return "amazonaws.com";
}

Aws::Aws(std::string region, const Environment& environment, const AwsProfile& profile)
    : region_(std::move(region)), environment_(environment), profile_(profile) {}

void Aws::use(Credentials credentials, std::string source) {
  credentials_ = std::move(credentials);
  source_ = std::move(source);
}

std::string Aws::endpoint(const std::string& service) const {
  std::string name = service == "logs" ? "cloudwatch_logs" : service;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  if (variable_of(environment_, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") != "true")
    for (std::string url : {variable_of(environment_, "AWS_ENDPOINT_URL_" + name),
                            variable_of(environment_, "AWS_ENDPOINT_URL"), profile_.get("endpoint_url")})
      if (!url.empty()) {
        if (!starts(url, "http://") && !starts(url, "https://"))
          accelerate::raise<accelerate::ConfigError>(
              "the endpoint '{}' (AWS_ENDPOINT_URL and its kin) is not an address: it begins neither with http:// nor "
              "with https://",
              url);
        while (url.back() == '/') url.pop_back();
        return url;
      }
  const std::string domain = domain_of(region_);
  if (service == "sagemaker") return "https://api.sagemaker." + region_ + "." + domain;
  if (service == "ecr") return "https://api.ecr." + region_ + "." + domain;
  if (service == "iam") {  // one for all regions
    const std::string partition = partition_of(region_);
    if (partition == "aws-cn") return "https://iam.cn-north-1." + domain;
    if (partition == "aws-us-gov") return "https://iam.us-gov." + domain;
    if (partition == "aws-iso") return "https://iam.us-iso-east-1." + domain;
    if (partition == "aws-iso-b") return "https://iam.us-isob-east-1." + domain;
    return "https://iam." + domain;
  }
  return "https://" + service + "." + region_ + "." + domain;
}

Json Aws::call(const std::string& service, const std::string& target, const Json& body) {
  const std::string name = target.substr(target.rfind('.') + 1);
  HttpRequest request{.method = "POST", .url = endpoint(service) + "/"};
  request.headers = {{"Content-Type", "application/x-amz-json-1.1"}, {"X-Amz-Target", target}};
  request.body = body.dump();
  const auto response = send(name, service, std::move(request), true);
  if (response.body.empty()) return Json::object();
  Json answer = accelerate::parse_json<Json>(response.body);
  if (!answer.is_object())
    throw AwsError(name + ": " + endpoint(service) + " answered what is no JSON object. Is it the right address?", "",
                   response.status);
  return answer;
}

std::string Aws::query(const std::string& service, const std::vector<std::pair<std::string, std::string>>& form,
                       bool sign) {
  HttpRequest request{.method = "POST", .url = endpoint(service) + "/"};
  request.headers = {{"Content-Type", "application/x-www-form-urlencoded; charset=utf-8"}};
  for (const auto& [name, value] : form)
    request.body += (request.body.empty() ? "" : "&") + url_encoded(name) + "=" + url_encoded(value);
  return send(form.front().second, service, std::move(request), sign).body;
}

HttpResponse Aws::s3(const std::string& method, const std::string& bucket, const std::string& key,
                     std::vector<std::pair<std::string, std::string>> headers, std::string body) {
  std::string url = endpoint("s3");
  // AWS has a host for each bucket; other servers seldom do. Names with dots would not fit AWS's certificate.
  const std::string own = "https://s3." + region_ + "." + domain_of(region_);
  if (url == own && bucket.find('.') == std::string::npos) url = "https://" + bucket + url.substr(8) + "/" + key;
  else url += "/" + bucket + (key.empty() ? "" : "/" + key);
  // S3 wants to have it said, and older libcurls only sign it.
  headers.emplace_back("x-amz-content-sha256", sha256(body));
  HttpRequest request{.method = method, .url = std::move(url), .headers = std::move(headers), .body = std::move(body)};
  return send(method == "HEAD" ? "HeadBucket"
              : key.empty()    ? "CreateBucket"
                               : "PutObject",
              "s3", std::move(request), true);
}

HttpResponse Aws::send(const std::string& what, const std::string& service, HttpRequest request, bool sign) {
  const std::string given = variable_of(environment_, "AWS_MAX_ATTEMPTS");
  int attempts = 5;
  if (!given.empty())
    if (const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), attempts);
        error != std::errc() || end != given.data() + given.size() || attempts < 1)
      accelerate::raise<accelerate::ConfigError>(
          "AWS_MAX_ATTEMPTS is '{}', expected how often a request is sent at most: 1 or more", given);
  // One region signs for IAM, whose endpoint is one for all.
  const std::string partition = partition_of(region_);
  const std::string iam_region = partition == "aws"          ? "us-east-1"
                                 : partition == "aws-cn"     ? "cn-north-1"
                                 : partition == "aws-us-gov" ? "us-gov-west-1"
                                                             : region_;
  if (sign) request.signature = Signature{credentials_, service == "iam" ? iam_region : region_, service};
  const std::string where = what + " at " + endpoint(service);
  std::mt19937 random(std::random_device{}());
  repeated_ = false;
  for (int attempt = 1;; ++attempt) {
    std::string why;
    long status = 0;
    try {
      HttpResponse response = http_.send(request);
      if (response.status >= 200 && response.status < 300) return response;
      status = response.status;
      auto [code, message] = complaint(response);
      const bool again = status >= 500 || status == 429 || is_busy(code);
      if (code.empty()) code = std::to_string(status);
      why = code + (message.empty() ? "" : ": " + message) + " (HTTP " + std::to_string(status) + ")";
      if (!again || attempt >= attempts) {
        const std::string hint = advice(code, source_.empty() ? "nobody" : source_);
        throw AwsError(where + " was refused" +
                           (attempt > 1 ? " at last, after " + std::to_string(attempt) + " attempts" : "") + ": " +
                           why + (hint.empty() ? "" : ". " + hint),
                       code, status);
      }
      repeated_ = repeated_ || status >= 500;
    } catch (const AwsNoAnswer& error) {
      why = error.what();
      if (attempt >= attempts)
        throw AwsError(where + " got no answer, " + (attempts > 1 ? std::to_string(attempts) + " times: " : "") + why +
                           ". Is the region '" + region_ + "' right, and the network there (proxies by HTTPS_PROXY)?",
                       "", 0);
      repeated_ = true;
    }
    const int longest = 500 << std::min(attempt - 1, 5);
    const int wait = std::uniform_int_distribution<int>(longest / 2, longest)(random);
    std::fprintf(stderr, "accelerate launch: %s: %s; trying again\n", where.c_str(), why.c_str());
    std::this_thread::sleep_for(std::chrono::milliseconds(wait));
  }
}

}  // namespace sagemaker
