#include "models/generation/logits.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include <torch/torch.h>

#include "utils/raise.hpp"

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

void expect_finite(const Tensor& found, const Tensor& logits, int64_t new_tokens, const GenerationConfig& config) {
  const auto values = found.to(at::kCPU, at::kFloat).contiguous();
  const auto* begin = values.const_data_ptr<float>();
  if (std::all_of(begin, begin + values.numel(), [](float value) { return std::isfinite(value); })) return;
  if (logits.amax(-1).isfinite().all().item<bool>())
    raise<ConfigError>(
        "generate: the model's logits of new token {} are finite numbers, but not its scores with temperature {}, "
        "repetition_penalty {} and min_new_tokens {}, expected some that are. Set the first two nearer to 1, or "
        "do_sample = false for the likeliest tokens.",
        new_tokens + 1, config.temperature, config.repetition_penalty, config.min_new_tokens);
  const auto count = [](const Tensor& which) { return which.sum().item<int64_t>(); };
  raise<CheckpointError>(
      "generate: the logits of new token {} are no finite numbers ({} of {} are NaN, {} infinite), so that no token is "
      "the likeliest. The weights may be damaged, or numbers overflow in a dtype such as float16: look for NaN in the "
      "checkpoint, or compute in float32 or bfloat16.",
      new_tokens + 1, count(logits.isnan()), logits.numel(), count(logits.isinf()));
}

}  // namespace accelerate::models
