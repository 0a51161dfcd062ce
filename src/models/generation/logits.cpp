#include "models/generation/logits.hpp"

#include <limits>

#include <torch/torch.h>

namespace accelerate::models {

using at::Tensor;

Tensor penalize_repetition(const Tensor& scores, const Tensor& tokens, double penalty) {
  const int64_t vocabulary = scores.size(1);
  const auto wider = at::constant_pad_nd(scores, {0, 1});  // padding is counted in a column of its own
  const auto columns = tokens.masked_fill(tokens < 0, vocabulary), seen = wider.gather(1, columns);
  return wider.scatter(1, columns, torch::where(seen < 0, seen * penalty, seen / penalty)).narrow(1, 0, vocabulary);
}

Tensor keep_top_k(const Tensor& scores, int64_t k) {
  const auto least = std::get<0>(scores.topk(std::min(k, scores.size(1)), 1)).slice(1, -1);
  return scores.masked_fill(scores < least, -std::numeric_limits<float>::infinity());
}

Tensor keep_top_p(const Tensor& scores, double p) {
  const auto [sorted, order] = scores.sort(/*dim=*/-1, /*descending=*/false);
  auto remove = sorted.softmax(-1).cumsum(-1) <= 1 - p;
  remove.slice(1, -1).fill_(false);  // the likeliest always stays
  return scores.masked_fill(remove.scatter(1, order, remove), -std::numeric_limits<float>::infinity());
}

Tensor process_scores(Tensor scores, const Tensor& tokens, int64_t new_tokens, const GenerationConfig& config) {
  if (config.repetition_penalty != 1) scores = penalize_repetition(scores, tokens, config.repetition_penalty);
  if (new_tokens < config.min_new_tokens)
    for (const auto id : config.eos_token_id)
      if (id < scores.size(1)) scores.select(1, id).fill_(-std::numeric_limits<float>::infinity());
  if (!config.do_sample) return scores;
  if (config.temperature != 1) scores = scores / config.temperature;
  if (config.top_k > 0) scores = keep_top_k(scores, config.top_k);
  if (config.top_p < 1) scores = keep_top_p(scores, config.top_p);
  return scores;
}

}  // namespace accelerate::models
