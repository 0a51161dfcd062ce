#include <cmath>
#include <limits>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "parallel/zero/document.hpp"
#include "parallel/zero/hjson.hpp"

namespace accelerate {
namespace {

using json = nlohmann::ordered_json;

const std::string kMark("\0number ", 8);                   // begins strings that stand for numbers without a JSON form
constexpr std::string_view kWritten = "\"\\u0000number ";  // the same in JSON

template <class... Args> [[noreturn]] void refuse_document(fmt::format_string<Args...> text, Args&&... args) {
  raise<ConfigError>("DeepSpeed configuration: {}", fmt::format(text, std::forward<Args>(args)...));
}

/// Numbers without a JSON form become marked strings, of which to_json() makes Python's words.
void words_from_numbers(json& node) {
  if (node.is_structured()) {
    for (auto& child : node) words_from_numbers(child);
  } else if (node.is_number_float() && !std::isfinite(node.get<double>())) {
    const double number = node.get<double>();
    node = kMark + (std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
  }
}

/// Nothing when it is no JSON; `why` then says so.
std::optional<json> parsed(std::string_view text, std::string& why, bool of_file = false) {
  auto result = zero::parse_hjson(text, why, {.root_without_braces = of_file});
  if (result.is_discarded()) return std::nullopt;
  return result;
}

/// Nothing when a character is none of base64.
std::optional<std::string> base64_decoded(std::string_view text) {
  std::string result;
  uint32_t bits = 0;
  int count = 0;
  bool ended = false;
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == ' ') continue;
    if (c == '=') {
      ended = true;
      continue;
    }
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+' || c == '-' ? 62
                      : c == '/' || c == '_' ? 63
                                             : -1;
    if (value < 0 || ended) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) result += static_cast<char>(bits >> (count -= 8) & 0xFF);
  }
  return result;
}

std::string shortened(const std::string& text) { return text.size() <= 80 ? text : text.substr(0, 77) + "..."; }

json read(const std::string& source) {
  namespace fs = std::filesystem;
  std::error_code ignored;  // JSON is no path, and may be too long for one
  std::string why;
  std::optional<json> result;
  if (source.find('\0') == std::string::npos && fs::exists(source, ignored)) {
    if (!fs::is_regular_file(source, ignored))
      refuse_document("'{}' is no file, expected the path of a JSON file", source);
    std::string text;
    if (const auto problem = read_file(source, kMostSettingsBytes, text); !problem.empty())
      refuse_document("'{}': {}; check its permissions", source, problem);
    result = parsed(text, why, /*of_file=*/true);
    if (!result) refuse_document("'{}' {}", source, why);
  } else {
    result = parsed(source, why);
    if (!result)
      if (const auto decoded = base64_decoded(source)) {
        std::string why_decoded;
        result = parsed(*decoded, why_decoded);
        if (decoded->starts_with('{')) why = why_decoded;  // many a word is base64 of something
      }
    if (!result)
      refuse_document(
          "found '{}', expected the path of an existing file, JSON, or JSON in base64; if it is a path, compare it "
          "with the folder that the program runs in. As JSON it {}",
          shortened(source), why);
  }
  if (!result->is_object())
    refuse_document("found {}, expected a JSON object with sections such as zero_optimization", show_json(*result, 80));
  return *std::move(result);
}

/// The node at a dotted key; null when there is none, or when one on the way is null.
const json* find(const json& root, std::string_view key) {
  const json* node = &root;
  for (size_t begin = 0;;) {
    if (node->is_null()) return nullptr;
    if (!node->is_object())
      refuse_document("'{}' is {}, expected a section, which has '{}'", key.substr(0, begin ? begin - 1 : 0),
                      show_json(*node, 80), key.substr(begin));
    const size_t end = std::min(key.find('.', begin), key.size());
    const auto child = node->find(std::string(key.substr(begin, end - begin)));
    if (child == node->end()) return nullptr;
    node = &*child;
    if (end == key.size()) return node;
    begin = end + 1;
  }
}

bool truth(const json& value) {
  return value.is_boolean()  ? value.get<bool>()
         : value.is_number() ? value.get<double>() != 0
         : value.is_string() ? !value.get_ref<const std::string&>().empty()
                             : !value.empty();
}

}  // namespace

DeepSpeedConfig::DeepSpeedConfig(const std::string& source)
    : document_(std::make_unique<Document>(Document{.json = read(source)})) {}
DeepSpeedConfig::DeepSpeedConfig(const DeepSpeedConfig& other)
    : document_(std::make_unique<Document>(*other.document_)) {}
DeepSpeedConfig::DeepSpeedConfig(DeepSpeedConfig&&) noexcept = default;
DeepSpeedConfig& DeepSpeedConfig::operator=(DeepSpeedConfig other) noexcept {
  document_.swap(other.document_);
  return *this;
}
DeepSpeedConfig::~DeepSpeedConfig() = default;

std::optional<DeepSpeedValue> DeepSpeedConfig::get_value(std::string_view key) const {
  const json* node = find(document_->json, key);
  if (!node || node->is_null()) return std::nullopt;
  if (node->is_boolean()) return node->get<bool>();
  if (node->is_number_unsigned() && node->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    return node->get<double>();
  if (node->is_number_integer()) return node->get<int64_t>();
  if (node->is_number()) return node->get<double>();
  if (node->is_string()) return node->get<std::string>();
  refuse_document("'{}' is a {}, expected a single value; read it with to_json()", key,
                  node->is_array() ? "list" : "section");
}

bool DeepSpeedConfig::contains(std::string_view key) const { return find(document_->json, key) != nullptr; }

void DeepSpeedConfig::set_value(std::string_view key, const DeepSpeedValue& value) {
  const auto* text = std::get_if<std::string>(&value);
  if (key.find('\0') != std::string_view::npos || (text && text->find('\0') != std::string::npos))
    refuse_document("a name or a text has a zero byte");
  json* node = &document_->json;
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('.', begin), key.size());
    if (node->is_null()) *node = json::object();
    if (!node->is_object())
      refuse_document("'{}' is no section, so that '{}' can't be set", key.substr(0, begin ? begin - 1 : 0), key);
    node = &(*node)[std::string(key.substr(begin, end - begin))];
    begin = end + 1;
  }
  std::visit([node](const auto& content) { *node = content; }, value);
}

bool DeepSpeedConfig::del_config_sub_tree(std::string_view key) {
  if (!contains(key)) return false;
  const size_t dot = key.rfind('.');
  json& parent =
      dot == std::string_view::npos ? document_->json : const_cast<json&>(*find(document_->json, key.substr(0, dot)));
  parent.erase(std::string(key.substr(dot == std::string_view::npos ? 0 : dot + 1)));
  return true;
}

bool DeepSpeedConfig::is_auto(std::string_view key) const {
  const json* node = find(document_->json, key);
  return node && node->is_string() && node->get_ref<const std::string&>() == "auto";
}
bool DeepSpeedConfig::is_true(std::string_view key) const {
  const json* node = find(document_->json, key);
  return node && !node->is_null() && truth(*node);
}
bool DeepSpeedConfig::is_false(std::string_view key) const {
  const json* node = find(document_->json, key);
  return node && !node->is_null() && !truth(*node);
}

bool DeepSpeedConfig::is_zero2() const {
  const json* stage = find(document_->json, "zero_optimization.stage");
  return stage && stage->is_number() && *stage == 2;
}
bool DeepSpeedConfig::is_zero3() const {
  const json* stage = find(document_->json, "zero_optimization.stage");
  return stage && stage->is_number() && *stage == 3;
}
bool DeepSpeedConfig::is_offload() const {
  if (!is_zero2() && !is_zero3()) return false;
  for (const char* key : {"zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"})
    if (const json* device = find(document_->json, key); device && (*device == "cpu" || *device == "nvme")) return true;
  return false;
}

std::string DeepSpeedConfig::to_json(std::string_view key, int indent) const {
  const json* node = key.empty() ? &document_->json : find(document_->json, key);
  if (!node) refuse_document("there is no '{}'", key);
  json copy = *node;
  words_from_numbers(copy);
  const std::string text = copy.dump(indent, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, kWritten.size(), kWritten) != 0) {
      result += text[i];
      continue;
    }
    i += kWritten.size();
    while (text[i] != '"') result += text[i++];
  }
  return result;
}

}  // namespace accelerate
