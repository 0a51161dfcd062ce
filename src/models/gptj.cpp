#include "models/decoder.hpp"
#include "models/gpt2_config.hpp"
#include "models/refused_fields.hpp"
#include "utils/raise.hpp"

// GPT-J. Source: Wang and Komatsuzaki, "GPT-J-6B"; the architecture as transformers has it.

namespace accelerate::models {

Architecture build_gptj(const std::filesystem::path& path, const std::string&) {
  using enum detail::BlockPart;
  JsonFile file(path);
  rename_gpt2_fields(file);
  refuse_foreign_fields(file);
  const int64_t hidden_size = file.size("n_embd", 4096), positions = file.size("n_positions", 2048);
  detail::DecoderForm form{.family = "GPTJ",
                           .model_type = "gptj",
                           .vocab_size = file.size("vocab_size", 50400),
                           .hidden_size = hidden_size,
                           .layers = file.size("n_layer", 28),
                           .heads = file.divisor("n_head", 16, "n_embd", hidden_size),
                           .inner_size = file.size("n_inner", 4 * hidden_size),
                           .most_positions = positions,
                           .norm_epsilon = file.get("layer_norm_epsilon", 1e-5),
                           .form = detail::BlockForm::one_norm,
                           .queries_first = true,
                           .attention_bias = false,
                           .activation = read_activation(file, "activation_function", "gelu_new"),
                           .embedding_dropout = file.probability("embd_pdrop", 0),
                           .residual_dropout = file.probability("resid_pdrop", 0),
                           .attention_dropout = file.probability("attn_pdrop", 0),
                           .block = {{attention_norm, "ln_1"}, {attention, "attn"}, {mlp, "mlp"}},
                           .attention = {"k_proj", "v_proj", "q_proj", "out_proj"},
                           .mlp = {"fc_in", "fc_out"},
                           .words = "wte",
                           .blocks = "h",
                           .last_norm = "ln_f",
                           .model = "transformer",
                           .head = "lm_head",
                           .head_bias = true,
                           .tied = file.get("tie_word_embeddings", false)};
  const int64_t turned = file.is_null("rotary_dim") ? hidden_size : file.size("rotary_dim", 64);
  if (turned % 2 != 0 || turned > form.head_size())
    file.fail("rotary_dim", turned, fmt::format("an even number up to n_embd / n_head, which is {}", form.head_size()));
  form.rotary = [turned](const at::Tensor& position_ids, int64_t past, const at::Tensor& hidden) {
    const auto device = hidden.device();
    return detail::Rotary(position_ids.defined() ? position_ids : detail::positions_from(past, hidden.size(1), device),
                          {detail::rotary_frequencies(turned, 10000, device)}, hidden.scalar_type(),
                          detail::Rotary::Pairs::neighbours);
  };
  return causal_decoder(std::move(form), {".attn.bias", ".attn.masked_bias", ".attn.embed_positions"},
                        file.get("initializer_range", 0.02), positions);
}

}  // namespace accelerate::models
