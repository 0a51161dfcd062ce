#include "bigmodel/architectures/architectures.hpp"
#include "bigmodel/architectures/layers.hpp"

namespace accelerate::bigmodel {
namespace {

ModuleTree vision_transformer(const Config& config) {
  const int64_t dim = config.size("embed_dim", 768), inner = config.size("intermediate_size", 5120),
                patch = config.divisor("patch_size", 14), channels = config.size("num_channels", 3);
  const int64_t side = config.size("image_size", 224) / patch, positions = side * side + 1;
  auto embeddings = with_buffers(
      module("embeddings", "IdeficsVisionEmbeddings",
             {conv2d("patch_embedding", channels, dim, patch), embedding("position_embedding", positions, dim)}),
      {{"position_ids", {1, positions}, "int64"}});
  embeddings.parameters = {{"class_embedding", {dim}}};
  const auto layer = [&](int64_t) {
    return module("", "IdeficsVisionEncoderLayer",
                  {module("self_attn", "IdeficsVisionAttention",
                          {linear("k_proj", dim, dim), linear("v_proj", dim, dim), linear("q_proj", dim, dim),
                           linear("out_proj", dim, dim)}),
                   layer_norm("layer_norm1", dim),
                   module("mlp", "IdeficsVisionMLP", {linear("fc1", dim, inner), linear("fc2", inner, dim)}),
                   layer_norm("layer_norm2", dim)});
  };
  return module(
      "vision_model", "IdeficsVisionTransformer",
      {std::move(embeddings), layer_norm("pre_layrnorm", dim),
       module("encoder", "IdeficsVisionEncoder", {list_of("layers", config.count("num_hidden_layers", 32), layer)}),
       layer_norm("post_layernorm", dim)});
}

ModuleTree perceiver(const Config& config, int64_t dim) {
  const int64_t head_dim = config.size("resampler_head_dim", 96),
                attended = config.size("resampler_n_heads", 16) * head_dim, inner = 4 * dim;
  const auto block = [&](int64_t) {
    auto attention = module("0", "IdeficsPerceiverAttention",
                            {layer_norm("context_layer_norm", dim), layer_norm("latents_layer_norm", dim)});
    if (config.flag("qk_layer_norms_perceiver", false))
      attention.children.push_back(layer_norm("q_layer_norm", head_dim)),
          attention.children.push_back(layer_norm("k_layer_norm", head_dim));
    for (const char* name : {"q_proj", "k_proj", "v_proj"})
      attention.children.push_back(linear(name, dim, attended, false));
    attention.children.push_back(linear("output_proj", attended, dim, false));
    return module("", "ModuleList",
                  {std::move(attention), module("1", "IdeficsMLP",
                                                {layer_norm("ln", dim), linear("fc", dim, inner, false),
                                                 linear("c_proj", inner, dim, false)})});
  };
  return with_parameters(
      module("perceiver_resampler", "IdeficsPerceiverResampler",
             {list_of("blocks", config.count("resampler_depth", 6), block), layer_norm("layer_norm", dim)}),
      {{"latents", {config.size("resampler_n_latents", 64), dim}}});
}

}  // namespace

OutlinedArchitecture idefics(const Config& config, const std::string& family) {
  const int64_t dim = config.size("hidden_size", 4096), inner = config.size("intermediate_size", 11008),
                head_dim = dim / config.divisor("num_attention_heads", 32);
  const int64_t layers = config.count("num_hidden_layers", 32), interval = config.divisor("cross_layer_interval", 1);
  const auto vision = config.inner("vision_config");
  const int64_t image_dim = vision.size("embed_dim", 768);
  const bool qk_norms = config.flag("qk_layer_norms", false);
  const auto norm = [&](const char* name, int64_t size) { return rms_norm(name, family + "RMSNorm", size); };
  const auto attention = [&](const char* name, int64_t context, bool qk) {
    auto tree = module(name, family + "Attention",
                       {linear("q_proj", dim, dim, false), linear("k_proj", context, dim, false),
                        linear("v_proj", context, dim, false), linear("o_proj", dim, dim, false),
                        rotary_embedding(config, family + "RotaryEmbedding", head_dim)});
    if (qk)
      tree.children.push_back(norm("q_layer_norm", head_dim)), tree.children.push_back(norm("k_layer_norm", head_dim));
    return tree;
  };
  const auto rest = [&](ModuleTree tree) {
    tree.children.push_back(module("mlp", family + "MLP",
                                   {linear("gate_proj", dim, inner, false), linear("down_proj", inner, dim, false),
                                    linear("up_proj", dim, inner, false)}));
    tree.children.push_back(norm("input_layernorm", dim));
    tree.children.push_back(norm("post_attention_layernorm", dim));
    return tree;
  };
  const int64_t alphas = config.text("alpha_type", "float") == "vector" ? dim : 1;
  const auto cross = [&](int64_t) {
    return with_parameters(
        rest(module("", family + "GatedCrossAttentionLayer", {attention("cross_attn", image_dim, qk_norms)})),
        {{"alpha_cross_attn", {alphas}}, {"alpha_dense", {alphas}}});
  };
  auto words = embedding("embed_tokens", config.size("vocab_size", 32000), dim);
  words.class_name = family + "DecoupledEmbedding";
  if (const int64_t more = config.size("additional_vocab_size", 0); more > 0)
    words.children.push_back(embedding("additional_embedding", more, dim));
  std::vector<ModuleTree> parts = {std::move(words), vision_transformer(vision)};
  if (config.flag("use_resampler", false)) parts.push_back(perceiver(config.inner("perceiver_config"), image_dim));
  parts.push_back(list_of("layers", layers, [&](int64_t) {
    return rest(module("", family + "DecoderLayer", {attention("self_attn", dim, false)}));
  }));
  parts.push_back(list_of("gated_cross_attn_layers", layers / interval, cross));
  parts.push_back(norm("norm", dim));
  return {module("", family + "Model", std::move(parts)),
          {family + "DecoderLayer", family + "VisionEncoderLayer", family + "GatedCrossAttentionLayer"}};
}

}  // namespace accelerate::bigmodel
