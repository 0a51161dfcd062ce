#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace accelerate {

/// A regular expression as Python's `re` has them, but for little: PCRE2's. It may come from a file: matching ends
/// after so many steps.
class RegularExpression {
 public:
  /// @throws ConfigError that says what is wrong with it
  explicit RegularExpression(const std::string& expression);

  /// All of the text, from its beginning to its end. @throws ConfigError where that takes too many steps
  bool matches(std::string_view text) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace accelerate
