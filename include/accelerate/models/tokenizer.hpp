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

/// A turn of a conversation.
struct ChatMessage {
  std::string role;  ///< "system", "user" or "assistant"
  std::string content;
};

/// Encoded texts, padded to T tokens: int64 CPU tensors [B, T]. As a model takes them.
struct TokenBatch {
  at::Tensor input_ids;
  at::Tensor attention_mask;  ///< 0 for padding
};

/// Byte-level BPE, the tokenizer of GPT-2, LLaMA 3, Qwen2, SmolLM and their kin: text is cut by patterns, and the bytes
/// of each piece are merged in the order of a list.
///
/// Gives the ids of the Python package `tokenizers`. Text is UTF-8; ill-formed bytes count as U+FFFD. Immutable after
/// construction: one object may be used by many threads; copies share it. Letters and digits are those of Unicode as
/// PCRE2 knows it, so characters that the newest Unicode versions added may be cut differently; normal forms are ICU's,
/// where the package's are those of Unicode 9, which knows fewer combining marks.
class ACCELERATE_API Tokenizer {
 public:
  /// Reads tokenizer.json, or vocab.json and merges.txt (of GPT-2's, GPT-NeoX's and Qwen2's classes of transformers),
  /// and what lies beside them: tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja,
  /// the class in config.json; or the vocabulary of a .gguf file.
  ///
  /// Of tokenizer.json these parts are known: model BPE; normalizers NFC, NFD, NFKC, NFKD, Replace; pre-tokenizers
  /// ByteLevel, and before or behind it Split, Digits, Punctuation; post-processors TemplateProcessing,
  /// RobertaProcessing, BertProcessing and ByteLevel; decoder ByteLevel; Sequence of them.
  /// @param path  A folder, one of these files, or a .gguf file.
  /// @throws CheckpointError if files are missing or damaged, or ask for something else: it is named.
  static Tokenizer from_pretrained(const std::filesystem::path& path);
  /// Writes the files that it was read from, as they were then, into a folder that is created where it is missing; of a
  /// .gguf file, which is read again, the tokenizer.json that its vocabulary amounts to. transformers reads either:
  /// tokenizer_config.json names the class, which config.json may have said. Files that lie there of another tokenizer
  /// are removed.
  /// @throws CheckpointError if a file can't be written or, of a .gguf file, read, and for one whose tokenizer puts a
  /// space before each text
  void save_pretrained(const std::filesystem::path& folder) const;

  /// @param add_special_tokens  Those that the post-processor puts around a text, such as LLaMA 3's <|begin_of_text|>.
  /// Ones spelt out in the text are always taken as such.
  std::vector<int64_t> encode(std::string_view text, bool add_special_tokens = true) const;
  /// Pads on the left, so that generation goes on at the end of each row. The padding is pad_token_id(), else
  /// eos_token_id(), else 0.
  /// @throws ShapeError if there are no texts.
  TokenBatch encode_batch(const std::vector<std::string>& texts, bool add_special_tokens = true) const;

  /// Bytes that are no UTF-8 become U+FFFD. @throws ShapeError if an id is not in the vocabulary.
  std::string decode(const std::vector<int64_t>& ids, bool skip_special_tokens = true) const;
  /// The bytes of one token, which may be a part of a character.
  const std::string& token_bytes(int64_t id) const;

  /// The text that a model was trained to take a conversation in, from the template that came with the tokenizer.
  /// @param add_generation_prompt  Ends with the beginning of an answer.
  /// @throws CheckpointError if there is no template or it is not of a known form (ChatML, with or without a system
  /// message by default): build the text yourself then.
  std::string apply_chat_template(const std::vector<ChatMessage>& messages, bool add_generation_prompt = true) const;

  int64_t vocab_size() const;                                        ///< added tokens included
  std::optional<int64_t> token_to_id(std::string_view token) const;  ///< as tokenizer.json spells it
  bool is_special(int64_t id) const;
  std::optional<int64_t> bos_token_id() const;
  std::optional<int64_t> eos_token_id() const;
  std::optional<int64_t> pad_token_id() const;

  struct Content;  ///< private

 private:
  explicit Tokenizer(std::shared_ptr<const Content> content) : content_(std::move(content)) {}
  std::shared_ptr<const Content> content_;
};

/// Text of tokens that come one by one: characters appear when their last byte is there, and what may become a stop
/// string when it is known that it does not.
class ACCELERATE_API StreamDecoder {
 public:
  /// @param stop_strings  The text ends before the first of them, although the tokens that generate() gives go on to
  /// the end of the token in which it ends.
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens = true,
                         std::vector<std::string> stop_strings = {})
      : tokenizer_(std::move(tokenizer)),
        skip_special_tokens_(skip_special_tokens),
        stop_strings_(std::move(stop_strings)) {}
  /// @return the characters that are complete with this token, perhaps none: an id beyond the vocabulary has no text
  std::string push(int64_t id);
  /// The rest of the text, with U+FFFD for an unfinished character.
  std::string finish();
  /// Whether a stop string has come; no text follows then.
  bool stopped() const { return stopped_; }

 private:
  std::string take(const std::string& text, bool is_last);

  Tokenizer tokenizer_;
  bool skip_special_tokens_;
  std::vector<std::string> stop_strings_;
  std::string pending_;  ///< bytes of an unfinished character
  std::string held_;     ///< text that may be the beginning of a stop string
  bool stopped_ = false;
};

}  // namespace accelerate::models
