#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/models/tokenizer.hpp"
#include "models/tokenizer/bpe.hpp"
#include "models/tokenizer/pattern.hpp"
#include "models/tokenizer/token_index.hpp"

namespace accelerate::models {

enum class NormalForm { nfc, nfd, nfkc, nfkd };
/// Matches become this text.
struct Replacement {
  Pattern pattern;
  std::string content;
};
using Normalization = std::variant<NormalForm, Replacement>;

/// The treatment of a pattern's matches.
enum class SplitBehavior { isolated, removed, contiguous, merged_with_previous, merged_with_next };
/// One step of cutting text into pieces.
struct SplitStep {
  Pattern pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  ///< what does not match is the match
  bool spelt = false;   ///< cuts the bytes as the vocabulary spells them: it is behind ByteLevel
};
/// Pieces get a space before them unless they begin with one.
struct PrefixSpace {};
using PreTokenizerStep = std::variant<SplitStep, PrefixSpace>;

/// A token that is found in text before anything is cut.
struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool special = false;
  bool strip_left = false, strip_right = false;  ///< takes white space beside it along
  bool normalized = false;                       ///< looked for after the others, in the normalised text
  bool single_word = false;                      ///< not within a word
  bool once_normalized = false;                  ///< normalized, or decoded as if it were: it was so when it was added
};

/// Ids that no token has, at most: the largest id is below the number of tokens and this.
inline constexpr int64_t kMostGaps = 65'536;

/// The parts of a tokenizer that the readers of files fill in.
struct TokenizerParts {
  std::vector<std::string> tokens;  ///< by id, as files spell them; empty where an id is not used
  std::vector<std::pair<std::string, std::string>> merges;
  bool whole_words = false;
  std::string unk;        ///< token of bytes that have none; empty: they are left out
  bool fuse_unk = false;  ///< several in a row are one
  std::vector<AddedToken> added;
  bool decodes_added = true;  ///< those that could be spelt bytes are decoded
  std::vector<Normalization> normalizers;
  std::vector<PreTokenizerStep> pre_tokenizers;
  std::vector<int64_t> prefix, suffix;  ///< special tokens around a text
  bool split_special_tokens = false;    ///< special tokens that are spelt out are text
  std::string chat_template;
  std::optional<int64_t> bos, eos, pad;
  /// Files that make the same tokenizer in any folder, by those names; none where there can't be such files.
  std::function<std::map<std::string, std::string>()> files;
};

/// GPT-2's way to cut text, which ByteLevel stands for.
inline constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// The names of the files that a tokenizer is read from.
inline constexpr const char* kTokenizerFiles[] = {"tokenizer.json",         "vocab.json",        "merges.txt",
                                                  "tokenizer_config.json",  "added_tokens.json", "chat_template.jinja",
                                                  "special_tokens_map.json"};

/// @throws CheckpointError as Tokenizer::from_pretrained
TokenizerParts read_tokenizer(const std::filesystem::path& path);

/// @throws CheckpointError as Tokenizer::apply_chat_template
std::string render_chat(const std::string& chat_template, const std::vector<ChatMessage>& messages,
                        bool add_generation_prompt);

struct Tokenizer::Content {
  Content(TokenizerParts given, const std::string& file);

  void encode(std::string_view text, std::vector<int64_t>& out) const;

  TokenizerParts parts;
  std::vector<std::string> bytes;  ///< by id
  std::vector<bool> special;       ///< by id
  std::optional<TokenIndex> ids;
  std::optional<Bpe> bpe;
  std::deque<AddedToken> normalized_tokens;  ///< as they are in the normalised text
  /// Added tokens that start with a byte, the longest first; those of the raw and those of the normalised text.
  std::array<std::vector<const AddedToken*>, 256> raw_added, normalized_added;

 private:
  bool has_normalized_ = false;

  void encode_plain(std::string_view text, std::vector<int64_t>& out) const;
  void encode_pieces(std::string_view text, std::vector<int64_t>& out) const;
};

}  // namespace accelerate::models
