#include "models/decoder.hpp"
#include "models/refused_fields.hpp"

// OPT. Source: arXiv:2205.01068; the architecture as transformers has it.

namespace accelerate::models {

Architecture build_opt(const std::filesystem::path& path, const std::string&) {
  using enum detail::BlockPart;
  const JsonFile file(path);
  refuse_foreign_fields(file);
  const int64_t hidden_size = file.size("hidden_size", 768), positions = file.size("max_position_embeddings", 2048);
  // The model of 350 million parameters normalises behind the sums, the others before the branches.
  const bool norms_first = file.get("do_layer_norm_before", true), bias = file.get("enable_bias", true);
  detail::DecoderForm form{.family = "OPT",
                           .block_class = "DecoderLayer",
                           .model_type = "opt",
                           .vocab_size = file.size("vocab_size", 50272),
                           .hidden_size = hidden_size,
                           .layers = file.size("num_hidden_layers", 12),
                           .heads = file.divisor("num_attention_heads", 12, "hidden_size", hidden_size),
                           .inner_size = file.size("ffn_dim", 3072),
                           .word_size = file.size("word_embed_proj_dim", hidden_size),
                           .learned = {.name = "embed_positions",
                                       .count = positions,
                                       .first_row = 2,  // a relic of fairseq's padding ids
                                       .count_padding = false},
                           .most_positions = positions,
                           .norm_weights = file.get("layer_norm_elementwise_affine", true),
                           .final_norm = norms_first && !file.get("_remove_final_layer_norm", false),
                           .final_norm_before_layers = true,
                           .form = norms_first ? detail::BlockForm::norms_first : detail::BlockForm::norms_behind,
                           .attention_bias = bias,
                           .mlp_bias = bias,
                           .activation = read_activation(file, "activation_function", "relu"),
                           .residual_dropout = file.probability("dropout", 0.1),
                           .attention_dropout = file.probability("attention_dropout", 0),
                           .layer_dropout = file.probability("layerdrop", 0),
                           .block = {{attention, "self_attn"},
                                     {attention_norm, "self_attn_layer_norm"},
                                     {mlp_first, "fc1"},
                                     {mlp_second, "fc2"},
                                     {mlp_norm, "final_layer_norm"}},
                           .attention = {"k_proj", "v_proj", "q_proj", "out_proj"},
                           .words = "embed_tokens",
                           .blocks = "layers",
                           .last_norm = "final_layer_norm",
                           .model = "model",
                           .decoder = "decoder",
                           .head = "lm_head",
                           .tied = file.get("tie_word_embeddings", true)};
  return causal_decoder(std::move(form), {}, file.get("init_std", 0.02), positions);
}

}  // namespace accelerate::models
