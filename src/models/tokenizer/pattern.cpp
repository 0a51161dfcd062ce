#define PCRE2_CODE_UNIT_WIDTH 8

#include "models/tokenizer/pattern.hpp"
#include "utils/raise.hpp"

#include <pcre2.h>

#include <algorithm>

namespace accelerate::models {
namespace {

std::string message(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

/// In PCRE2's words. White space is Unicode's property; PCRE2's \s lacks U+0085.
std::string translated(const std::string& expression) {
  constexpr const char* kSpace = R"(\t-\r\x{85}\p{Z})";
  constexpr const char* kHex = "0-9A-Fa-f";
  const auto refuse = [&](const char* what) {
    raise<CheckpointError>("tokenizer pattern '{}': {} is not supported.", expression.substr(0, 200), what);
  };
  std::string result;
  bool in_class = false;
  for (size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\' && i + 1 < expression.size()) {
      const char escaped = expression[++i];
      const char* const members = escaped == 's' || escaped == 'S'   ? kSpace
                                  : escaped == 'h' || escaped == 'H' ? kHex
                                                                     : nullptr;
      const bool none_of = escaped == 'S' || escaped == 'H';
      if (members && in_class && none_of) refuse(escaped == 'S' ? "\\S within []" : "\\H within []");
      else if (members && in_class) result += members;
      else if (members) result += (none_of ? "[^" : "[") + std::string(members) + "]";
      else result += {c, escaped};
      continue;
    }
    if (in_class && c == '[' && expression.compare(i + 1, 1, ":") != 0) refuse("[] within []");
    if (in_class && expression.compare(i, 2, "&&") == 0) refuse("&& within []");
    if (in_class && expression.compare(i, 2, "[:") == 0) {
      const auto end = expression.find(":]", i);
      if (end == std::string::npos) refuse("[: without an end");
      result += expression.substr(i, end + 2 - i);
      i = end + 1;
      continue;
    }
    if (!in_class && expression.compare(i, 2, "(?") == 0) {  // options, perhaps
      const auto end = expression.find_first_not_of("imx-", i + 2);
      if (end != std::string::npos && end > i + 2 && (expression[end] == ')' || expression[end] == ':')) {
        std::string options = expression.substr(i, end - i);
        std::replace(options.begin(), options.end(), 'm', 's');
        result += options;
        i = end - 1;
        continue;
      }
    }
    if (c == '[') {
      in_class = true;
      // Right at the beginning ] is a member.
      for (const char* first : {"^", "]"})
        if (expression.compare(i + 1, 1, first) == 0) result += expression[i++];
      result += expression[i];
      continue;
    }
    if (c == ']') in_class = false;
    result += c;
  }
  return result;
}

}  // namespace

struct Pattern::Code {
  Code(const std::string& expression, uint32_t options) {
    int error = 0;
    PCRE2_SIZE place = 0;
    compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                             options | PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK | PCRE2_NEVER_BACKSLASH_C, &error,
                             &place, nullptr);
    if (!compiled)
      raise<CheckpointError>("tokenizer pattern '{}': {} at byte {}.", expression.substr(0, 200), message(error),
                             place);
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);  // where that is not available it is interpreted
  }
  ~Code() { pcre2_code_free(compiled); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  pcre2_code* compiled;
};

Pattern::Pattern(const std::string& expression)
    : code_(std::make_shared<const Code>(translated(expression), PCRE2_MULTILINE)) {}

Pattern Pattern::literal(const std::string& text) {
  std::string quoted;
  for (const char c : text) {
    if (std::string_view("\\^$.[]|()?*+{}-# ").find(c) != std::string_view::npos) quoted += '\\';
    quoted += c;
  }
  return Pattern(quoted);
}

bool Pattern::can_be_empty() const {
  uint32_t can = 0;
  pcre2_pattern_info(code_->compiled, PCRE2_INFO_MATCHEMPTY, &can);
  return can != 0;
}

bool Pattern::next(std::string_view text, Match& match) const {
  thread_local const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  const auto* range = pcre2_get_ovector_pointer(data.get());
  for (size_t from = match.end; !text.empty() && from <= text.size();) {
    const int found = pcre2_match(code_->compiled, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0)
      raise<ResourceError>("tokenizing {} bytes: {}. Tokenize shorter texts.", text.size(), message(found));
    const size_t begin = range[0], end = range[1];
    const bool again = end == begin && match.any && end == match.end;
    if (!again && end >= begin && begin >= match.end) {
      match = {begin, end, true};
      return true;
    }
    do ++from;  // a second one without characters, or one that \K moved
    while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80);
  }
  return false;
}

}  // namespace accelerate::models
