#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include <ATen/core/Tensor.h>

#include "accelerate/models/generate.hpp"

namespace accelerate::models {

/// Finds stop strings at the end of rows of tokens, by the bytes of these.
class StopStrings {
 public:
  /// @throws ConfigError if there are stop strings, but no tokenizer.
  StopStrings(const GenerationConfig& config, const std::optional<Tokenizer>& tokenizer);

  bool empty() const { return strings_.empty(); }
  /// Whether a stop string ends within the last token. Ids that the tokenizer does not know (padding) are where the
  /// text begins.
  bool end(std::span<const int64_t> tokens) const;
  /// The same for each row. @param tokens  [B, S] int64 @return [B] bool, on the same device
  at::Tensor end(const at::Tensor& tokens) const;

 private:
  std::vector<std::string> strings_;
  std::optional<Tokenizer> tokenizer_;
  size_t longest_ = 0;
};

}  // namespace accelerate::models
