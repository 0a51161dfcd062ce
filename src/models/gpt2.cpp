#include "accelerate/models/gpt2.hpp"

#include <cmath>

#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/check_field.hpp"
#include "models/decoder.hpp"
#include "models/gpt2_config.hpp"
#include "models/layers.hpp"
#include "models/rotary.hpp"
#include "models/token_inputs.hpp"

// Registered names are Hugging Face's; they make the parameter names of the files.

namespace accelerate::models {

using torch::Tensor;

namespace {

/// Its blocks; embeddings and head are below, in the public classes.
detail::SharedForm form_of(const GPT2Config& config) {
  using enum detail::BlockPart;
  const auto head_size = static_cast<double>(config.n_embd / config.n_head);
  return std::make_shared<const detail::DecoderForm>(
      detail::DecoderForm{.family = "GPT2",
                          .hidden_size = config.n_embd,
                          .layers = config.n_layer,
                          .heads = config.n_head,
                          .inner_size = config.inner_size(),
                          .norm_epsilon = config.layer_norm_epsilon,
                          .projections = detail::Projections::one_by_one,
                          .transposed = true,
                          .score_scale = config.scale_attn_weights ? 1 / std::sqrt(head_size) : 1.0,
                          .divides_scores_by_layer = config.scale_attn_by_inverse_layer_idx,
                          .activation = find_activation(config.activation_function).value(),
                          .residual_dropout = config.resid_pdrop,
                          .attention_dropout = config.attn_pdrop,
                          .block = {{attention_norm, "ln_1"}, {attention, "attn"}, {mlp_norm, "ln_2"}, {mlp, "mlp"}},
                          .attention = {"c_attn", "c_proj"},
                          .mlp = {"c_fc", "c_proj"}});
}

}  // namespace

void initialize(const std::string& name, const Tensor& parameter, const GPT2Config& config) {
  const torch::NoGradGuard no_grad;
  if (name.ends_with("bias")) {
    parameter.zero_();
  } else if (name.find("ln_") != std::string::npos) {
    parameter.fill_(1);
  } else {
    parameter.normal_(0, name.ends_with("c_proj.weight")
                             ? config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.n_layer))
                             : config.initializer_range);
  }
}

GPT2ModelImpl::GPT2ModelImpl(const GPT2Config& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void GPT2ModelImpl::reset() {
  wte_ = register_module("wte", detail::make_embedding(config_.vocab_size, config_.n_embd));
  wpe_ = register_module("wpe", detail::make_embedding(config_.n_positions, config_.n_embd));
  h_ = register_module("h", detail::make_blocks(form_of(config_)));
  ln_f_ = register_module("ln_f", detail::make_layer_norm(config_.n_embd, config_.layer_norm_epsilon));
}

Tensor GPT2ModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                              KeyValueCache* cache) {
  const int64_t past = detail::past_tokens(cache);
  check_inputs({"GPT2Model", input_ids, attention_mask, position_ids, past, config_.n_positions});
  const auto positions =
      position_ids.defined() ? position_ids : detail::positions_from(past, input_ids.size(1), input_ids.device());
  Tensor hidden = torch::dropout(wte_(input_ids) + wpe_(positions), config_.embd_pdrop, is_training());
  const detail::DecoderContext context{.rotary = {}, .mask = causal_mask(attention_mask, hidden, past), .cache = cache};
  return ln_f_(detail::run_blocks(h_, std::move(hidden), context));
}

GPT2LMHeadModelImpl::GPT2LMHeadModelImpl(const GPT2Config& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void GPT2LMHeadModelImpl::reset() {
  transformer_ = register_module("transformer", GPT2Model(config_, Weights::uninitialized));
  if (!config_.tie_word_embeddings)
    lm_head_ = register_module(
        "lm_head", std::make_shared<detail::Dense>(config_.n_embd, config_.vocab_size, /*with_bias=*/false));
}

Tensor GPT2LMHeadModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                                    KeyValueCache* cache, int64_t logits_to_keep) {
  const auto hidden =
      detail::last_tokens(transformer_->forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
  return lm_head_ ? lm_head_->forward(hidden) : detail::project(hidden, transformer_->wte()->weight);
}

}  // namespace accelerate::models
