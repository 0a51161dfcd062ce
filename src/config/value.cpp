#include "config/value.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "accelerate/config.hpp"
#include "utils/raise.hpp"

namespace accelerate::config {
namespace {

template <class Number> std::optional<Number> parse_number(std::string text) {
  if (!text.empty() && text.front() == '+') text.erase(0, 1);
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Python's repr(): the shortest digits that give the number back, without exponent from 1e-4 to 1e16.
std::string python_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char text[40];
  const double size = std::fabs(value);
  const auto format =
      size != 0 && (size < 1e-4 || size >= 1e16) ? std::chars_format::scientific : std::chars_format::fixed;
  std::string result(text, std::to_chars(text, text + sizeof(text), value, format).ptr);
  if (format == std::chars_format::fixed && result.find('.') == std::string::npos) result += ".0";
  return result;
}

std::string quoted(const std::string& text) {
  return text.find('\'') == std::string::npos ? "'" + text + "'" : "\"" + text + "\"";
}

std::string element(const Value& value) {
  return value.is_string() ? quoted(value.get<std::string>()) : python_text(value);
}

}  // namespace

bool str_to_bool(const std::string& text, const std::string& what) {
  std::string low = text;
  std::transform(low.begin(), low.end(), low.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* yes : {"y", "yes", "t", "true", "on", "1"})
    if (low == yes) return true;
  for (const char* no : {"n", "no", "f", "false", "off", "0"})
    if (low == no) return false;
  raise<ConfigError>("{} is '{}', expected yes or no (or true, false, on, off, 1, 0)", what, text);
}

Value parse_value(const Option& option, const std::string& text, const std::string& name) {
  if (option.choices) {
    const auto choices = option.choice_list();
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
      std::string list;
      for (const auto& choice : choices) list += (list.empty() ? "" : ", ") + choice;
      const auto nearest = nearest_name(text, choices);
      raise<ConfigError>("{} is '{}', expected one of: {}{}", name, text, list,
                         nearest ? ". Did you mean '" + *nearest + "'?" : "");
    }
  }
  switch (option.kind) {
    case Kind::integer:
      if (const auto value = parse_number<int64_t>(text)) return *value;
      raise<ConfigError>("{} is '{}', expected a whole number", name, text);
    case Kind::number:
      if (const auto value = parse_number<double>(text)) return *value;
      raise<ConfigError>("{} is '{}', expected a number", name, text);
    case Kind::flag:
      return str_to_bool(text, name);
    case Kind::unset:
      return !str_to_bool(text, name);
    case Kind::boolean:
      return str_to_bool(text, name) ? 1 : 0;
    case Kind::truth:
      return !text.empty();
    case Kind::booleans: {
      Value list = Value::array();
      size_t begin = 0;
      for (size_t comma = 0; (comma = text.find(',', begin)) != std::string::npos; begin = comma + 1)
        list.push_back(str_to_bool(text.substr(begin, comma - begin), name) ? 1 : 0);
      list.push_back(str_to_bool(text.substr(begin), name) ? 1 : 0);
      if (list.size() != 3)
        raise<ConfigError>("{} is '{}', expected three values with commas, as in true,false,false", name, text);
      return list;
    }
    case Kind::append:
    case Kind::words:
    case Kind::text:
      break;
  }
  return text;
}

Value default_value(const Option& option) {
  struct AsValue {
    Value operator()(std::monostate) const { return nullptr; }
    Value operator()(bool value) const { return value; }
    Value operator()(int64_t value) const { return value; }
    Value operator()(double value) const { return value; }
    Value operator()(std::string_view text) const { return text; }
    Value operator()(std::span<const bool> list) const { return list; }
    Value operator()(std::span<const std::string_view> list) const { return list; }
  };
  return std::visit(AsValue{}, option.fallback);
}

std::string python_text(const Value& value) {
  switch (value.type()) {
    case Value::value_t::null:
      return "None";
    case Value::value_t::boolean:
      return value.get<bool>() ? "True" : "False";
    case Value::value_t::string:
      return value.get<std::string>();
    case Value::value_t::number_float:
      return python_float(value.get<double>());
    case Value::value_t::array: {
      std::string text;
      for (const auto& item : value) text += (text.empty() ? "" : ", ") + element(item);
      return "[" + text + "]";
    }
    case Value::value_t::object: {
      std::string text;
      for (const auto& [key, item] : value.items())
        text += (text.empty() ? "" : ", ") + quoted(key) + ": " + element(item);
      return "{" + text + "}";
    }
    default:
      return value.dump();
  }
}

bool truthy(const Value& value) {
  switch (value.type()) {
    case Value::value_t::null:
      return false;
    case Value::value_t::boolean:
      return value.get<bool>();
    case Value::value_t::string:
      return !value.get_ref<const std::string&>().empty();
    case Value::value_t::array:
    case Value::value_t::object:
      return !value.empty();
    default:
      return value.get<double>() != 0;
  }
}

}  // namespace accelerate::config
