#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

/// What lies beside a vocabulary: tokenizer_config.json, special_tokens_map.json, added_tokens.json,
/// chat_template.jinja, and of config.json the tokenizer's class.
namespace accelerate::formats {

/// A tokenizer of transformers that is made of vocab.json and merges.txt, and says by itself what no file does.
struct TokenizerClass {
  const char* name;
  const char *bos, *eos, *unk, *pad;  ///< null: none
  const char* cuts;                   ///< as find_gguf_pre_tokenizer()
  bool composes = false;              ///< NFC
};

struct TokenSetting {
  std::string content;
  bool special = false, strip_left = false, strip_right = false, normalized = false, single_word = false;
  std::optional<int64_t> id = {};  ///< that a file says it has
};

struct TokenizerSettings {
  const TokenizerClass* known_class = nullptr;  ///< null: tokenizer.json says everything
  std::string class_name;                       ///< without "Fast"; empty: no file says it
  std::map<std::string, std::string> named;     ///< "bos_token" …: the token's text
  std::vector<TokenSetting> tokens;             ///< in the order in which those that are new get ids
  bool add_bos = false, add_eos = false;        ///< where no tokenizer.json says what is put around a text
  bool add_prefix_space = false;
  bool split_special_tokens = false;  ///< special tokens that are spelt out in a text are text
  std::string chat_template;
};

/// As transformers reads them: the files' order, what wins and what a class fills in. @throws CheckpointError for
/// damaged files, and for what is not supported, by name
TokenizerSettings read_tokenizer_settings(const std::filesystem::path& folder);

/// Where a token goes.
struct PlacedToken {
  const TokenSetting* token;
  int64_t id;
};

/// Ids for the tokens: that of the vocabulary where it has the text, else the next one.
/// @param id_of  in the vocabulary and among tokens that tokenizer.json adds @param next  the first free id
/// @throws CheckpointError, where a file says another id: models were trained with that one, and transformers gives
/// the next one
std::vector<PlacedToken> place_tokens(const TokenizerSettings& settings,
                                      const std::function<std::optional<int64_t>(const std::string&)>& id_of,
                                      int64_t next, const std::string& source);

}  // namespace accelerate::formats
