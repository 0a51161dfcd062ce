#pragma once

#include <optional>
#include <string>

#include "sagemaker/aws.hpp"

namespace sagemaker {

/// Credentials and where they come from, for messages.
struct FoundCredentials {
  Credentials credentials;
  std::string source;
};

/// The query for credentials, with the user's words about them.
struct CredentialsQuery {
  std::string region;
  std::string profile;               ///< the config file's; "" when it names none
  std::optional<Credentials> given;  ///< on the command line
};

/// The profile that counts: the config file's, else AWS_PROFILE, AWS_DEFAULT_PROFILE, "default".
std::string profile_name(const CredentialsQuery& query, const Environment& environment);

/// The standard chain, the first that has any: the command line; AWS_ACCESS_KEY_ID and its kin; the profile's role (of
/// source_profile or credential_source, or a web identity); AWS_WEB_IDENTITY_TOKEN_FILE; the profile's keys; its
/// credential_process; the container's endpoint; the machine's (IMDSv2). Blocking: the last two wait for a second each
/// where nobody answers.
/// @throws ConfigError saying what was looked at, when nothing is found; half of them is an error, too, and not
/// passed over.
FoundCredentials find_credentials(const CredentialsQuery& query, const Environment& environment,
                                  const Profiles& profiles);

}  // namespace sagemaker
