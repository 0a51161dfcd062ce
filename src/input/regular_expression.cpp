#define PCRE2_CODE_UNIT_WIDTH 8

#include "input/regular_expression.hpp"

#include <pcre2.h>

#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::string message(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct RegularExpression::Code {
  explicit Code(const std::string& expression) {
    int error = 0;
    PCRE2_SIZE place = 0;
    compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                             PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &place, nullptr);
    if (!compiled) raise<ConfigError>("{} at byte {}", message(error), place);
  }
  ~Code() { pcre2_code_free(compiled); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  pcre2_code* compiled;
};

RegularExpression::RegularExpression(const std::string& expression) : code_(std::make_shared<const Code>(expression)) {}

bool RegularExpression::matches(std::string_view text) const {
  constexpr uint32_t kMostSteps = 20'000;  // names take some hundred
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> limits(
      pcre2_match_context_create(nullptr), pcre2_match_context_free);
  pcre2_set_match_limit(limits.get(), kMostSteps);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(pcre2_match_data_create(1, nullptr),
                                                                                 pcre2_match_data_free);
  const int found = pcre2_match(code_->compiled, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0, 0,
                                data.get(), limits.get());
  if (found < 0 && found != PCRE2_ERROR_NOMATCH) raise<ConfigError>("matching '{}': {}", text, message(found));
  return found >= 0;
}

}  // namespace accelerate
