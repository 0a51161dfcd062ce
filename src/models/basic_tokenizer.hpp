#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace accelerate::models {

/// How BERT cleans text before words are cut into pieces.
struct NormalizerOptions {
  bool lower_case;
  bool strip_accents;
  bool space_cjk;
};

/// Words of a text, one behind the other in one buffer. Reused from text to text so that no word allocates.
struct Words {
  std::string bytes;         ///< UTF-8 of all words, without separators.
  std::vector<size_t> ends;  ///< One past each word's last byte.
  void clear() {
    bytes.clear();
    ends.clear();
  }
  void end_word() {
    if (bytes.size() > (ends.empty() ? 0 : ends.back())) ends.push_back(bytes.size());
  }
};

/// Appends the words of `text`: runs of characters that are neither space nor punctuation, and each punctuation
/// character on its own.
void split_words(std::string_view text, const NormalizerOptions& options, Words& words);

}  // namespace accelerate::models
