#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::models {

/// A regular expression over valid UTF-8, as tokenizer files have them: Unicode classes, look-ahead, possessive
/// quantifiers.
class Pattern {
 public:
  /// @throws CheckpointError if it is none that PCRE2 knows.
  explicit Pattern(const std::string& expression);
  /// The same without special characters.
  static Pattern literal(const std::string& text);

  /// Appends the pieces of `text`: matches, and what lies between them, in order. @param keep_matches  else only what
  /// lies between
  /// @throws ResourceError when matching takes too many steps.
  void split(std::string_view text, bool keep_matches, std::vector<std::string_view>& pieces) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace accelerate::models
