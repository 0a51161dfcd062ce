#include "bigmodel/architectures/architectures.hpp"
#include "bigmodel/architectures/layers.hpp"

namespace accelerate::bigmodel {

OutlinedArchitecture t5(const Config& config, const std::string& family) {
  const int64_t dim = config.size("d_model", 512), inner = config.size("d_ff", 2048),
                words = config.size("vocab_size", 32128), heads = config.size("num_heads", 8);
  const int64_t attended = heads * config.size("d_kv", 64), layers = config.count("num_layers", 6);
  const bool gated = config.text("feed_forward_proj", "relu").starts_with("gated-");
  const auto norm = [&](const char* name) { return rms_norm(name, family + "LayerNorm", dim); };

  const auto attention = [&](const char* name, bool has_positions) {
    auto tree = module(name, family + "Attention",
                       {linear("q", dim, attended, false), linear("k", dim, attended, false),
                        linear("v", dim, attended, false), linear("o", attended, dim, false)});
    if (has_positions)
      tree.children.push_back(
          embedding("relative_attention_bias", config.size("relative_attention_num_buckets", 32), heads));
    return tree;
  };
  const auto stack = [&](const char* name, int64_t count, bool decoder) {
    const auto block = [&](int64_t index) {
      auto dense = module("DenseReluDense", family + (gated ? "DenseGatedActDense" : "DenseActDense"));
      if (gated) dense.children = {linear("wi_0", dim, inner, false), linear("wi_1", dim, inner, false)};
      else dense.children = {linear("wi", dim, inner, false)};
      dense.children.push_back(linear("wo", inner, dim, false));
      std::vector<ModuleTree> sublayers = {
          module("", family + "LayerSelfAttention", {attention("SelfAttention", index == 0), norm("layer_norm")})};
      if (decoder)
        sublayers.push_back(
            module("", family + "LayerCrossAttention", {attention("EncDecAttention", false), norm("layer_norm")}));
      sublayers.push_back(module("", family + "LayerFF", {std::move(dense), norm("layer_norm")}));
      const auto count_of_sublayers = static_cast<int64_t>(sublayers.size());
      return module(
          "", family + "Block",
          {list_of("layer", count_of_sublayers, [&](int64_t i) { return sublayers[static_cast<size_t>(i)]; })});
    };
    return module(name, family + "Stack",
                  {embedding("embed_tokens", words, dim), list_of("block", count, block), norm("final_layer_norm")});
  };
  auto tree = module("", family + "Model",
                     {embedding("shared", words, dim), stack("encoder", layers, false),
                      stack("decoder", config.count("num_decoder_layers", layers), true)});
  for (const char* name : {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"})
    tie(tree, name, "shared.weight");
  return {std::move(tree), {family + "Block"}, {"wo"}};
}

}  // namespace accelerate::bigmodel
