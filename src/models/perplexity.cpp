#include "accelerate/models/perplexity.hpp"

#include <ATen/ops/cross_entropy_loss.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "utils/raise.hpp"

namespace accelerate::models {

Perplexity perplexity(const AutoModelForCausalLM& model, const at::Tensor& input_ids, const PerplexityOptions& options,
                      at::Device device) {
  const int64_t window = options.window, stride = options.stride == 0 ? window : options.stride;
  if (input_ids.dim() != 1 || input_ids.scalar_type() != at::kLong || input_ids.numel() < 2)
    raise<ShapeError>("perplexity: found ids of shape {}, {}, expected one row of 2 or more int64", input_ids.sizes(),
                      c10::toString(input_ids.scalar_type()));
  if (window < 2 || stride < 1 || stride > window)
    raise<ConfigError>(
        "perplexity: found window = {} and stride = {}, expected a window of 2 or more and a stride of "
        "1 to that (0: the window)",
        window, options.stride);
  const int64_t all = input_ids.numel();
  if (const auto positions = model.max_positions(); positions && std::min(window, all) > *positions)
    raise<ShapeError>("perplexity: found a window of {} tokens, expected at most the model's {} positions",
                      std::min(window, all), *positions);
  const c10::NoGradGuard no_gradients;
  const auto ids = input_ids.to(device);
  Perplexity result;
  double sum = 0;
  for (int64_t begin = 0, scored = 0; scored < all; begin += stride) {
    const int64_t end = std::min(begin + window, all);
    // Nothing predicts the first token of a window.
    const int64_t first = std::max(scored, begin + 1);
    if (options.on_window) options.on_window(scored);
    scored = end;
    if (first >= end) continue;  // a single token is left
    const auto logits = model.forward(ids.slice(0, begin, end).unsqueeze(0), {}, {}, nullptr, end - first + 1)[0];
    constexpr int64_t kRows = 64;  // in fp32 at a time
    for (int64_t token = first; token < end; token += kRows) {
      const int64_t until = std::min(token + kRows, end);
      sum += at::cross_entropy_loss(logits.slice(0, token - first, until - first).to(at::kFloat),
                                    ids.slice(0, token, until), {}, at::Reduction::Sum)
                 .item<double>();
    }
    result.tokens += end - first;
    ++result.windows;
  }
  result.loss = sum / static_cast<double>(result.tokens);
  result.value = std::exp(result.loss);
  return result;
}

}  // namespace accelerate::models
