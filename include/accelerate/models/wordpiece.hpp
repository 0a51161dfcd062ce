#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "accelerate/utils/export.hpp"

namespace accelerate::models {

/// How text is cut into tokens; the names are those of tokenizer_config.json.
struct WordPieceOptions {
  bool do_lower_case = true;               ///< Lower-case the text, as "uncased" models need.
  std::optional<bool> strip_accents;       ///< Remove accents; as do_lower_case where it is not given.
  bool tokenize_chinese_chars = true;      ///< Make every CJK ideograph a word of its own.
  int64_t max_input_chars_per_word = 100;  ///< A longer word, in code points, becomes the unknown token.
  /// Tokens that the model has positions for; used where EncodeOptions asks for truncation without a length.
  int64_t model_max_length = 512;
  std::string unk_token = "[UNK]";
  std::string cls_token = "[CLS]";
  std::string sep_token = "[SEP]";
  std::string pad_token = "[PAD]";
  std::string mask_token = "[MASK]";
  /// Found in texts as they are, as the five above; the vocabulary has them, too.
  std::vector<std::string> additional_special_tokens;
  bool clean_up_tokenization_spaces = false;  ///< decode() drops spaces within "it ' s" and "do n't".
};

enum class Padding {
  none,        ///< Each row keeps its length; a batch then needs rows of one length.
  longest,     ///< To the longest row of the batch.
  max_length,  ///< To EncodeOptions::max_length.
};

struct EncodeOptions {
  bool truncation = false;  ///< Cut to max_length, from the longer text of a pair first.
  /// In tokens, special ones included; WordPieceOptions::model_max_length where it is not given.
  std::optional<int64_t> max_length;
  Padding padding = Padding::none;
  bool add_special_tokens = true;  ///< [CLS] a [SEP] and, for a pair, b [SEP].
};

/// One encoded text or pair; the three lists have one length.
struct Encoding {
  std::vector<int64_t> input_ids;
  std::vector<int64_t> token_type_ids;  ///< 0 for the first text with its special tokens, 1 for the second.
  std::vector<int64_t> attention_mask;  ///< 1 for tokens, 0 for padding.
};

/// The encodings of B texts or pairs, padded to T tokens: int64 CPU tensors of shape [B, T].
struct BatchEncoding {
  at::Tensor input_ids;
  at::Tensor token_type_ids;
  at::Tensor attention_mask;
};

/// BERT's tokenizer: cleaned, lower-cased, accent-stripped words, cut into the longest pieces that the vocabulary has.
///
/// Gives the tokens of the `tokenizers` package's BertNormalizer, BertPreTokenizer and WordPiece model. Input is UTF-8;
/// ill-formed bytes are dropped. Immutable after construction: one object may be used by many threads.
class ACCELERATE_API WordPieceTokenizer {
 public:
  /// @param vocabulary  The tokens; the position is the id.
  /// @throws CheckpointError if it is empty, holds an empty or a repeated token, or lacks a special token of the
  /// options.
  explicit WordPieceTokenizer(std::vector<std::string> vocabulary, const WordPieceOptions& options = {});
  /// Reads the vocabulary of tokenizer.json, or else `vocab.txt`, one token a line, and what lies beside it as
  /// transformers does: tokenizer_config.json, special_tokens_map.json, added_tokens.json, the class in config.json.
  /// @throws CheckpointError as above, if a file is missing or malformed, and by name for what would give other ids:
  /// a class that cuts text in another way (BertJapaneseTokenizer, MPNetTokenizer, …), added tokens that are no special
  /// ones or are sought in cleaned text, split_special_tokens.
  static WordPieceTokenizer from_pretrained(const std::filesystem::path& folder);
  /// Writes both files, so that from_pretrained and Python's transformers can read them. Creates the folder.
  /// @throws CheckpointError if a file can't be written.
  void save_pretrained(const std::filesystem::path& folder) const;

  ~WordPieceTokenizer();
  WordPieceTokenizer(const WordPieceTokenizer&);
  WordPieceTokenizer(WordPieceTokenizer&&) noexcept;
  WordPieceTokenizer& operator=(const WordPieceTokenizer&);
  WordPieceTokenizer& operator=(WordPieceTokenizer&&) noexcept;

  /// @throws ConfigError if max_length leaves no room for the special tokens.
  Encoding encode(std::string_view text, const EncodeOptions& options = {}) const;
  Encoding encode(std::string_view text, std::string_view pair, const EncodeOptions& options = {}) const;

  /// Encodes texts, or pairs where `pairs` has as many entries, into tensors.
  /// @throws ShapeError if there are no texts, if the numbers of texts and pairs differ, or if rows differ in length
  /// without padding.
  BatchEncoding encode_batch(const std::vector<std::string>& texts, const std::vector<std::string>& pairs,
                             const EncodeOptions& options) const;
  BatchEncoding encode_batch(const std::vector<std::string>& texts, const EncodeOptions& options) const {
    return encode_batch(texts, {}, options);
  }

  /// The tokens of one text without special ones around it.
  std::vector<std::string> tokenize(std::string_view text) const;
  /// Joins pieces to words and removes the space before closing punctuation. Lower-casing and spacing are not undone.
  /// @throws ShapeError if an id is not in the vocabulary.
  std::string decode(const std::vector<int64_t>& ids, bool skip_special_tokens = true) const;

  const WordPieceOptions& options() const;
  int64_t vocab_size() const;
  std::optional<int64_t> token_to_id(std::string_view token) const;
  /// @throws ShapeError if the id is not in the vocabulary.
  const std::string& id_to_token(int64_t id) const;
  int64_t pad_token_id() const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace accelerate::models
