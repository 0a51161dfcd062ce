#include "bigmodel/architectures/architectures.hpp"
#include "bigmodel/architectures/layers.hpp"

namespace accelerate::bigmodel {

OutlinedArchitecture bert(const Config& config, const std::string& family) {
  constexpr int64_t kBertWords = 30522, kRobertaWords = 50265;
  const int64_t hidden = config.size("hidden_size", 768), inner = config.size("intermediate_size", 3072),
                positions = config.size("max_position_embeddings", 512);
  const auto embeddings =
      with_buffers(module("embeddings", family + "Embeddings",
                          {embedding("word_embeddings",
                                     config.size("vocab_size", family == "Bert" ? kBertWords : kRobertaWords), hidden),
                           embedding("position_embeddings", positions, hidden),
                           embedding("token_type_embeddings", config.size("type_vocab_size", 2), hidden),
                           layer_norm("LayerNorm", hidden)}),
                   {{"position_ids", {1, positions}, "int64"}, {"token_type_ids", {1, positions}, "int64"}});
  const auto attention = [&](const char* name, const char* kind) {
    const auto self =
        module("self", family + kind,
               {linear("query", hidden, hidden), linear("key", hidden, hidden), linear("value", hidden, hidden)});
    return module(name, family + "Attention",
                  {self, module("output", family + "SelfOutput",
                                {linear("dense", hidden, hidden), layer_norm("LayerNorm", hidden)})});
  };
  const auto layer = [&](int64_t) {
    auto tree = module("", family + "Layer", {attention("attention", "SelfAttention")});
    if (config.flag("add_cross_attention", false))
      tree.children.push_back(attention("crossattention", "CrossAttention"));
    tree.children.push_back(module("intermediate", family + "Intermediate", {linear("dense", hidden, inner)}));
    tree.children.push_back(
        module("output", family + "Output", {linear("dense", inner, hidden), layer_norm("LayerNorm", hidden)}));
    return tree;
  };
  return {
      module("", family + "Model",
             {embeddings,
              module("encoder", family + "Encoder", {list_of("layer", config.count("num_hidden_layers", 12), layer)}),
              module("pooler", family + "Pooler", {linear("dense", hidden, hidden)})}),
      {family + "Embeddings", family + "Layer"}};
}

OutlinedArchitecture distilbert(const Config& config, const std::string& family) {
  const int64_t dim = config.size("dim", 768), inner = config.size("hidden_dim", 3072),
                positions = config.size("max_position_embeddings", 512);
  const auto layer = [&](int64_t) {
    return module("", "TransformerBlock",
                  {module("attention", "DistilBertSelfAttention",
                          {linear("q_lin", dim, dim), linear("k_lin", dim, dim), linear("v_lin", dim, dim),
                           linear("out_lin", dim, dim)}),
                   layer_norm("sa_layer_norm", dim),
                   module("ffn", "FFN", {linear("lin1", dim, inner), linear("lin2", inner, dim)}),
                   layer_norm("output_layer_norm", dim)});
  };
  return {module("", family + "Model",
                 {with_buffers(module("embeddings", "Embeddings",
                                      {embedding("word_embeddings", config.size("vocab_size", 30522), dim),
                                       embedding("position_embeddings", positions, dim), layer_norm("LayerNorm", dim)}),
                               {{"position_ids", {1, positions}, "int64"}}),
                  module("transformer", "Transformer", {list_of("layer", config.count("n_layers", 6), layer)})}),
          {}};
}

}  // namespace accelerate::bigmodel
