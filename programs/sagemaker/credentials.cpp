#include "sagemaker/credentials.hpp"
#include "input/read_file.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <set>

namespace sagemaker {
namespace {

using accelerate::ConfigError;
using std::chrono::milliseconds;

std::string first_line(const std::string& file, const std::string& what) {
  std::string line;
  accelerate::read_file(file, accelerate::kMostSettingsBytes, line);
  line = line.substr(0, line.find('\n'));
  if (line.empty()) accelerate::raise<ConfigError>("{} names {}, which can't be read or is empty", what, file);
  return line;
}

std::optional<Credentials> of_environment(const Environment& e) {
  Credentials found{variable_of(e, "AWS_ACCESS_KEY_ID"), variable_of(e, "AWS_SECRET_ACCESS_KEY"),
                    variable_of(e, "AWS_SESSION_TOKEN")};
  if (found.token.empty()) found.token = variable_of(e, "AWS_SECURITY_TOKEN");
  if (found.key_id.empty() && found.secret.empty()) return std::nullopt;
  if (found.key_id.empty() || found.secret.empty())
    accelerate::raise<ConfigError>(
        "{} is not: set both, or neither",
        std::string(found.key_id.empty() ? "AWS_SECRET_ACCESS_KEY is set and AWS_ACCESS_KEY_ID"
                                         : "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY"));
  return found;
}

std::string session_name() { return "accelerate-" + std::to_string(std::time(nullptr)); }

class Chain {
 public:
  Chain(const CredentialsQuery& query, const Environment& environment, const Profiles& profiles)
      : query_(query), environment_(environment), profiles_(profiles) {}

  FoundCredentials find() {
    if (query_.given) return {*query_.given, "--aws_access_key_id and --aws_secret_access_key"};
    if (const auto found = of_environment(environment_))
      return {*found, "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"};
    const std::string name = profile_name(query_, environment_);
    const AwsProfile* profile = profiles_.find(name);
    if (!profile && name != "default") throw_missing(name, query_.profile.empty() ? "AWS_PROFILE" : "the config file");
    if (profile && !profile->get("role_arn").empty()) return of_role(*profile);
    if (const std::string file = variable_of(environment_, "AWS_WEB_IDENTITY_TOKEN_FILE"); !file.empty())
      return of_web_identity(file, variable_of(environment_, "AWS_ROLE_ARN"),
                             variable_of(environment_, "AWS_ROLE_SESSION_NAME"), "AWS_WEB_IDENTITY_TOKEN_FILE");
    if (profile)
      if (auto found = of_profile(*profile)) return *found;
    if (auto found = of_container()) return *found;
    if (auto found = of_machine()) return *found;
    accelerate::raise<ConfigError>(
        "no AWS credentials were found. Looked at: --aws_access_key_id and --aws_secret_access_key, AWS_ACCESS_KEY_ID "
        "and AWS_SECRET_ACCESS_KEY, the profile '{}' in {} and {}, and the metadata services of containers and "
        "machines. Give a 'profile' in the config file, or log in as your other AWS tools need it",
        name, profiles_.credentials_file().string(), profiles_.config_file().string());
  }

 private:
  [[noreturn]] void throw_missing(const std::string& name, const std::string& who) const {
    std::string known;
    for (const auto& other : profiles_.names()) known += (known.empty() ? "" : ", ") + other;
    accelerate::raise<ConfigError>("there is no AWS profile '{}', which {} names. {}, in {} and {}", name, who,
                                   known.empty() ? "There are none" : "There are: " + known,
                                   profiles_.credentials_file().string(), profiles_.config_file().string());
  }

  static std::string called(const AwsProfile& profile) { return "the profile '" + profile.name + "'"; }

  /// The credentials that a profile has by itself: keys, or a program that prints some.
  std::optional<FoundCredentials> of_profile(const AwsProfile& profile) {
    Credentials keys{profile.get("aws_access_key_id"), profile.get("aws_secret_access_key"),
                     profile.get("aws_session_token")};
    if (!keys.key_id.empty() && !keys.secret.empty()) return FoundCredentials{std::move(keys), called(profile)};
    if (!keys.key_id.empty() || !keys.secret.empty())
      accelerate::raise<ConfigError>("{} has {}: complete it", called(profile),
                                     keys.secret.empty() ? "aws_access_key_id without aws_secret_access_key"
                                                         : "aws_secret_access_key without aws_access_key_id");
    if (const std::string command = profile.get("credential_process"); !command.empty())
      return FoundCredentials{of_process(command, profile), called(profile) + " (credential_process)"};
    if (!profile.get("sso_session").empty() || !profile.get("sso_start_url").empty())
      accelerate::raise<ConfigError>(
          "{} logs in through IAM Identity Center (SSO), which this program can't. Let the AWS command line do it: "
          "eval \"$(aws configure export-credentials --profile {} --format env)\"",
          called(profile), profile.name);
    return std::nullopt;
  }

  static Credentials of_process(const std::string& command, const AwsProfile& profile) {
    std::string output;
    std::FILE* pipe = ::popen(command.c_str(), "r");
    if (!pipe)
      accelerate::raise<accelerate::ResourceError>("the credential_process of {} can't be started", called(profile));
    char bytes[1024];
    while (const size_t count = std::fread(bytes, 1, sizeof(bytes), pipe)) output.append(bytes, count);
    if (::pclose(pipe) != 0)
      accelerate::raise<ConfigError>("the credential_process of {} failed; its own message is above", called(profile));
    return credentials_in_json(output, "SessionToken", "the credential_process of " + called(profile));
  }

  FoundCredentials of_role(const AwsProfile& profile) {
    const std::string role = profile.get("role_arn"), source = profile.get("source_profile"),
                      other = profile.get("credential_source");
    if (const std::string file = profile.get("web_identity_token_file"); !file.empty())
      return of_web_identity(file, role, profile.get("role_session_name"), called(profile));
    if (!profile.get("mfa_serial").empty())
      accelerate::raise<ConfigError>(
          "{} needs a code of an MFA device for its role, which this program doesn't ask for. Let the AWS command line "
          "do it: eval \"$(aws configure export-credentials --profile {} --format env)\"",
          called(profile), profile.name);
    if (source.empty() == other.empty())
      accelerate::raise<ConfigError>(
          "{} has role_arn, which needs one of source_profile and credential_source to say whose credentials take the "
          "role",
          called(profile));
    if (!seen_.insert(profile.name).second)
      accelerate::raise<ConfigError>("{} is a source_profile of itself", called(profile));
    FoundCredentials base;
    if (!source.empty()) {
      const AwsProfile* next = profiles_.find(source);
      if (!next) throw_missing(source, called(profile) + " as source_profile");
      // A profile may be its own source: the keys beside its role.
      if (source != profile.name && !next->get("role_arn").empty()) {
        base = of_role(*next);
      } else {
        auto found = of_profile(*next);
        if (!found)
          accelerate::raise<ConfigError>("{}, the source_profile of {}, has no credentials", called(*next),
                                         called(profile));
        base = *found;
      }
    } else {
      std::optional<FoundCredentials> found;
      if (other == "Environment") {
        if (auto keys = of_environment(environment_)) found = FoundCredentials{*keys, "the environment"};
      } else if (other == "EcsContainer") found = of_container();
      else if (other == "Ec2InstanceMetadata") found = of_machine();
      else
        accelerate::raise<ConfigError>(
            "{} has credential_source = {}, expected Environment, EcsContainer or Ec2InstanceMetadata", called(profile),
            other);
      if (!found)
        accelerate::raise<ConfigError>("{} takes its credentials from {}, where there are none", called(profile),
                                       other);
      base = *found;
    }
    Aws sts(query_.region, environment_, profile);
    sts.use(base.credentials, base.source);
    std::vector<std::pair<std::string, std::string>> form{
        {"Action", "AssumeRole"},
        {"Version", "2011-06-15"},
        {"RoleArn", role},
        {"RoleSessionName",
         profile.get("role_session_name").empty() ? session_name() : profile.get("role_session_name")}};
    if (const auto id = profile.get("external_id"); !id.empty()) form.emplace_back("ExternalId", id);
    if (const auto seconds = profile.get("duration_seconds"); !seconds.empty())
      form.emplace_back("DurationSeconds", seconds);
    return {credentials_in_xml(sts.query("sts", form), "the role " + role), called(profile) + " (role " + role + ")"};
  }

  FoundCredentials of_web_identity(const std::string& file, const std::string& role, const std::string& session,
                                   const std::string& who) {
    if (role.empty()) accelerate::raise<ConfigError>("{} is given without a role: set AWS_ROLE_ARN", who);
    Aws sts(query_.region, environment_, AwsProfile{});
    const auto xml = sts.query("sts",
                               {{"Action", "AssumeRoleWithWebIdentity"},
                                {"Version", "2011-06-15"},
                                {"RoleArn", role},
                                {"RoleSessionName", session.empty() ? session_name() : session},
                                {"WebIdentityToken", first_line(file, who)}},
                               false);
    return {credentials_in_xml(xml, "the role " + role), "a web identity (role " + role + ")"};
  }

  std::optional<FoundCredentials> of_container() {
    const std::string relative = variable_of(environment_, "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
                      full = variable_of(environment_, "AWS_CONTAINER_CREDENTIALS_FULL_URI");
    if (relative.empty() && full.empty()) return std::nullopt;
    HttpRequest request{.url = relative.empty() ? full : "http://169.254.170.2" + relative};
    if (relative.empty() && full.rfind("https://", 0) != 0) {
      // As AWS's tools: the token must not go to just anybody.
      const std::string host = full.rfind("http://", 0) == 0 ? full.substr(7, full.find_first_of("/?", 7) - 7) : "";
      const std::string name =
          host.rfind('[', 0) == 0 ? host.substr(0, host.find(']') + 1) : host.substr(0, host.find(':'));
      if (name != "169.254.170.2" && name != "169.254.170.23" && name != "[fd00:ec2::23]" && name != "localhost" &&
          name != "[::1]" && name.rfind("127.", 0) != 0)
        accelerate::raise<ConfigError>(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI is '{}', expected https, or an address of this machine or of the "
            "container's host",
            full);
    }
    std::string token = variable_of(environment_, "AWS_CONTAINER_AUTHORIZATION_TOKEN");
    if (const std::string file = variable_of(environment_, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"); !file.empty())
      token = first_line(file, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
    if (token.find_first_of("\r\n") != std::string::npos)
      accelerate::raise<ConfigError>("the authorization token for the container's credentials has more than one line");
    if (!token.empty()) request.headers.emplace_back("Authorization", token);
    const auto response = ask(std::move(request));
    if (!response || response->status != 200)
      accelerate::raise<ConfigError>("the container's credentials at {} can't be had: {}",
                                     relative.empty() ? full : relative,
                                     response ? "HTTP " + std::to_string(response->status) : "no answer");
    return FoundCredentials{credentials_in_json(response->body, "Token", "the container's endpoint"),
                            "the container's role"};
  }

  std::optional<FoundCredentials> of_machine() {
    std::string disabled = variable_of(environment_, "AWS_EC2_METADATA_DISABLED");
    std::transform(disabled.begin(), disabled.end(), disabled.begin(), [](unsigned char c) { return std::tolower(c); });
    if (disabled == "true") return std::nullopt;
    std::string root = variable_of(environment_, "AWS_EC2_METADATA_SERVICE_ENDPOINT");
    if (root.empty()) root = "http://169.254.169.254";
    while (!root.empty() && root.back() == '/') root.pop_back();
    // Version 2 of the service only: a token that only the machine itself can get.
    const auto token = ask({.method = "PUT",
                            .url = root + "/latest/api/token",
                            .headers = {{"X-aws-ec2-metadata-token-ttl-seconds", "300"}}});
    if (!token || token->status != 200 || token->body.empty()) return std::nullopt;
    const std::string path = root + "/latest/meta-data/iam/security-credentials/";
    const std::vector<std::pair<std::string, std::string>> headers{{"X-aws-ec2-metadata-token", token->body}};
    const auto role = ask({.url = path, .headers = headers});
    if (!role || role->status != 200 || role->body.empty()) return std::nullopt;
    const std::string name = role->body.substr(0, role->body.find_first_of("\r\n"));
    const auto keys = ask({.url = path + name, .headers = headers});
    if (!keys || keys->status != 200)
      accelerate::raise<ConfigError>(
          "this machine has the role '{}', but its metadata service gives no credentials for it", name);
    return FoundCredentials{credentials_in_json(keys->body, "Token", "the machine's metadata service"),
                            "the machine's role '" + name + "'"};
  }

  /// Nothing when nobody answers: most machines are not in a data centre of AWS.
  std::optional<HttpResponse> ask(HttpRequest request) {
    request.connect_timeout = request.timeout = milliseconds(1000);
    request.direct = true;
    try {
      return http_.send(request);
    } catch (const AwsNoAnswer&) {
      return std::nullopt;
    }
  }

  const CredentialsQuery& query_;
  const Environment& environment_;
  const Profiles& profiles_;
  std::set<std::string> seen_;
  Http http_;
};

}  // namespace

std::string profile_name(const CredentialsQuery& query, const Environment& environment) {
  if (!query.profile.empty()) return query.profile;
  for (const char* variable : {"AWS_PROFILE", "AWS_DEFAULT_PROFILE"})
    if (const std::string name = variable_of(environment, variable); !name.empty()) return name;
  return "default";
}

FoundCredentials find_credentials(const CredentialsQuery& query, const Environment& environment,
                                  const Profiles& profiles) {
  return Chain(query, environment, profiles).find();
}

}  // namespace sagemaker
