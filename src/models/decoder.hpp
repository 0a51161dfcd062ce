#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/layers.hpp"
#include "models/masks.hpp"
#include "models/rotary.hpp"

/// Decoders of the GPT kind: blocks of attention and an MLP that add to one stream. Their architectures differ in
/// positions, in norms, in the form of a block, and in names, all of which is data here. LLaMA's family has gates,
/// windows and a way of its own for single rows (llama.cpp).
namespace accelerate::models::detail {

/// Where a block normalises, and in which order it adds. That is not one order for all: sums differ in their last bits.
enum class BlockForm {
  norms_first,   ///< x + attention(norm(x)), and of that y: y + mlp(norm(y))
  norms_behind,  ///< norm(x + attention(x)), and of that y: norm(y + mlp(y))
  side_by_side,  ///< x + attention(norm(x)) + mlp(other norm(x))
  one_norm,      ///< attention(norm(x)) + mlp(norm(x)) + x
};

/// The layers that make queries, keys and values.
enum class Projections {
  separate,    ///< a layer for keys, one for values, one for queries
  per_head,    ///< one layer; each head's query, key and value lie together
  one_by_one,  ///< one layer: all queries, all keys, all values
};

/// The modules that a block registers. An MLP is a module of its own, or its two layers are the block's.
enum class BlockPart { attention, attention_norm, mlp, mlp_first, mlp_second, mlp_norm };

/// Positions whose embeddings are learned.
struct LearnedPositions {
  const char* name = nullptr;  ///< of the embeddings; null: there are none
  int64_t count = 0;           ///< for how many tokens
  int64_t first_row = 0;       ///< of the embeddings that a position has
  bool count_padding = true;   ///< else padding has position -1, and tokens are counted without it
};

/// An architecture. Registered names are Hugging Face's: they make the parameter names of the files. Their order is
/// transformers', too: files of optimizers count parameters.
struct DecoderForm {
  std::string family, block_class = "Block";  ///< class names: family + "Attention", family + block_class, …
  std::string model_type;                     ///< by which formats knows the names in files
  int64_t vocab_size = 0, hidden_size = 0, layers = 0, heads = 0, inner_size = 0;
  std::optional<int64_t> word_size = {};  ///< of embeddings that are projected to hidden_size; default: the same

  // Positions: one of these two.
  std::function<Rotary(const at::Tensor& position_ids, int64_t past, const at::Tensor& hidden)> rotary = {};
  LearnedPositions learned = {};
  std::optional<int64_t> most_positions = {};  ///< a forward takes no more tokens; unset: it does

  // Norms.
  double norm_epsilon = 1e-5;
  bool norm_weights = true, final_norm = true, final_norm_before_layers = false;

  // The form of a block.
  BlockForm form = BlockForm::norms_first;
  Projections projections = Projections::separate;
  bool queries_first = false;  ///< of separate ones, else last: gradients are summed in that order
  bool attention_bias = true, mlp_bias = true;
  bool transposed = false;                 ///< layers are transformers' Conv1D
  std::optional<double> score_scale = {};  ///< default: 1 / sqrt(head size)
  bool divides_scores_by_layer = false;    ///< and score_scale is given
  Activation activation = nullptr;
  double embedding_dropout = 0, residual_dropout = 0, attention_dropout = 0, layer_dropout = 0;

  // Names.
  std::vector<std::pair<BlockPart, const char*>> block = {};
  std::vector<const char*> attention = {};  ///< of its layers: those of the projections, then that of the output
  std::vector<const char*> mlp = {};        ///< of its layers, where it is a module
  const char *words = nullptr, *blocks = nullptr, *last_norm = nullptr;
  const char* model = nullptr;    ///< in the model with a head
  const char* decoder = nullptr;  ///< in `model`, where that is a module around it; else null
  const char* head = nullptr;
  bool head_bias = false, tied = false;

  int64_t head_size() const { return hidden_size / heads; }
  int64_t size_of_words() const { return word_size.value_or(hidden_size); }
  torch::nn::LayerNorm norm() const { return make_layer_norm(hidden_size, norm_epsilon, norm_weights); }
};
using SharedForm = std::shared_ptr<const DecoderForm>;

/// The values that all blocks of one forward share.
struct DecoderContext {
  std::optional<Rotary> rotary;
  AttentionMask mask;
  KeyValueCache* cache;
};

/// The blocks of an architecture, of class family + block_class, and what they make of `hidden`.
torch::nn::ModuleList make_blocks(const SharedForm& form);
at::Tensor run_blocks(const torch::nn::ModuleList& blocks, at::Tensor hidden, const DecoderContext& context);

/// A model with a head, for the Auto classes. @param ignored_suffixes  as WeightRules; those of a tied head come on top
/// @param deviation  of fresh weights  @param max_positions  as Architecture
Architecture causal_decoder(DecoderForm form, std::vector<std::string> ignored_suffixes, double deviation,
                            int64_t max_positions);

}  // namespace accelerate::models::detail
