#include "sagemaker/answers.hpp"

#include <ctime>
#include <string_view>

#include "input/json.hpp"
#include "utils/raise.hpp"

namespace sagemaker {

using accelerate::ConfigError;

std::string xml_text(const std::string& xml, const std::string& name) {
  const size_t from = xml.find("<" + name + ">");
  if (from == std::string::npos) return "";
  const size_t begin = from + name.size() + 2, end = xml.find("</" + name + ">", begin);
  if (end == std::string::npos) return "";
  constexpr std::pair<std::string_view, char> kEntities[] = {{"&lt;", '<'},    {"&gt;", '>'},   {"&quot;", '"'},
                                                             {"&apos;", '\''}, {"&#39;", '\''}, {"&amp;", '&'}};
  std::string text;
  for (std::string_view rest(xml.data() + begin, end - begin); !rest.empty();) {
    char next = rest.front();
    size_t taken = 1;
    if (next == '&')
      for (const auto& [entity, character] : kEntities)
        if (rest.starts_with(entity)) next = character, taken = entity.size();
    text += next;
    rest.remove_prefix(taken);
  }
  return text;
}

Json field(const Json& object, const char* key) {
  return object.is_object() && object.contains(key) ? object[key] : Json();
}

std::string text_in(const Json& object, const char* key) {
  const auto found = field(object, key);
  return found.is_string() ? found.get<std::string>() : "";
}

Json list_in(const Json& object, const char* key) {
  auto found = field(object, key);
  return found.is_array() ? found : Json::array();
}

std::optional<int64_t> seconds_in(const Json& object, const char* key) {
  constexpr int64_t kMost = int64_t{1} << 40;
  const auto number = accelerate::whole_number(field(object, key));
  return number && *number >= 0 && *number <= kMost ? number : std::nullopt;
}

std::string time_text(const Json& seconds) {
  constexpr double kYear10000 = 253402300800;
  if (!seconds.is_number()) return "";
  const auto number = seconds.get<double>();
  if (!(number >= 0 && number < kYear10000)) return "";
  const auto time = static_cast<std::time_t>(number);
  std::tm utc{};
  ::gmtime_r(&time, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S ", &utc);
  return text;
}

std::pair<std::string, std::string> complaint(const HttpResponse& response) {
  std::string code, message;
  if (const Json body = accelerate::parse_json<Json>(response.body); body.is_object()) {
    for (const char* key : {"__type", "code", "Code"})
      if (code.empty()) code = text_in(body, key);
    for (const char* key : {"message", "Message"})
      if (message.empty()) message = text_in(body, key);
  } else {
    code = xml_text(response.body, "Code");
    message = xml_text(response.body, "Message");
  }
  if (code.empty())
    if (const auto header = response.headers.find("x-amzn-errortype"); header != response.headers.end())
      code = header->second;
  code = code.substr(code.rfind('#') + 1);
  return {code.substr(0, code.find(':')), message};
}

Credentials credentials_in_json(const std::string& text, const std::string& token_key, const std::string& what) {
  const Json answer = accelerate::parse_json<Json>(text);
  Credentials found{text_in(answer, "AccessKeyId"), text_in(answer, "SecretAccessKey"),
                    text_in(answer, token_key.c_str())};
  if (found.key_id.empty() || found.secret.empty())
    accelerate::raise<ConfigError>("{} gave no AccessKeyId and SecretAccessKey",
                                   what);  // what it gave may hold secrets
  return found;
}

Credentials credentials_in_xml(const std::string& xml, const std::string& what) {
  Credentials found{xml_text(xml, "AccessKeyId"), xml_text(xml, "SecretAccessKey"), xml_text(xml, "SessionToken")};
  if (found.key_id.empty() || found.secret.empty() || found.token.empty())
    accelerate::raise<ConfigError>("{}: STS answered without credentials", what);
  return found;
}

}  // namespace sagemaker
