#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::models {

/// A regular expression over valid UTF-8, as tokenizer files have them, in the syntax of Oniguruma, which reads them in
/// Python: Unicode classes, look-ahead, possessive quantifiers; ^ and $ are of lines, \h is a hexadecimal digit, (?m)
/// lets a dot be a line's end.
class Pattern {
 public:
  /// @throws CheckpointError if it is none that PCRE2 knows.
  explicit Pattern(const std::string& expression);
  /// The same without special characters.
  static Pattern literal(const std::string& text);

  /// Whether it matches places between characters, too.
  bool can_be_empty() const;

  /// Calls take(piece, is_match) for all of `text`: for matches, and for what lies between them, in order.
  /// @throws ResourceError when matching takes too many steps.
  template <class Take> void find(std::string_view text, const Take& take) const {
    size_t done = 0;
    for (Match match; next(text, match); done = match.end) {
      if (match.begin > done) take(text.substr(done, match.begin - done), false);
      take(text.substr(match.begin, match.end - match.begin), true);
    }
    if (done < text.size()) take(text.substr(done), false);
  }

 private:
  struct Match {
    size_t begin = 0, end = 0;
    bool any = false;  ///< it is one
  };
  /// The one behind `match`. One without characters cuts, too, but not right behind another.
  bool next(std::string_view text, Match& match) const;

  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace accelerate::models
