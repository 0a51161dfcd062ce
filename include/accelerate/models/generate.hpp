#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "accelerate/models/key_value_cache.hpp"
#include "accelerate/models/tokenizer.hpp"
#include "accelerate/utils/export.hpp"

/// Text generation with any causal language model. Shapes: B batch, T tokens of the prompts, N new tokens, V
/// vocabulary. Source: transformers' generate, whose ids these are.
namespace accelerate::models {

/// When beam search ends.
enum class EarlyStopping {
  no,     ///< as soon as the best running beam seems unable to get better than the finished ones
  yes,    ///< as soon as there are num_beams finished ones
  never,  ///< when no running beam can get better than the finished ones
};

/// The fields of generation_config.json that are supported; names and defaults are transformers', but that there is no
/// limit of 20 tokens by default: one must be given.
struct ACCELERATE_API GenerationConfig {
  std::optional<int64_t> max_new_tokens;  ///< N at most
  std::optional<int64_t> max_length;      ///< T + N at most; max_new_tokens wins
  int64_t min_new_tokens = 0;             ///< no end token before so many
  bool do_sample = false;                 ///< draw tokens; else take the likeliest
  int64_t num_beams = 1;                  ///< more: beam search
  double temperature = 1;                 ///< sampling: logits are divided by it
  int64_t top_k = 50;                     ///< sampling: only from so many of the likeliest; 0: from all
  double top_p = 1;                       ///< sampling: only from the likeliest that have this probability together
  double repetition_penalty = 1;          ///< above 1: tokens that were there, in the prompt too, get less likely
  double length_penalty = 1;  ///< beams: scores are divided by length to this power; above 0 favours long ones
  EarlyStopping early_stopping = EarlyStopping::no;
  std::vector<int64_t> eos_token_id;    ///< any of them ends a row
  std::optional<int64_t> pad_token_id;  ///< behind the end of rows; the first end token where it is not given, else 0
  /// The token that completes one of them ends a row (or a beam), also where it begins in the prompt or the token goes
  /// on behind it. It stays in the result: StreamDecoder cuts the text. Needs GenerateOptions::tokenizer.
  std::vector<std::string> stop_strings;

  /// @throws ConfigError naming the first field that is out of range.
  void validate() const;
  /// Reads generation_config.json of a folder, or the end tokens of config.json where there is none, or those of a
  /// .gguf file.
  /// @throws CheckpointError if a file is malformed, or asks for a way to generate that is not supported.
  static GenerationConfig from_pretrained(const std::filesystem::path& folder);
};

struct GenerateOptions {
  at::Tensor attention_mask;  ///< [B, T], 0 for padding, which must be on the left; no padding where it is undefined
  /// For sampling; LibTorch's default one where it is not given. The same seed gives the same tokens.
  std::optional<at::Generator> generator;
  /// Called with each step's new tokens, int64 [B] (padding for rows that have ended). Returning false ends generation.
  /// Not with beams.
  std::function<bool(const at::Tensor& tokens)> on_tokens;
  /// Called while the prompts are read, which can take long, when each attention layer begins: 0, 1, 2, … Only where
  /// the model uses the cache that it is given, as those of this library do.
  std::function<void(int64_t layer)> on_layer;
  std::optional<Tokenizer> tokenizer;    ///< the model's, for stop_strings
  std::optional<int64_t> max_positions;  ///< that the model has; unset: what its max_positions() says, if it has that
};

/// The model's forward: see AutoModelForCausalLM::forward.
using CausalForward =
    std::function<at::Tensor(const at::Tensor& input_ids, const at::Tensor& attention_mask,
                             const at::Tensor& position_ids, KeyValueCache* cache, int64_t logits_to_keep)>;

/// Continues prompts. Without gradients; the model should be in evaluation mode.
/// @param input_ids  [B, T] int64, T at least 1
/// @return [B, T + N] int64: prompts, new tokens with the end token, padding
/// @throws ConfigError for fields out of range, no limit on tokens, stop strings without a tokenizer, or more new
/// tokens than the model has positions for; ShapeError if shapes differ, or the prompts alone have too many. All of
/// these before the model runs.
ACCELERATE_API at::Tensor generate(const CausalForward& forward, const at::Tensor& input_ids,
                                   const GenerationConfig& config, const GenerateOptions& options = {});

/// The same for a model: any class with such a forward, a module holder or a pointer to one.
template <class Model>
requires(
    !std::is_convertible_v<const Model&, CausalForward> ||
    requires(Model & m, const at::Tensor& t) { m.forward(t, t, t, nullptr, int64_t{1}); } ||
    requires(Model & m) { m->max_positions(); }) at::Tensor
    generate(Model& model, const at::Tensor& input_ids, const GenerationConfig& config,
             const GenerateOptions& options = {}) {
  const CausalForward forward = [&model](const at::Tensor& ids, const at::Tensor& mask, const at::Tensor& positions,
                                         KeyValueCache* cache, int64_t logits_to_keep) -> at::Tensor {
    if constexpr (requires { model.forward(ids, mask, positions, cache, logits_to_keep); }) {
      return model.forward(ids, mask, positions, cache, logits_to_keep);
    } else {
      return model->forward(ids, mask, positions, cache, logits_to_keep);
    }
  };
  GenerateOptions known = options;
  if (!known.max_positions) {
    if constexpr (requires { model.max_positions(); }) known.max_positions = model.max_positions();
    else if constexpr (requires { model->max_positions(); }) known.max_positions = model->max_positions();
  }
  return generate(forward, input_ids, config, known);
}

}  // namespace accelerate::models
