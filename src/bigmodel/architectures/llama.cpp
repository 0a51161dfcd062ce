#include <algorithm>

#include "bigmodel/architectures/architectures.hpp"
#include "bigmodel/architectures/layers.hpp"

namespace accelerate::bigmodel {

ModuleTree rotary_embedding(const Config& config, const std::string& class_name, int64_t head_dim) {
  const int64_t frequencies = (head_dim + 1) / 2;
  if (config.flag("_cached_rotary_tables", false)) {
    const int64_t positions = config.size("max_position_embeddings", 2048);
    return with_buffers(
        module("rotary_emb", class_name),
        {{"inv_freq", {frequencies}}, {"cos_cached", {positions, head_dim}}, {"sin_cached", {positions, head_dim}}});
  }
  return with_buffers(module("rotary_emb", class_name),
                      {{"inv_freq", {frequencies}}, {"original_inv_freq", {frequencies}}});
}

namespace {

/// How much of a head is rotated. The scaled kinds of rotary embeddings know a share; the plain one takes all of it.
int64_t rotated(const Config& config, int64_t head_dim) {
  const auto rope = config.inner(config.find("rope_scaling") ? "rope_scaling" : "rope_parameters");
  if (rope.text("rope_type", rope.text("type", "default")) == "default") return head_dim;
  const double share =
      std::clamp(rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1)), 0.0, 1.0);
  return static_cast<int64_t>(static_cast<double>(head_dim) * share);
}

}  // namespace

OutlinedArchitecture llama(const Config& config, const std::string& family) {
  const bool mixtral = family == "Mixtral", qwen2 = family == "Qwen2", qwen3 = family == "Qwen3";
  const bool qwen = qwen2 || qwen3, grouped = mixtral || family == "Mistral";
  const int64_t dim = config.size("hidden_size", 4096), heads = config.divisor("num_attention_heads", 32);
  const int64_t inner = config.size("intermediate_size", grouped ? 14336
                                                         : qwen  ? 22016
                                                                 : 11008),
                words = config.size("vocab_size", qwen ? 151936 : 32000);
  const int64_t key_heads = config.size("num_key_value_heads", config.is_null("num_key_value_heads") ? heads
                                                               : grouped                             ? 8
                                                               : qwen                                ? 32
                                                                                                     : heads);
  const int64_t head_dim = config.size("head_dim", qwen3 ? 128 : dim / heads);
  // The other families have no such fields, and leave them unread.
  const bool plain = family == "Llama", bias = config.flag("attention_bias", false) && (qwen3 || plain),
             query_bias = bias || qwen2;
  const bool mlp_bias = config.flag("mlp_bias", false) && plain;
  const bool in_layers = config.flag("_cached_rotary_tables", false);
  const auto norm = [&](const char* name, int64_t size) { return rms_norm(name, family + "RMSNorm", size); };
  const auto rotary = rotary_embedding(config, family + "RotaryEmbedding", rotated(config, head_dim));

  const auto layer = [&](int64_t) {
    auto attention = module(
        "self_attn", family + "Attention",
        {linear("q_proj", dim, heads * head_dim, query_bias), linear("k_proj", dim, key_heads * head_dim, query_bias),
         linear("v_proj", dim, key_heads * head_dim, query_bias), linear("o_proj", heads * head_dim, dim, bias)});
    if (qwen3)
      attention.children.push_back(norm("q_norm", head_dim)), attention.children.push_back(norm("k_norm", head_dim));
    if (in_layers) attention.children.push_back(rotary);
    ModuleTree mlp;
    if (mixtral) {
      const int64_t experts = config.count("num_local_experts", 8);
      mlp = module("mlp", "MixtralSparseMoeBlock",
                   {with_parameters(module("gate", "MixtralTopKRouter"), {{"weight", {experts, dim}}}),
                    with_parameters(module("experts", "MixtralExperts"), {{"gate_up_proj", {experts, 2 * inner, dim}},
                                                                          {"down_proj", {experts, dim, inner}}})});
    } else {
      mlp = module("mlp", family + "MLP",
                   {linear("gate_proj", dim, inner, mlp_bias), linear("up_proj", dim, inner, mlp_bias),
                    linear("down_proj", inner, dim, mlp_bias)});
    }
    return module(
        "", family + "DecoderLayer",
        {std::move(attention), std::move(mlp), norm("input_layernorm", dim), norm("post_attention_layernorm", dim)});
  };
  auto tree = module("", family + "Model",
                     {embedding("embed_tokens", words, dim),
                      list_of("layers", config.count("num_hidden_layers", 32), layer), norm("norm", dim)});
  if (!in_layers) tree.children.push_back(rotary);
  return {std::move(tree), {family + "DecoderLayer"}};
}

}  // namespace accelerate::bigmodel
