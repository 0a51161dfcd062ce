#include "parallel/zero/hjson.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

using Json = nlohmann::ordered_json;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_punctuation(char c) { return std::string_view("{}[],:").find(c) != std::string_view::npos; }

/// How many bytes the character at the front has; 0 where it is no UTF-8.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xC2 && first < 0xE0   ? 2
                        : (first & 0xF0) == 0xE0        ? 3
                        : first >= 0xF0 && first < 0xF5 ? 4
                                                        : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xC0) != 0x80) return 0;
  // Longer than need be, halves of pairs, and what is beyond the last character.
  const unsigned char second = byte(1);
  if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0)) return 0;
  if ((first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90)) return 0;
  return length;
}

void append_utf8(std::string& to, uint32_t code) {
  const auto add = [&](uint32_t byte) { to += static_cast<char>(byte); };
  if (code < 0x80) return add(code);
  if (code < 0x800) return add(0xC0 | code >> 6), add(0x80 | (code & 0x3F));
  if (code < 0x10000) return add(0xE0 | code >> 12), add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
  add(0xF0 | code >> 18), add(0x80 | (code >> 12 & 0x3F)), add(0x80 | (code >> 6 & 0x3F)), add(0x80 | (code & 0x3F));
}

std::optional<double> number_word(std::string_view word) {
  if (word == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (word == "Infinity") return std::numeric_limits<double>::infinity();
  if (word == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

/// Recursive, to rules.deepest levels. Mistakes are thrown as a Problem, which does not leave this file.
class HjsonReader {
 public:
  struct Problem {
    std::string text;
  };

  HjsonReader(std::string_view text, const HjsonRules& rules)
      // A value takes up to 100 bytes, and may have a single one of text.
      : text_(text), rules_(rules), left_(500'000 + text.size() / 6) {}

  Json root() {
    check_characters();
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    skip();
    if (!rules_.root_without_braces || peek() == '{' || peek() == '[') return whole();
    const size_t begin = at_;
    try {
      return whole();  // a number, say: no configuration, but readable
    } catch (const Problem&) {
      at_ = begin;
    }
    if (at_ == text_.size()) fail("expected '{'");
    Json object = Json::object();
    members(object, '\0');
    return object;
  }

 private:
  using Members = std::vector<std::pair<const std::string, Json>>;

  [[noreturn]] void fail_at(size_t place, const std::string& what) const {
    const std::string_view before = text_.substr(0, place);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const size_t begin = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
    throw Problem{fmt::format("is not valid JSON, nor HJSON (line {}, column {}: {})", line, place - begin + 1, what)};
  }
  [[noreturn]] void fail(const std::string& expected) const {
    if (at_ >= text_.size()) fail_at(at_, "found the end of the text, " + expected);
    const size_t length = std::min<size_t>(utf8_length(text_.substr(at_)), text_.size() - at_);
    const std::string found = text_[at_] == '\n' || text_[at_] == '\r'
                                  ? "the end of the line"
                                  : show_json(Json(std::string(text_.substr(at_, length))));
    fail_at(at_, fmt::format("found {}, {}", found, expected));
  }

  void check_characters() const {
    for (size_t i = 0; i < text_.size();) {
      if (text_[i] == '\0') throw Problem{"is not valid JSON: it holds a NUL byte"};
      const size_t length = utf8_length(text_.substr(i));
      if (length == 0)
        throw Problem{fmt::format("is not valid UTF-8 (byte {} is 0x{:02x})", i, static_cast<unsigned char>(text_[i]))};
      i += length;
    }
  }

  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  bool ended() const { return at_ >= text_.size(); }

  /// Blanks and comments.
  void skip() {
    while (!ended()) {
      if (is_blank(peek())) {
        ++at_;
      } else if (peek() == '#' || (peek() == '/' && peek(1) == '/')) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (peek() == '/' && peek(1) == '*') {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == text_.npos) fail_at(at_, "found a comment that begins with /*, expected */ at its end");
        at_ = end + 2;
      } else {
        return;
      }
    }
  }

  Json whole() {
    Json result = value(/*text_allowed=*/false);
    skip();
    if (!ended()) fail("expected the end of the text");
    return result;
  }

  Json value(bool text_allowed = true) {
    skip();
    if (left_-- == 0) throw Problem{"has more values than text of its length can mean"};
    if (peek() == '{' || peek() == '[') {
      if (depth_ == rules_.deepest) throw Problem{fmt::format("is nested deeper than {} levels", rules_.deepest)};
      ++depth_;
      Json result = peek() == '{' ? Json::object() : Json::array();
      const bool is_object = result.is_object();
      ++at_;
      if (is_object) members(result, '}');
      else elements(result);
      --depth_;
      return result;
    }
    if (text_.substr(at_).starts_with("'''")) return text_of_lines();
    if (peek() == '"' || peek() == '\'') return quoted();
    if (ended() || is_punctuation(peek())) fail("expected a value");
    if (auto literal = word_or_number()) return *std::move(literal);
    if (!text_allowed) fail("expected '{'");
    const size_t begin = at_;
    at_ = std::min(text_.find('\n', at_), text_.size());
    std::string_view result = text_.substr(begin, at_ - begin);
    while (is_blank(result.back())) result.remove_suffix(1);
    return std::string(result);
  }

  /// Members up to `end`, which is taken; '\0': up to the end of the text.
  void members(Json& object, char end) {
    auto& pairs = static_cast<Members&>(object.get_ref<Json::object_t&>());
    std::vector<std::pair<std::string, size_t>> places;
    for (;;) {
      skip();
      if (end != '\0' && peek() == end) {
        ++at_;
        break;
      }
      if (ended() && end == '\0') break;
      const size_t place = at_;
      std::string key = name();
      skip();
      if (peek() != ':') fail("expected ':' behind the name " + show_json(Json(key)));
      ++at_;
      places.emplace_back(key, place);
      // Appended without the search for an equal name that emplace() makes: of n names it would take n * n steps.
      Json& child = pairs.emplace_back(std::move(key), nullptr).second;
      child = value();
      skip();
      if (peek() == ',') ++at_;
      else if (ended() && end != '\0') fail(fmt::format("expected ',' or '{}'", end));
    }
    std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    const auto twice = std::adjacent_find(places.begin(), places.end(),
                                          [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != places.end())
      fail_at(std::next(twice)->second, fmt::format("the object has the name {} twice, so which value holds is open",
                                                    show_json(Json(twice->first))));
  }

  void elements(Json& list) {
    for (;;) {
      skip();
      if (peek() == ']') {
        ++at_;
        return;
      }
      list.get_ref<Json::array_t&>().push_back(value());
      skip();
      if (peek() == ',') ++at_;
      else if (ended()) fail("expected ',' or ']'");
    }
  }

  std::string name() {
    if (peek() == '"' || peek() == '\'') return quoted();
    const size_t begin = at_;
    while (!ended() && !is_blank(peek()) && !is_punctuation(peek())) ++at_;
    if (at_ == begin) fail("expected a name");
    std::string result(text_.substr(begin, at_ - begin));
    if (number_word(result))
      fail_at(begin, "the name of a setting is " + result + ", a number without a JSON form; quote it");
    return result;
  }

  /// True, false, null, a number or one of Python's words, if nothing but a blank end of the line, a comment or
  /// punctuation follows: else it is the beginning of a text.
  std::optional<Json> word_or_number() {
    size_t end = at_;
    const auto here = [&](size_t i) { return i < text_.size() ? text_[i] : '\0'; };
    const bool is_word = (here(at_) >= 'A' && here(at_) <= 'z') || (here(at_) == '-' && here(at_ + 1) == 'I');
    if (is_word) {
      while (end < text_.size() && end - at_ < 10 &&
             (std::isalpha(static_cast<unsigned char>(here(end))) || end == at_))
        ++end;
    } else if (!number_ends(end)) {
      return std::nullopt;
    }
    size_t next = end;
    while (here(next) == ' ' || here(next) == '\t') ++next;
    const char c = here(next);
    const bool ends = next >= text_.size() || c == '\n' || c == '\r' || c == ',' || c == '}' || c == ']' || c == '#' ||
                      (c == '/' && (here(next + 1) == '/' || here(next + 1) == '*'));
    if (!ends) return std::nullopt;
    const std::string_view word = text_.substr(at_, end - at_);
    Json result = nullptr;
    if (!is_word) {
      result = parse_json<Json>(word);
      if (result.is_discarded())
        fail_at(at_, fmt::format("the number {} is larger than any that can be held", word.substr(0, 40)));
    } else if (const auto number = number_word(word)) {
      result = *number;
    } else if (word == "true" || word == "false") {
      result = word == "true";
    } else if (word != "null") {
      return std::nullopt;
    }
    at_ = end;
    return result;
  }

  /// Moves `end` behind a number as JSON writes them; false when there is none.
  bool number_ends(size_t& end) const {
    const auto here = [&](size_t i) { return i < text_.size() ? text_[i] : '\0'; };
    const auto digits = [&] {
      const size_t begin = end;
      while (is_digit(here(end))) ++end;
      return end > begin;
    };
    if (here(end) == '-') ++end;
    if (here(end) == '0') ++end;
    else if (!digits()) return false;
    if (here(end) == '.') {
      ++end;
      if (!digits()) return false;
    }
    if (here(end) == 'e' || here(end) == 'E') {
      ++end;
      if (here(end) == '+' || here(end) == '-') ++end;
      if (!digits()) return false;
    }
    return true;
  }

  uint32_t four_hex() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      const int digit = is_digit(c)            ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("expected four hexadecimal digits behind \\u");
      code = code << 4 | static_cast<uint32_t>(digit);
    }
    return code;
  }

  void escaped(std::string& to) {
    static constexpr std::string_view kLetters = "\"'\\/bfnrt", kMeanings = "\"'\\/\b\f\n\r\t";
    const size_t begin = at_++;
    if (peek() != 'u') {
      const size_t letter = ended() ? kLetters.npos : kLetters.find(peek());
      if (letter == kLetters.npos) fail("expected one of \" ' \\ / b f n r t u behind a backslash");
      to += kMeanings[letter];
      ++at_;
      return;
    }
    ++at_;
    uint32_t code = four_hex();
    if (code >= 0xD800 && code < 0xDC00 && peek() == '\\' && peek(1) == 'u') {
      at_ += 2;
      const uint32_t low = four_hex();
      if (low < 0xDC00 || low > 0xDFFF) fail_at(begin, "the second half of a pair of \\u is missing");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (code >= 0xD800 && code < 0xE000) {
      fail_at(begin, "half a pair of \\u stands alone");
    }
    if (code == 0) fail_at(begin, "a name or a text has a zero byte");
    append_utf8(to, code);
  }

  std::string quoted() {
    const size_t begin = at_;
    const char quote = text_[at_++];
    std::string result;
    for (;;) {
      if (ended()) fail_at(begin, fmt::format("found no end of this text, expected a closing {}", quote));
      const char c = peek();
      if (c == quote) break;
      if (static_cast<unsigned char>(c) < 0x20) fail("expected no control character within quotes");
      if (c == '\\') escaped(result);
      else result += c, ++at_;
    }
    ++at_;
    return result;
  }

  /// Between ''' and ''': without the blanks that its lines are indented by as far as the first quotes are, and without
  /// the line ends beside the quotes.
  std::string text_of_lines() {
    const size_t begin = at_;
    const size_t line = text_.substr(0, at_).rfind('\n');
    const size_t indent = at_ - (line == text_.npos ? 0 : line + 1);
    const size_t end = text_.find("'''", at_ + 3);
    if (end == text_.npos) fail_at(begin, "found no end of this text, expected a closing '''");
    std::string_view rest = text_.substr(at_ + 3, end - at_ - 3);
    at_ = end + 3;
    const size_t first = std::min(rest.find_first_not_of(" \t\r"), rest.size());
    if (first < rest.size() && rest[first] == '\n') rest.remove_prefix(first);
    std::string result;
    while (!rest.empty()) {
      if (rest.front() != '\r') result += rest.front();
      const bool new_line = rest.front() == '\n';
      rest.remove_prefix(1);
      for (size_t i = 0; new_line && i < indent && !rest.empty() && (rest.front() == ' ' || rest.front() == '\t'); ++i)
        rest.remove_prefix(1);
    }
    if (result.starts_with('\n')) result.erase(0, 1);
    if (result.ends_with('\n')) result.pop_back();
    return result;
  }

  std::string_view text_;
  const HjsonRules& rules_;
  size_t left_;  ///< values that may still come
  size_t at_ = 0, depth_ = 0;
};

}  // namespace

nlohmann::ordered_json parse_hjson(std::string_view text, std::string& problem, const HjsonRules& rules) {
  try {
    return HjsonReader(text, rules).root();
  } catch (const HjsonReader::Problem& found) {
    problem = found.text;
    return Json(Json::value_t::discarded);
  }
}

}  // namespace accelerate::zero
