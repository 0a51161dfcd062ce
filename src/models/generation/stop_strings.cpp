#include "models/generation/stop_strings.hpp"
#include "utils/raise.hpp"

#include <algorithm>

#include <ATen/ops/empty.h>

namespace accelerate::models {

StopStrings::StopStrings(const GenerationConfig& config, const std::optional<Tokenizer>& tokenizer)
    : strings_(config.stop_strings), tokenizer_(tokenizer) {
  if (!strings_.empty() && !tokenizer_)
    raise<ConfigError>(
        "generate: stop_strings has {} of them (the first one is '{}'), but there is no tokenizer to find them with. "
        "Set GenerateOptions::tokenizer to the model's.",
        strings_.size(), strings_.front());
  for (const auto& text : strings_) longest_ = std::max(longest_, text.size());
}

bool StopStrings::end(std::span<const int64_t> tokens) const {
  const auto known = [&](int64_t id) { return id >= 0 && id < tokenizer_->vocab_size(); };
  if (tokens.empty() || !known(tokens.back())) return false;
  std::string text = tokenizer_->token_bytes(tokens.back());
  const size_t last_bytes = text.size();
  for (size_t i = tokens.size() - 1; i-- > 0 && text.size() < last_bytes + longest_ && known(tokens[i]);)
    text.insert(0, tokenizer_->token_bytes(tokens[i]));
  const size_t before = text.size() - last_bytes;
  return std::any_of(strings_.begin(), strings_.end(), [&](const auto& stop) {
    return text.find(stop, before + 1 < stop.size() ? 0 : before + 1 - stop.size()) != std::string::npos;
  });
}

at::Tensor StopStrings::end(const at::Tensor& tokens) const {
  // A token has a byte at least, so more of them are never needed.
  const auto rows =
      tokens.slice(1, std::max<int64_t>(0, tokens.size(1) - static_cast<int64_t>(longest_) - 1)).cpu().contiguous();
  const auto count = static_cast<size_t>(rows.size(1));
  auto result = at::empty({rows.size(0)}, at::TensorOptions(at::kBool));
  for (int64_t row = 0; row < rows.size(0); ++row)
    result.mutable_data_ptr<bool>()[row] = end(std::span(rows.const_data_ptr<int64_t>() + row * rows.size(1), count));
  return result.to(tokens.device());
}

}  // namespace accelerate::models
