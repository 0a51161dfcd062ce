#include "trackers/keyword_arguments.hpp"

#include <algorithm>
#include <string_view>

#include "trackers/json_lines.hpp"
#include "utils/raise.hpp"

namespace accelerate {

KeywordArguments::KeywordArguments(const char* whose, const TrackerValues& values,
                                   std::initializer_list<const char*> known)
    : whose_(whose), values_(values) {
  for (const auto& [name, value] : values)
    if (std::find(known.begin(), known.end(), std::string_view(name)) == known.end())
      raise<ConfigError>("{}: found '{}', expected {}", whose, name,
                         known.size() == 0 ? "none" : fmt::format("some of {}", fmt::join(known, ", ")));
}

const TrackerValues& KeywordArguments::nothing() {
  static const TrackerValues none;
  return none;
}

const TrackerValue* KeywordArguments::find(const char* name) const {
  const auto found = values_.find(name);
  const bool given = found != values_.end() && !std::holds_alternative<std::nullptr_t>(found->second.value);
  return given ? &found->second : nullptr;
}

void KeywordArguments::refuse(const char* name, const char* expected) const {
  raise<ConfigError>("{}: found {} = {}, expected {}", whose_, name, to_plain_json(values_.at(name)).dump(), expected);
}

bool KeywordArguments::truth(const char* name, bool otherwise) const {
  const auto* value = find(name);
  if (!value) return otherwise;
  if (const auto* truth = std::get_if<bool>(&value->value)) return *truth;
  refuse(name, "true or false");
}

std::optional<int64_t> KeywordArguments::whole(const char* name) const {
  const auto* value = find(name);
  if (!value) return std::nullopt;
  if (const auto whole = value->whole()) return whole;
  refuse(name, "a whole number");
}

std::optional<double> KeywordArguments::number(const char* name) const {
  const auto* value = find(name);
  if (!value) return std::nullopt;
  if (const auto number = value->number()) return number;
  refuse(name, "a number");
}

std::string KeywordArguments::text(const char* name) const {
  const auto* value = find(name);
  if (!value) return {};
  if (const auto* text = value->text()) return *text;
  refuse(name, "a text");
}

}  // namespace accelerate
