#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "sagemaker/http.hpp"

/// Reads the answers of services. They and anybody between may send anything: a field of another type than it should
/// have counts as not there.
namespace sagemaker {

using Json = nlohmann::ordered_json;

/// The text of the first <name>…</name>, "" when there is none.
std::string xml_text(const std::string& xml, const std::string& name);

/// The value that a JSON object has there, else null.
Json field(const Json& object, const char* key);
/// A text of a JSON object, "" where it has none.
std::string text_in(const Json& object, const char* key);
/// A list of a JSON object, empty where it has none.
Json list_in(const Json& object, const char* key);
/// A number of seconds that a job can last, 0 or more.
std::optional<int64_t> seconds_in(const Json& object, const char* key);
/// "2026-01-31 12:00:00 " of seconds since 1970, "" of what is no time.
std::string time_text(const Json& seconds);

/// A service's complaint: {code, message}. JSON services answer JSON, the others XML, proxies whatever they like.
std::pair<std::string, std::string> complaint(const HttpResponse& response);

/// The credentials in the answer of a metadata service or a credential process: JSON with a few names. @param token_key
///  of the session's token. @param what  who answered. @throws ConfigError without the keys.
Credentials credentials_in_json(const std::string& text, const std::string& token_key, const std::string& what);
/// The credentials in STS's answer. @throws ConfigError without the keys and a token.
Credentials credentials_in_xml(const std::string& xml, const std::string& what);

}  // namespace sagemaker
