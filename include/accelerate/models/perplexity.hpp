#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "accelerate/models/auto_model.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::models {

struct PerplexityOptions {
  /// Tokens that the model sees at a time, 2 or more.
  int64_t window = 512;
  /// Tokens from the beginning of a window to that of the next, 1 to `window`. As far as windows overlap, tokens are
  /// context only and not counted again: a smaller stride gives each token more context, and costs window / stride
  /// times as much. 0: `window`, windows side by side.
  int64_t stride = 0;
  /// Called before each window with the number of tokens that are done.
  std::function<void(int64_t done)> on_window;
};

struct Perplexity {
  double value = 0;    ///< exp(loss)
  double loss = 0;     ///< mean of -ln p(token | those before it in its window), over the scored tokens
  int64_t tokens = 0;  ///< scored ones
  int64_t windows = 0;
};

/// How well a language model foretells a text. Windows begin at 0, stride, 2 * stride … and end with the text; each
/// scores the tokens that those before it had not reached, but for the first token of the text and, where windows lie
/// side by side, of each of them: nothing is before it. The rule is that of transformers' documentation ("Perplexity of
/// fixed-length models"), with the mean over tokens instead of over windows.
///
/// Numbers are comparable for the same tokens, window and stride only. No gradients; logits in fp32, a window's at a
/// time ([window, vocabulary]).
/// @param input_ids  [T] int64, T of 2 or more; moved to `device`
/// @throws ShapeError for other ids, or a window longer than the model's positions; ConfigError for a stride that can't
/// be
ACCELERATE_API Perplexity perplexity(const AutoModelForCausalLM& model, const at::Tensor& input_ids,
                                     const PerplexityOptions& options = {}, at::Device device = at::kCPU);

}  // namespace accelerate::models
