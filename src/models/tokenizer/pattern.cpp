#define PCRE2_CODE_UNIT_WIDTH 8

#include "models/tokenizer/pattern.hpp"
#include "utils/raise.hpp"

#include <pcre2.h>

namespace accelerate::models {
namespace {

std::string message(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

/// White space in tokenizer files is Unicode's property; PCRE2's \s lacks U+0085.
std::string with_unicode_space(const std::string& expression) {
  constexpr const char* kSpace = R"(\t-\r\x{85}\p{Z})";
  std::string result;
  bool in_class = false;
  for (size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    if (c == '\\' && i + 1 < expression.size()) {
      const char escaped = expression[++i];
      if (escaped == 's') {
        result += in_class ? std::string(kSpace) : "[" + std::string(kSpace) + "]";
      } else if (escaped == 'S' && !in_class) {
        result += "[^" + std::string(kSpace) + "]";
      } else if (escaped == 'S') {
        raise<CheckpointError>("tokenizer pattern '{}': \\S within [] is not supported.", expression.substr(0, 200));
      } else {
        result += {c, escaped};
      }
      continue;
    }
    if (c == '[') in_class = true;
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
    : code_(std::make_shared<const Code>(with_unicode_space(expression), 0U)) {}

Pattern Pattern::literal(const std::string& text) {
  std::string quoted;
  for (const char c : text) {
    if (std::string_view("\\^$.[]|()?*+{}-# ").find(c) != std::string_view::npos) quoted += '\\';
    quoted += c;
  }
  return Pattern(quoted);
}

bool Pattern::next(std::string_view text, size_t from, size_t& begin, size_t& end) const {
  thread_local const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  const auto* range = pcre2_get_ovector_pointer(data.get());
  for (const size_t done = from; from < text.size();) {
    const int found = pcre2_match(code_->compiled, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                  PCRE2_NO_UTF_CHECK, data.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0)
      raise<ResourceError>("tokenizing {} bytes: {}. Tokenize shorter texts.", text.size(), message(found));
    begin = range[0], end = range[1];
    if (end > begin && end > from && begin >= done) return true;
    do ++from;  // an empty match cuts nothing, nor does one that \\K moved
    while (from < text.size() && (static_cast<unsigned char>(text[from]) & 0xC0) == 0x80);
  }
  return false;
}

}  // namespace accelerate::models
