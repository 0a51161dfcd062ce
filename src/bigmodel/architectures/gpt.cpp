#include <algorithm>

#include "bigmodel/architectures/architectures.hpp"
#include "bigmodel/architectures/layers.hpp"

namespace accelerate::bigmodel {
namespace {

/// A linear layer whose weight lies the other way round.
ModuleTree conv1d(std::string name, int64_t in, int64_t out) {
  return with_parameters(module(std::move(name), "Conv1D"), {{"weight", {in, out}}, {"bias", {out}}});
}

}  // namespace

OutlinedArchitecture gpt2(const Config& config, const std::string& family) {
  const int64_t dim = config.size("n_embd", 768), inner = config.size("n_inner", 4 * dim);
  const auto block = [&](int64_t) {
    auto tree =
        module("", family + "Block",
               {layer_norm("ln_1", dim),
                module("attn", family + "Attention", {conv1d("c_attn", dim, 3 * dim), conv1d("c_proj", dim, dim)}),
                layer_norm("ln_2", dim)});
    if (config.flag("add_cross_attention", false)) {
      tree.children.push_back(
          module("crossattention", family + "Attention",
                 {conv1d("c_attn", dim, 2 * dim), conv1d("q_attn", dim, dim), conv1d("c_proj", dim, dim)}));
      tree.children.push_back(layer_norm("ln_cross_attn", dim));
    }
    tree.children.push_back(module("mlp", family + "MLP", {conv1d("c_fc", dim, inner), conv1d("c_proj", inner, dim)}));
    return tree;
  };
  return {module("", family + "Model",
                 {embedding("wte", config.size("vocab_size", 50257), dim),
                  embedding("wpe", config.size("n_positions", 1024), dim),
                  list_of("h", config.count("n_layer", 12), block), layer_norm("ln_f", dim)}),
          {family + "Block"}};
}

OutlinedArchitecture gptj(const Config& config, const std::string& family) {
  const int64_t dim = config.size("n_embd", 4096), inner = config.size("n_inner", 4 * dim);
  const auto block = [&](int64_t) {
    const auto attention =
        with_buffers(module("attn", family + "Attention",
                            {linear("k_proj", dim, dim, false), linear("v_proj", dim, dim, false),
                             linear("q_proj", dim, dim, false), linear("out_proj", dim, dim, false)}),
                     {{"embed_positions", {config.size("n_positions", 2048), config.size("rotary_dim", 64)}}});
    return module("", family + "Block",
                  {layer_norm("ln_1", dim), attention,
                   module("mlp", family + "MLP", {linear("fc_in", dim, inner), linear("fc_out", inner, dim)})});
  };
  return {module("", family + "Model",
                 {embedding("wte", config.size("vocab_size", 50400), dim),
                  list_of("h", config.count("n_layer", 28), block), layer_norm("ln_f", dim)}),
          {family + "Block"}};
}

OutlinedArchitecture gpt_neox(const Config& config, const std::string& family) {
  const int64_t dim = config.size("hidden_size", 6144), inner = config.size("intermediate_size", 24576);
  const bool bias = config.flag("attention_bias", true);
  const double share = std::clamp(
      config.inner("rope_parameters").number("partial_rotary_factor", config.number("rotary_pct", 0.25)), 0.0, 1.0);
  const int64_t head_dim = dim / config.divisor("num_attention_heads", 64);
  const auto rotary = static_cast<int64_t>(static_cast<double>(head_dim) * share);
  const auto layer = [&](int64_t) {
    return module(
        "", family + "Layer",
        {layer_norm("input_layernorm", dim), layer_norm("post_attention_layernorm", dim),
         module("attention", family + "Attention",
                {linear("query_key_value", dim, 3 * dim, bias), linear("dense", dim, dim, bias)}),
         module("mlp", family + "MLP", {linear("dense_h_to_4h", dim, inner), linear("dense_4h_to_h", inner, dim)})});
  };
  return {module("", family + "Model",
                 {embedding("embed_in", config.size("vocab_size", 50432), dim),
                  list_of("layers", config.count("num_hidden_layers", 44), layer), layer_norm("final_layer_norm", dim),
                  rotary_embedding(config, family + "RotaryEmbedding", rotary)}),
          {family + "Layer"}};
}

OutlinedArchitecture opt(const Config& config, const std::string& family) {
  constexpr int64_t kReservedPositions = 2;  // the table of positions begins after these
  const int64_t dim = config.size("hidden_size", 768), inner = config.size("ffn_dim", 3072),
                words = config.size("word_embed_proj_dim", dim);
  const bool bias = config.flag("enable_bias", true), affine = config.flag("layer_norm_elementwise_affine", true);
  const auto norm = [&](const char* name) { return affine ? layer_norm(name, dim) : module(name, "LayerNorm"); };
  const auto layer = [&](int64_t) {
    return module("", family + "DecoderLayer",
                  {module("self_attn", family + "Attention",
                          {linear("k_proj", dim, dim, bias), linear("v_proj", dim, dim, bias),
                           linear("q_proj", dim, dim, bias), linear("out_proj", dim, dim, bias)}),
                   norm("self_attn_layer_norm"), linear("fc1", dim, inner, bias), linear("fc2", inner, dim, bias),
                   norm("final_layer_norm")});
  };
  auto positions = embedding("embed_positions", config.size("max_position_embeddings", 2048) + kReservedPositions, dim);
  positions.class_name = family + "LearnedPositionalEmbedding";
  std::vector<ModuleTree> parts = {embedding("embed_tokens", config.size("vocab_size", 50272), words), positions};
  if (words != dim)
    parts.push_back(linear("project_out", dim, words, false)), parts.push_back(linear("project_in", words, dim, false));
  if (config.flag("do_layer_norm_before", true) && !config.flag("_remove_final_layer_norm", false))
    parts.push_back(norm("final_layer_norm"));
  parts.push_back(list_of("layers", config.count("num_hidden_layers", 12), layer));
  return {module("", family + "Model", {module("decoder", family + "Decoder", std::move(parts))}),
          {family + "DecoderLayer"}};
}

}  // namespace accelerate::bigmodel
