#include "launch/job/option_values.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <vector>

#include "accelerate/config.hpp"
#include "input/json.hpp"
#include "launch/job/require.hpp"

namespace accelerate::launcher {

using config::Kind;
using config::Value;

const config::Option& option_called(const std::string& name) {
  if (const config::Option* option = config::launch_table().find(name)) return *option;
  std::vector<std::string> names;
  for_each_option([&](const config::Option& option) { names.emplace_back(option.name); });
  const auto nearest = nearest_name(name, names);
  raise<ConfigError>("there is no setting '{}'{}", name, nearest ? fmt::format(". Did you mean '{}'?", *nearest) : "");
}

std::string flag_of(const config::Option& option) {
  const auto spellings = option.spellings();
  for (const auto& spelling : spellings)
    if (spelling.starts_with("--")) return spelling;
  return option.name;
}

std::string in_small_letters(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

namespace {

/// A whole number that is written as another: YAML's 1e8 is text, and 1.0e+8 a fraction.
std::optional<int64_t> whole_number_in(const std::string& text) {
  constexpr double kExact = 9007199254740992;  // 2^53
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || std::floor(value) != value ||
      std::fabs(value) > kExact)
    return std::nullopt;
  return static_cast<int64_t>(value);
}

}  // namespace

Value from_file(const config::Option& option, const Value& value, const std::string& file) {
  const std::string where = fmt::format("the config file {}: '{}'", file, option.name);
  if (value.is_null() ||
      (value.is_string() && (option.kind == Kind::integer || option.kind == Kind::number) && value == ""))
    return nullptr;
  if (option.takes_auto && value == "auto") return value;
  switch (option.kind) {
    case Kind::integer: {
      if (whole_number(value)) return value;
      const std::string text = config::python_text(value);
      if (const auto whole = whole_number_in(text)) return *whole;
      return config::parse_value(option, text, where);
    }
    case Kind::number:
      if (!value.is_number()) return config::parse_value(option, config::python_text(value), where);
      return value;
    case Kind::flag:
      return value.is_string() ? Value(config::str_to_bool(value, where)) : Value(config::truthy(value));
    case Kind::booleans: {
      if (value.is_boolean()) return Value::array({value, value, value});  // one word for all three
      if (!value.is_string()) {
        require(value.is_array() && value.size() == 3,
                "{} is {}, expected true, false, or three values: [false, false, false]", where,
                config::python_text(value));
        return value;
      }
      std::string plain;
      for (char c : value.get<std::string>())
        if (c != '(' && c != ')' && c != '[' && c != ']' && c != ' ') plain += c;
      Value three = config::parse_value(option, plain, where);
      for (auto& item : three) item = config::truthy(item);
      return three;
    }
    case Kind::append:
    case Kind::words:
      return value.is_array() ? value : Value::array({value});
    default:
      return value;
  }
}

Value from_environment(const config::Option& option, std::string text) {
  const std::string where = fmt::format("the environment variable {}", option.variable);
  if (option.takes_auto && text == "auto") return text;
  if (option.kind == Kind::truth) return config::str_to_bool(text, where);
  if (option.choices) {
    const auto choices = option.choice_list();
    for (const auto& choice : choices)
      if (std::equal(choice.begin(), choice.end(), text.begin(), text.end(),
                     [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); }))
        text = choice;
  }
  return config::parse_value(option, text, where);
}

}  // namespace accelerate::launcher
