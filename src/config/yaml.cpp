#include "config/yaml.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <regex>
#include <sstream>

namespace accelerate::config {
namespace {

constexpr size_t kMostBytes = 1 << 18;
constexpr int kMostNodes = 20000, kMostLevels = 32;

bool one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), text) != words.end();
}

bool is_digits(std::string_view text, std::string_view allowed) {
  return !text.empty() && text.find_first_not_of(allowed) == std::string_view::npos &&
         text.find_first_not_of('_') != std::string_view::npos;
}

/// Whole numbers of YAML 1.1: decimal, 0x, 0b, octal with a leading 0, with underscores. (Sexagesimals, as in 1:30,
/// stay text: nobody means them.)
std::optional<int64_t> whole_number(std::string_view text) {
  std::string sign;
  if (!text.empty() && (text.front() == '-' || text.front() == '+'))
    sign = text.front() == '-' ? "-" : "", text.remove_prefix(1);
  int base = 10;
  if (text.starts_with("0x") && is_digits(text.substr(2), "0123456789abcdefABCDEF_")) base = 16, text.remove_prefix(2);
  else if (text.starts_with("0b") && is_digits(text.substr(2), "01_")) base = 2, text.remove_prefix(2);
  else if (text.size() > 1 && text.front() == '0' && is_digits(text, "01234567_")) base = 8;
  else if (!is_digits(text, "0123456789_") || text.front() == '_' || (text.size() > 1 && text.front() == '0'))
    return std::nullopt;
  std::string digits = sign;
  for (char c : text)
    if (c != '_') digits += c;
  errno = 0;
  const int64_t value = std::strtoll(digits.c_str(), nullptr, base);
  return errno == 0 ? std::optional(value) : std::nullopt;
}

/// Floating-point numbers of YAML 1.1 have a point, and a sign in their exponent: 1e8 is text.
std::optional<double> fraction(const std::string& text) {
  if (one_of(text, {".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"})) return INFINITY;
  if (one_of(text, {"-.inf", "-.Inf", "-.INF"})) return -INFINITY;
  if (one_of(text, {".nan", ".NaN", ".NAN"})) return NAN;
  static const std::regex form(R"([-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?))");
  if (text.size() > 64 || text.find('.') == std::string::npos || !std::regex_match(text, form)) return std::nullopt;
  std::string plain;
  for (char c : text)
    if (c != '_') plain += c;
  return std::strtod(plain.c_str(), nullptr);
}

/// The value of an unquoted word.
Value resolve(const std::string& text) {
  if (one_of(text, {"", "~", "null", "Null", "NULL"})) return nullptr;
  if (one_of(text, {"yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})) return true;
  if (one_of(text, {"no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})) return false;
  if (const auto value = whole_number(text)) return *value;
  if (const auto value = fraction(text)) return *value;
  return text;
}

class YamlReader {
 public:
  explicit YamlReader(const std::string& file) : file_(file) {}

  Value read(const YAML::Node& node, int level = 0) {
    if (level > kMostLevels || ++nodes_ > kMostNodes)
      fail(node.Mark(), "more levels or entries than a config file has");
    const std::string& tag = node.Tag();
    if (!tag.empty() && !one_of(tag, {"?", "!"}) && !tag.starts_with("tag:yaml.org,2002:"))
      fail(node.Mark(), "the tag '" + tag + "', which config files don't use");
    switch (node.Type()) {
      case YAML::NodeType::Scalar:
        return tag == "?"                                     ? resolve(node.Scalar())
               : tag == "!" || tag == "tag:yaml.org,2002:str" ? Value(node.Scalar())
                                                              : resolve(node.Scalar());
      case YAML::NodeType::Sequence: {
        Value list = Value::array();
        for (const auto& item : node) list.push_back(read(item, level + 1));
        return list;
      }
      case YAML::NodeType::Map: {
        Value map = Value::object();
        for (const auto& item : node) {
          if (!item.first.IsScalar()) fail(item.first.Mark(), "a key that is no word");
          map[item.first.Scalar()] = read(item.second, level + 1);
        }
        return map;
      }
      default:
        return nullptr;
    }
  }

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& found) const {
    raise<ConfigError>(
        "the config file {}: {}{}", file_, found,
        mark.line >= 0 ? " (line " + std::to_string(mark.line + 1) + ", column " + std::to_string(mark.column + 1) + ")"
                       : "");
  }

 private:
  const std::string& file_;
  int nodes_ = 0;
};

/// A word that means itself can stand without quotes.
bool needs_quotes(const std::string& text) {
  if (!resolve(text).is_string()) return true;
  if (text.front() == ' ' || text.back() == ' ' || text.find(": ") != std::string::npos ||
      text.find(" #") != std::string::npos || text.back() == ':')
    return true;
  if (std::string_view("!&*|>'\"%@`,[]{}#").find(text.front()) != std::string_view::npos) return true;
  if (one_of(text, {"=", "<<", "---", "..."}) || text.starts_with("--- ") || text.starts_with("... ")) return true;
  if (std::string_view("-?:").find(text.front()) != std::string_view::npos && (text.size() == 1 || text[1] == ' '))
    return true;
  static const std::regex special(
      R"([0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)");  // dates and sexagesimals of
                                                                                            // YAML 1.1
  return std::isdigit(static_cast<unsigned char>(text[text[0] == '-' || text[0] == '+'])) && text.size() < 64 &&
         std::regex_match(text, special);
}

std::string scalar(const Value& value) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    if (std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }))
      return Value(text).dump(-1, ' ', false, Value::error_handler_t::replace);  // JSON's escapes are YAML's
    if (!needs_quotes(text)) return text;
    std::string doubled;
    for (char c : text) doubled += c == '\'' ? "''" : std::string(1, c);
    return "'" + doubled + "'";
  }
  if (value.is_number_float() && std::isinf(value.get<double>())) return value.get<double>() < 0 ? "-.inf" : ".inf";
  if (value.is_number_float() && std::isnan(value.get<double>())) return ".nan";
  if (value.is_number_float()) {
    std::string text = python_text(value);  // PyYAML writes 1e-05 as 1.0e-05, else it would be text
    if (const size_t e = text.find('e'); e != std::string::npos && text.find('.') == std::string::npos)
      text.insert(e, ".0");
    return text;
  }
  return value.is_structured() ? value.is_array() ? "[]" : "{}" : value.dump();
}

void write(std::string& out, const Value& value, const std::string& indent) {
  if (value.is_array()) {
    for (const auto& item : value) {
      if (!item.is_structured() || item.empty()) {
        out += indent + "- " + scalar(item) + "\n";
        continue;
      }
      std::string block;
      write(block, item, indent + "  ");
      out += indent + "- " + block.substr(indent.size() + 2);
    }
    return;
  }
  std::map<std::string, const Value*> sorted;
  for (const auto& [key, item] : value.items()) sorted[key] = &item;
  for (const auto& [key, item] : sorted) {
    out += indent + scalar(Value(key)) + ":";
    if (!item->is_structured() || item->empty()) {
      out += " " + scalar(*item) + "\n";
    } else {
      out += "\n";
      write(out, *item, item->is_array() ? indent : indent + "  ");
    }
  }
}

/// By its lines: yaml-cpp's LoadAll never comes to an end for a file that holds a comma.
bool has_several_documents(const std::string& text) {
  std::istringstream lines(text);
  bool content = false;
  for (std::string line; std::getline(lines, line);) {
    const bool mark =
        line.starts_with("---") && (line.size() == 3 || std::isspace(static_cast<unsigned char>(line[3])));
    if (mark && content) return true;
    const size_t first = line.find_first_not_of(" \t\r");
    content = content || mark || (first != std::string::npos && line[first] != '#' && line[first] != '%');
  }
  return false;
}

}  // namespace

Value read_yaml(const std::string& text, const std::string& file) {
  YamlReader reader(file);
  if (text.size() > kMostBytes)
    raise<ConfigError>("the config file {} is longer than {} KB. Is it a config file? One has some hundred bytes", file,
                       kMostBytes >> 10);
  // The parser takes a NUL for the end; PyYAML refuses it, too.
  if (text.find('\0') != std::string::npos)
    raise<ConfigError>("the config file {} holds a NUL byte: it is not YAML", file);
  try {
    if (has_several_documents(text))
      raise<ConfigError>("the config file {} holds several documents (parted by ---), expected one", file);
    return reader.read(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    reader.fail(error.mark, "it is not YAML: " + error.msg);
  }
}

std::string write_yaml(const Value& value) {
  if (value.empty()) return "{}\n";
  std::string out;
  write(out, value, "");
  return out;
}

std::string write_json(const Value& value) {
  return parse_json<nlohmann::json>(value.dump(-1, ' ', false, Value::error_handler_t::replace))
             .dump(2, ' ', /*ensure_ascii=*/true) +
         "\n";
}

}  // namespace accelerate::config
