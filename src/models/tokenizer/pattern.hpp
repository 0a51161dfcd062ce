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

  /// Calls take(piece, is_match) for all of `text`: for matches, and for what lies between them, in order.
  /// @throws ResourceError when matching takes too many steps.
  template <class Take> void find(std::string_view text, const Take& take) const {
    size_t done = 0;
    for (size_t begin = 0, end = 0; next(text, done, begin, end); done = end) {
      if (begin > done) take(text.substr(done, begin - done), false);
      take(text.substr(begin, end - begin), true);
    }
    if (done < text.size()) take(text.substr(done), false);
  }

 private:
  /// The next match that is not empty, from `from` on.
  bool next(std::string_view text, size_t from, size_t& begin, size_t& end) const;

  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace accelerate::models
