#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

/// The files beside a vocabulary: tokenizer_config.json, special_tokens_map.json, added_tokens.json,
/// chat_template.jinja, and of config.json the tokenizer's class.
namespace accelerate::formats {

/// A tokenizer of transformers that is made of vocab.json and merges.txt, and says by itself what no file does. Where
/// it is made of a tokenizer.json it takes vocabulary, merges and what is put around a text of it, and adds tokens
/// itself.
struct TokenizerClass {
  const char* name;
  const char *bos, *eos, *unk, *pad;  ///< null: none
  const char* cuts;                   ///< as find_gguf_pre_tokenizer()
  bool composes = false;              ///< NFC
  enum class Around { of_tokenizer_json, bos_and_eos, cls_and_sep } around = Around::of_tokenizer_json;
  bool plain_specials = false;  ///< white space beside special tokens stays, whatever the files say
  const char *cls = nullptr, *sep = nullptr, *mask = nullptr;
};

struct TokenSetting {
  std::string content;
  bool special = false, strip_left = false, strip_right = false, single_word = false;
  std::optional<bool> normalized = {};  ///< nothing: special ones are not, others are
  std::optional<int64_t> id = {};       ///< that a file says it has

  bool is_normalized() const { return normalized.value_or(!special); }
  bool operator==(const TokenSetting&) const = default;
};

struct TokenizerSettings {
  const TokenizerClass* known_class = nullptr;  ///< null: tokenizer.json says everything
  std::string class_name;                       ///< without "Fast"; empty: no file says it
  std::map<std::string, std::string> named;     ///< "bos_token" …: the token's text
  std::vector<TokenSetting> tokens;             ///< in the order in which they are added; some more than once
  bool add_bos = false, add_eos = false;        ///< where no tokenizer.json says what is put around a text
  bool add_prefix_space = false;
  bool split_special_tokens = false;  ///< special tokens that are spelt out in a text are text
  std::string chat_template;
};

enum class TokenizerKind { byte_level, word_piece };

/// As transformers reads them: the files' order, what wins and what a class fills in.
/// @param tokenizer_json  what that file has; null where there is none @param kind  what reads the vocabulary
/// @throws CheckpointError for damaged files, and for what is not supported, by name: for word_piece each class that
/// does not cut text as BERT's does
TokenizerSettings read_tokenizer_settings(const std::filesystem::path& folder,
                                          const nlohmann::json& tokenizer_json = nullptr,
                                          TokenizerKind kind = TokenizerKind::byte_level);

struct PlacedToken {
  TokenSetting token;
  int64_t id;
  bool once_normalized = false;  ///< one of the times that it was added
};

/// Tokens with their ids, each once, those of tokenizer.json first: the vocabulary's id where it has the text, else the
/// next one. A token that is added again has the flags of the last time, and once special it stays so.
/// @param of_json  that tokenizer.json adds, with the ids that it gives them @param id_of  in the vocabulary @param
/// size  of the vocabulary
/// @throws CheckpointError, where a file says another id: models were trained with that one, and transformers gives
/// the next one
std::vector<PlacedToken> place_tokens(const TokenizerSettings& settings, std::vector<PlacedToken> of_json,
                                      const std::function<std::optional<int64_t>(const std::string&)>& id_of,
                                      int64_t size, const std::string& source);

}  // namespace accelerate::formats
