#pragma once

/// Texts and conversations for a causal language model: read from a file, made tokens, and packed to the context.

#include <accelerate/accelerate.hpp>
#include <accelerate/models/tokenizer.hpp>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace accelerate_examples {

/// A block as long as the context. A label is the token of its place, or kIgnored where nothing is to be learned.
struct Block {
  torch::Tensor input_ids, labels;
  ACCELERATE_FIELDS(input_ids, labels)
};

constexpr int64_t kIgnored = -100;  // as in cross_entropy_loss

/// A text, or the turns of a conversation.
struct Document {
  std::string text;
  std::vector<accelerate::models::ChatMessage> messages;
};

/// A line of `.jsonl` is {"text": …} or {"messages": [{"role": …, "content": …}, …]}, the last column of `.tsv` is a
/// text, and so is each line of other files that is not empty.
inline std::vector<Document> read_documents(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw accelerate::ConfigError("--data '" + path + "' can't be opened; expected a file of texts");
  const bool json_lines = path.ends_with(".jsonl"), columns = path.ends_with(".tsv");
  std::vector<Document> documents;
  int64_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    if (!json_lines) {
      documents.push_back({columns ? line.substr(line.rfind('\t') + 1) : line, {}});
      continue;
    }
    try {
      const auto row = nlohmann::json::parse(line);
      Document document;
      if (row.contains("text")) document.text = row.at("text");
      else
        for (const auto& message : row.at("messages"))
          document.messages.push_back({message.at("role"), message.at("content")});
      documents.push_back(std::move(document));
    } catch (const nlohmann::json::exception& error) {
      throw accelerate::ConfigError(
          "'" + path + "' line " + std::to_string(number) +
          R"(: expected {"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}: )" + error.what());
    }
  }
  if (documents.empty()) throw accelerate::ConfigError("'" + path + "' has no texts");
  return documents;
}

/// Documents one behind the other, each with an end token, cut into blocks: no place is padding but at the very end.
/// All tokens of texts are learned, and in conversations what the assistant says, with the token that ends its turn.
class Packing {
 public:
  explicit Packing(accelerate::models::Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}

  void add(const Document& document) {
    if (document.messages.empty()) {
      put(tokenizer_.encode(document.text), true);
      if (const auto end = tokenizer_.eos_token_id()) put({*end}, true);
      return;
    }
    std::string done;  // each turn adds this to the text of those before
    for (size_t i = 0; i < document.messages.size(); ++i) {
      const std::vector<accelerate::models::ChatMessage> before(document.messages.begin(),
                                                                document.messages.begin() + static_cast<int64_t>(i));
      auto with = before;
      with.push_back(document.messages[i]);
      const bool answers = document.messages[i].role == "assistant" && i > 0;
      if (answers) take(tokenizer_.apply_chat_template(before, true), done, false);
      take(tokenizer_.apply_chat_template(with, false), done, answers);
    }
  }

  std::vector<Block> blocks(int64_t length) const {
    std::vector<Block> result;
    const auto count = static_cast<int64_t>(ids_.size());
    const auto ids = torch::tensor(ids_), labels = torch::tensor(labels_);
    for (int64_t begin = 0; begin < count; begin += length) {
      const int64_t size = std::min(length, count - begin);
      Block block{torch::full({length}, tokenizer_.eos_token_id().value_or(0), torch::kLong),
                  torch::full({length}, kIgnored, torch::kLong)};
      block.input_ids.narrow(0, 0, size).copy_(ids.narrow(0, begin, size));
      block.labels.narrow(0, 0, size).copy_(labels.narrow(0, begin, size));
      result.push_back(std::move(block));
    }
    return result;
  }

  int64_t tokens() const { return static_cast<int64_t>(ids_.size()); }
  int64_t largest_id() const { return *std::max_element(ids_.begin(), ids_.end()); }

 private:
  void take(const std::string& text, std::string& done, bool learned) {
    if (!text.starts_with(done))
      throw accelerate::ConfigError(
          "the chat template changes earlier turns when a later one comes, so that it is not "
          "known which tokens are the assistant's; give texts instead of messages");
    put(tokenizer_.encode(text.substr(done.size()), false), learned);
    done = text;
  }
  void put(const std::vector<int64_t>& ids, bool learned) {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    if (learned) labels_.insert(labels_.end(), ids.begin(), ids.end());
    else labels_.resize(ids_.size(), kIgnored);
  }

  accelerate::models::Tokenizer tokenizer_;
  std::vector<int64_t> ids_, labels_;
};

}  // namespace accelerate_examples
