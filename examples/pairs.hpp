#pragma once

/// Pairs of verses for the examples: do both say the same?

#include <accelerate/accelerate.hpp>
#include <accelerate/models/wordpiece.hpp>

#include <algorithm>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace accelerate_examples {

struct Pair {
  int64_t label;
  std::string first, second;
};

struct PairBatch {
  torch::Tensor input_ids, attention_mask, token_type_ids, labels;
  ACCELERATE_FIELDS(input_ids, attention_mask, token_type_ids, labels)
};

struct PairSets {
  std::vector<Pair> train, eval;
};

/// Rows of "label <tab> sentence <tab> sentence" behind a header, in a random order that is the same on every rank.
inline PairSets read_pairs(const std::string& path, int64_t train_size, int64_t eval_size) {
  std::ifstream in(path);
  if (!in) throw accelerate::ConfigError("--pairs '" + path + "' can't be opened; scripts/fetch_data.sh makes it");
  std::vector<Pair> pairs;
  std::string line;
  std::getline(in, line);
  while (std::getline(in, line)) {
    const size_t tab = line.find('\t'), second = line.find('\t', tab + 1);
    if (second == std::string::npos)
      throw accelerate::ConfigError("'" + path + "' line " + std::to_string(pairs.size() + 2) +
                                    " has fewer than 3 tab-separated fields");
    pairs.push_back({std::stoll(line.substr(0, tab)), line.substr(tab + 1, second - tab - 1), line.substr(second + 1)});
  }
  if (train_size + eval_size > static_cast<int64_t>(pairs.size()))
    throw accelerate::ConfigError("--train_size + --eval_size exceed the " + std::to_string(pairs.size()) + " pairs");
  std::shuffle(pairs.begin(), pairs.end(), std::mt19937(42));
  const auto middle = pairs.begin() + train_size;
  return {{pairs.begin(), middle}, {middle, middle + eval_size}};
}

/// Makes batches of token numbers, whose rows are as long as their longest pair. `tokenizer` has to live as long.
inline auto collate_by(const accelerate::models::WordPieceTokenizer& tokenizer) {
  return [&tokenizer](const std::vector<Pair>& rows) {
    std::vector<std::string> first, second;
    std::vector<int64_t> labels;
    for (const auto& row : rows) first.push_back(row.first), second.push_back(row.second), labels.push_back(row.label);
    const auto tokens = tokenizer.encode_batch(
        first, second, {.truncation = true, .max_length = 128, .padding = accelerate::models::Padding::longest});
    return PairBatch{tokens.input_ids, tokens.attention_mask, tokens.token_type_ids, torch::tensor(labels)};
  };
}

/// The score of labels 0 and 1, batch by batch.
class PairScore {
 public:
  void add(const torch::Tensor& predicted, const torch::Tensor& labels) {
    seen_ += labels.size(0);
    correct_ += (predicted == labels).sum().item<int64_t>();
    both_ += (predicted * labels).sum().item<int64_t>();
    positive_ += (predicted + labels).sum().item<int64_t>();
  }
  int64_t seen() const { return seen_; }
  double accuracy() const { return static_cast<double>(correct_) / static_cast<double>(seen_); }
  double f1() const { return 2.0 * static_cast<double>(both_) / static_cast<double>(std::max<int64_t>(positive_, 1)); }

 private:
  int64_t seen_ = 0, correct_ = 0, both_ = 0, positive_ = 0;
};

}  // namespace accelerate_examples
