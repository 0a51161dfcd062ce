#include "models/check_field.hpp"
#include "models/decoder.hpp"
#include "models/refused_fields.hpp"
#include "models/rope_config.hpp"
#include "utils/raise.hpp"

// GPT-NeoX and Pythia. Source: arXiv:2204.06745; the architecture as transformers has it.

namespace accelerate::models {
namespace {

/// How much of a head turns, and by what.
struct GPTNeoXRope {
  GPTNeoXRope(const JsonFile& file, int64_t head_size)
      : options{.base = file.get("rotary_emb_base", 10000.0),
                .max_positions = file.size("max_position_embeddings", 2048)} {
    double share = file.get("rotary_pct", 0.25);
    read_rope(file, options.max_positions, scaling, options.base, share);
    scaling.partial_rotary_factor = share;
    // transformers believes the field here, and nowhere else in this architecture.
    const int64_t size = file.size("head_dim", head_size);
    const auto check_share = [&](bool good) {
      if (!good)
        file.fail("rotary_pct", share, fmt::format("a share of the head's {} dimensions that pairs fit in", head_size));
    };
    const double turned = static_cast<double>(size) * share;
    check_share(turned >= 0 && turned < static_cast<double>(int64_t{1} << 41));  // which an int64_t can hold
    // "proportional" turns all dimensions, most of them by nothing.
    options.dimensions = scaling.type == "proportional" ? size : static_cast<int64_t>(turned);
    check_share(options.dimensions + options.dimensions % 2 <= head_size);
  }
  void validate() const { scaling.validate(options.dimensions); }

  detail::RotaryOptions options;
  LlamaRopeScaling scaling;
};

}  // namespace

Architecture build_gpt_neox(const std::filesystem::path& path, const std::string&) {
  using enum detail::BlockPart;
  const JsonFile file(path);
  refuse_foreign_fields(file);
  const int64_t hidden_size = file.size("hidden_size", 6144);
  const double hidden_dropout = file.probability("hidden_dropout", 0);
  detail::DecoderForm form{.family = "GPTNeoX",
                           .block_class = "Layer",
                           .model_type = "gpt_neox",
                           .vocab_size = file.size("vocab_size", 50432),
                           .hidden_size = hidden_size,
                           .layers = file.size("num_hidden_layers", 44),
                           .heads = file.divisor("num_attention_heads", 64, "hidden_size", hidden_size),
                           .inner_size = file.size("intermediate_size", 24576),
                           .norm_epsilon = file.get("layer_norm_eps", 1e-5),
                           .form = file.get("use_parallel_residual", true) ? detail::BlockForm::side_by_side
                                                                           : detail::BlockForm::norms_first,
                           .projections = detail::Projections::per_head,
                           .attention_bias = file.get("attention_bias", true),
                           .activation = read_activation(file, "hidden_act", "gelu"),
                           .embedding_dropout = hidden_dropout,
                           .residual_dropout = hidden_dropout,
                           .attention_dropout = file.probability("attention_dropout", 0),
                           .block = {{attention_norm, "input_layernorm"},
                                     {mlp_norm, "post_attention_layernorm"},
                                     {attention, "attention"},
                                     {mlp, "mlp"}},
                           .attention = {"query_key_value", "dense"},
                           .mlp = {"dense_h_to_4h", "dense_4h_to_h"},
                           .words = "embed_in",
                           .blocks = "layers",
                           .last_norm = "final_layer_norm",
                           .model = "gpt_neox",
                           .head = "embed_out",
                           .tied = file.get("tie_word_embeddings", false)};
  const auto rope = validated(GPTNeoXRope(file, form.head_size()), path);
  form.rotary = [rope](const at::Tensor& position_ids, int64_t past, const at::Tensor& hidden) {
    return detail::stretched_rotary(rope.options, rope.scaling, position_ids, past, hidden);
  };
  // Worked out anew; old files have them.
  std::vector<std::string> ignored{".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"};
  if (form.tied) ignored.emplace_back("lm_head.weight");  // the head's name in transformers 5
  return causal_decoder(std::move(form), std::move(ignored), file.get("initializer_range", 0.02),
                        rope.options.max_positions);
}

}  // namespace accelerate::models
