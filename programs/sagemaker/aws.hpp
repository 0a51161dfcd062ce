#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "sagemaker/answers.hpp"
#include "sagemaker/http.hpp"
#include "sagemaker/profiles.hpp"

/// AWS's services as far as a training job needs them.
namespace sagemaker {

/// A service answered that it won't, or never answered.
struct AwsError : accelerate::LaunchError {
  AwsError(const std::string& message, std::string code, long status)
      : LaunchError(message), code(std::move(code)), status(status) {}
  std::string code;  ///< "AccessDenied", ...; "" when nothing answered
  long status;       ///< of HTTP; 0 when nothing answered
};

/// "aws", "aws-cn", "aws-us-gov", ...: what ARNs of the region begin with, and the domain of its services.
std::string partition_of(const std::string& region);
std::string domain_of(const std::string& region);

/// Signs, sends, tries again and explains. Endpoints are AWS's own unless AWS_ENDPOINT_URL_<SERVICE>, AWS_ENDPOINT_URL
/// or the profile's endpoint_url says otherwise.
class Aws {
 public:
  /// @param environment  the process's; AWS_MAX_ATTEMPTS (5 unless set) says how often a request is sent that finds the
  /// service busy, broken or not there
  Aws(std::string region, const Environment& environment, const AwsProfile& profile);

  const std::string& region() const { return region_; }
  /// @param source  where they come from, for messages: "the environment", "profile x of ~/.aws/credentials"
  void use(Credentials credentials, std::string source);
  const Credentials& credentials() const { return credentials_; }
  const std::string& source() const { return source_; }

  /// @param service  sagemaker, s3, sts, iam, logs or ecr
  std::string endpoint(const std::string& service) const;
  /// Services that speak JSON: sagemaker, logs, ecr. @param target  "SageMaker.CreateTrainingJob"
  Json call(const std::string& service, const std::string& target, const Json& body);
  /// Services that take a form and answer XML: sts, iam. @param sign  false for what needs no credentials
  std::string query(const std::string& service, const std::vector<std::pair<std::string, std::string>>& form,
                    bool sign = true);
  /// S3; `key` is empty for the bucket itself. Keys are made of letters, digits and "/-._". @throws AwsError for any
  /// status but 2xx.
  HttpResponse s3(const std::string& method, const std::string& bucket, const std::string& key,
                  std::vector<std::pair<std::string, std::string>> headers = {}, std::string body = {});

  Http& http() { return http_; }
  /// True when the last request reached a service only after a try whose outcome nobody knows.
  bool was_repeated() const { return repeated_; }

 private:
  HttpResponse send(const std::string& what, const std::string& service, HttpRequest request, bool sign);

  std::string region_;
  Environment environment_;
  AwsProfile profile_;
  Credentials credentials_;
  std::string source_;
  Http http_;
  bool repeated_ = false;
};

}  // namespace sagemaker
