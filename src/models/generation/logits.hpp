#pragma once

#include <ATen/core/Tensor.h>

#include "accelerate/models/generate.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::models {

/// Applies the configuration to the scores of the next token. @param scores  [B, V] fp32, changed in place where
/// possible @param tokens  [B, S] int64, all so far; negative: padding
ACCELERATE_API at::Tensor process_scores(at::Tensor scores, const at::Tensor& tokens, int64_t new_tokens,
                                         const GenerationConfig& config);

// Its parts, in this order; the last three are for sampling.
ACCELERATE_API at::Tensor penalize_repetition(const at::Tensor& scores, const at::Tensor& tokens, double penalty);
ACCELERATE_API at::Tensor keep_top_k(const at::Tensor& scores, int64_t k);
ACCELERATE_API at::Tensor keep_top_p(const at::Tensor& scores, double p);

/// Without numbers there is no likeliest token, and the first one of the vocabulary is no answer.
/// @param found  [B]: the best score of each row, or another number that is NaN where one of the row's is none
/// @param logits  [B, V], of which `found` comes @param new_tokens  that there are already
/// @throws CheckpointError naming the token where `found` is not finite; ConfigError if the logits are, so that a
/// setting has made it so
void expect_finite(const at::Tensor& found, const at::Tensor& logits, int64_t new_tokens,
                   const GenerationConfig& config);

/// The prompts with -1 where the mask hides them: hidden tokens are not repeated either.
at::Tensor without_padding(const at::Tensor& input_ids, const at::Tensor& attention_mask);

/// Beam search over B rows; `step` gives the scores of the next token. Used by generate().
class BatchDecoder;
class StopStrings;
at::Tensor beam_search(BatchDecoder& decoder, const at::Tensor& input_ids, const at::Tensor& attention_mask,
                       int64_t max_length, const GenerationConfig& config, const StopStrings& stops,
                       const std::optional<at::Generator>& generator);

/// The model, its cache and the mask of a growing batch.
class BatchDecoder {
 public:
  /// @param on_layer  as GenerateOptions'
  BatchDecoder(const CausalForward& forward, const at::Tensor& attention_mask, int64_t max_length,
               std::function<void(int64_t)> on_layer = nullptr);
  /// @param tokens  [B, T]: the prompts at first, then one token a row @return logits of the last one, [B, V] fp32, the
  /// caller's own
  at::Tensor step(const at::Tensor& tokens);
  /// Row i goes on from what row `rows[i]` was.
  void reorder(const at::Tensor& rows);

 private:
  const CausalForward& forward_;
  KeyValueCache cache_;
  at::Tensor mask_;       ///< [B, most tokens], or undefined
  at::Tensor positions_;  ///< [B, 1], of the last token; undefined without a mask
  int64_t length_ = 0;
};

}  // namespace accelerate::models
