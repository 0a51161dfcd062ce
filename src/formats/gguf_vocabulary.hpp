#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "accelerate/formats/gguf.hpp"

/// Vocabularies of byte-level BPE, as tokenizer.json and as metadata of a GGUF file.
namespace accelerate::formats {

/// How text is cut before it is merged: in GGUF files a name stands for it.
struct GgufPreTokenizer {
  std::string name;                          ///< tokenizer.ggml.pre
  nlohmann::json pre_tokenizer, normalizer;  ///< of tokenizer.json
  bool whole_words = false;                  ///< a piece that is a token is not merged (ignore_merges)
  bool adds_bos = false;                     ///< where tokenizer.ggml.add_bos_token is missing
};

/// Null for a name that is not known.
const GgufPreTokenizer* find_gguf_pre_tokenizer(const std::string& name);
/// For messages, with commas.
std::string gguf_pre_tokenizer_names();

/// Kinds of tokens, tokenizer.ggml.token_type.
enum class GgufTokenKind : int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

/// The vocabulary of a Hugging Face folder, of gguf_entry(): from tokenizer.json, with the special tokens and the chat
/// template of the files beside it. @param config  the folder's config.json, for ids that the tokenizer does not name
/// @param rows  of the embeddings: each gets a token. @param notes  gets a sentence for each thing that has no place
/// @throws ConfigError for vocabularies of another kind, and for text that is cut in a way that llama.cpp has no name
/// for; CheckpointError for damaged files and ids that there are no rows for
std::vector<std::string> gguf_vocabulary(const std::filesystem::path& folder, const nlohmann::json& config,
                                         int64_t rows, std::vector<std::string>& notes);

/// The reverse, as texts by the names of their files: tokenizer.json, tokenizer_config.json and generation_config.json,
/// and chat_template.jinja where there is one. Empty for a vocabulary of another kind. @param file  for messages
/// @throws CheckpointError for a damaged one
std::map<std::string, std::string> tokenizer_files(const GgufMetadata& metadata, const std::string& file);

}  // namespace accelerate::formats
