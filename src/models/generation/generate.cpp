#include "accelerate/models/generate.hpp"

#include <torch/torch.h>

#include "memory/huge_pages.hpp"
#include "models/generation/logits.hpp"
#include "models/generation/stop_strings.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

using at::Tensor;

void check(const Tensor& input_ids, const Tensor& attention_mask) {
  if (input_ids.dim() != 2 || input_ids.scalar_type() != at::kLong || input_ids.numel() == 0)
    raise<ShapeError>(
        "generate: input_ids has shape {} and dtype {}, expected [B, T] of int64 with at least one token.",
        input_ids.sizes(), c10::toString(input_ids.scalar_type()));
  if (!attention_mask.defined()) return;
  if (attention_mask.sizes() != input_ids.sizes())
    raise<ShapeError>("generate: attention_mask has shape {}, but input_ids {}. Both are [B, T].",
                      attention_mask.sizes(), input_ids.sizes());
  if (!attention_mask.select(1, -1).to(at::kBool).all().item<bool>())
    throw ShapeError(
        "generate: the last token of a row is padding, expected padding on the left only. Tokenizer::encode_batch pads "
        "so.");
}

/// @param max_length  of prompts and new tokens together; the last one is never read
void check_context(int64_t prompt, int64_t max_length, int64_t positions) {
  if (prompt > positions)
    raise<ShapeError>(
        "generate: the prompts have {} tokens, and the model has positions for {}. Shorten them, or use a model with a "
        "longer context.",
        prompt, positions);
  if (max_length - 1 > positions)
    raise<ConfigError>(
        "generate: the prompts have {} tokens and up to {} new ones are asked for, but the model has positions for {}: "
        "there is room for {}. Lower max_new_tokens or max_length, or shorten the prompts.",
        prompt, max_length - prompt, positions, positions - prompt + 1);
}

Tensor is_any_of(const Tensor& tokens, const std::vector<int64_t>& ids) {
  auto result = torch::zeros_like(tokens, at::kBool);
  for (const auto id : ids) result |= tokens == id;
  return result;
}

}  // namespace

Tensor without_padding(const Tensor& input_ids, const Tensor& attention_mask) {
  return attention_mask.defined() ? input_ids.masked_fill(attention_mask.to(at::kBool).logical_not(), -1) : input_ids;
}

BatchDecoder::BatchDecoder(const CausalForward& forward, const Tensor& attention_mask, int64_t max_length,
                           std::function<void(int64_t)> on_layer)
    : forward_(forward) {
  cache_.on_update(std::move(on_layer));
  if (!attention_mask.defined()) return;
  mask_ = torch::ones({attention_mask.size(0), max_length}, attention_mask.options().dtype(at::kLong));
  mask_.narrow(1, 0, attention_mask.size(1)).copy_(attention_mask.to(at::kBool));
}

Tensor BatchDecoder::step(const Tensor& tokens) {
  length_ += tokens.size(1);
  Tensor mask, positions;
  if (mask_.defined()) {
    mask = mask_.narrow(1, 0, length_);
    // Padding has positions, too, which nobody sees.
    positions = positions_.defined() ? positions_ + 1 : (mask.cumsum(1) - 1).clamp_min(0);
    positions_ = positions.slice(1, -1);
  }
  Tensor logits;
  try {
    logits = forward_(tokens, mask, positions, &cache_, 1);
  } catch (const c10::IndexError& error) {
    raise<ConfigError>(
        "generate: the model has no embedding for a token or a position ({}); the tokens are from {} to {}. The "
        "tokenizer, pad_token_id or eos_token_id may be another model's.",
        error.what_without_backtrace(), tokens.min().item<int64_t>(), tokens.max().item<int64_t>());
  }
  cache_.on_update(nullptr);  // the prompts are read
  constexpr int64_t kManyTokens = 64;
  const bool prompts = length_ == tokens.size(1);
  if (prompts && tokens.numel() >= kManyTokens) give_freed_memory_back();  // of activations; later ones are small
  return logits.select(1, -1).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

void BatchDecoder::reorder(const Tensor& rows) {
  cache_.reorder(rows);
  if (!mask_.defined()) return;
  mask_ = mask_.index_select(0, rows);
  positions_ = positions_.index_select(0, rows);
}

Tensor generate(const CausalForward& forward, const Tensor& input_ids, const GenerationConfig& config,
                const GenerateOptions& options) {
  config.validate();
  check(input_ids, options.attention_mask);
  const int64_t rows = input_ids.size(0), prompt = input_ids.size(1);
  if (!config.max_new_tokens && !config.max_length)
    throw ConfigError("generate: neither max_new_tokens nor max_length is given. Say how long the result may get.");
  const int64_t max_length = config.max_new_tokens ? prompt + *config.max_new_tokens : *config.max_length;
  if (max_length <= prompt)
    raise<ConfigError>(
        "generate: the prompts have {} tokens and max_length is {}, which leaves no room for new ones. Raise it, or "
        "set max_new_tokens.",
        prompt, max_length);
  if (options.max_positions) check_context(prompt, max_length, *options.max_positions);
  const torch::NoGradGuard no_grad;
  const StopStrings stops(config, options.tokenizer);
  BatchDecoder decoder(forward, options.attention_mask, max_length, options.on_layer);
  if (config.num_beams > 1) {
    if (options.on_tokens)
      raise<ConfigError>(
          "generate: on_tokens is set, but with num_beams = {} tokens are not final before the end. Set num_beams = 1.",
          config.num_beams);
    return beam_search(decoder, input_ids, options.attention_mask, max_length, config, stops, options.generator);
  }
  const int64_t padding = config.pad_token_id.value_or(config.eos_token_id.empty() ? 0 : config.eos_token_id.front());
  auto tokens = torch::empty({rows, max_length}, input_ids.options());
  tokens.narrow(1, 0, prompt).copy_(without_padding(input_ids, options.attention_mask));
  auto ended = torch::zeros({rows}, input_ids.options().dtype(at::kBool));
  const bool can_end = !config.eos_token_id.empty() || !stops.empty();
  auto next = input_ids;
  int64_t length = prompt;
  while (length < max_length) {
    const auto logits = decoder.step(next);
    auto scores = process_scores(logits, tokens.narrow(1, 0, length), length - prompt, config);
    if (config.do_sample) scores = scores.softmax(-1);                       // of which all are NaN where one can't be
    const auto likeliest = config.do_sample ? Tensor() : scores.argmax(-1);  // NaN, if there is one
    const auto best = config.do_sample ? scores.select(1, 0) : scores.gather(1, likeliest.unsqueeze(1)).squeeze(1);
    expect_finite(can_end ? best.masked_fill(ended, 0) : best, logits, length - prompt, config);
    auto chosen =
        config.do_sample ? at::multinomial(scores, 1, /*replacement=*/false, options.generator).squeeze(1) : likeliest;
    if (can_end) chosen = chosen.masked_fill(ended, padding);
    if (!config.eos_token_id.empty()) ended |= is_any_of(chosen, config.eos_token_id);
    tokens.select(1, length++).copy_(chosen);
    if (!stops.empty()) ended |= stops.end(tokens.narrow(1, 0, length));
    if (options.on_tokens && !options.on_tokens(chosen)) break;
    if (can_end && ended.all().item<bool>()) break;
    next = chosen.unsqueeze(1);
  }
  tokens.narrow(1, 0, prompt).copy_(input_ids);
  return tokens.narrow(1, 0, length).clone();
}

}  // namespace accelerate::models
