#include "formats/gguf_keys.hpp"

#include <array>
#include <span>
#include <string_view>
#include <vector>

namespace accelerate::formats {
namespace {

/// The effect of a key below the architecture's name here.
struct KnownKey {
  const char* key;
  const char* about;
  enum { acts, is_a_remark, has_to_be } use = acts;
  std::vector<double> harmless = {};  ///< of has_to_be: values with which the model is as without the key
};
constexpr auto acts = KnownKey::acts, is_a_remark = KnownKey::is_a_remark, has_to_be = KnownKey::has_to_be;

/// The keys of all architectures here. llama.cpp reads those with harmless values for families that build on these.
const std::vector<KnownKey>& common_keys() {
  static const std::vector<KnownKey> keys = {
      {"vocab_size", "rows of the embeddings"},
      {"context_length", "positions"},
      {"embedding_length", "width"},
      {"block_count", "layers"},
      {"feed_forward_length", "width of the MLP"},
      {"attention.head_count", "heads"},
      {"attention.head_count_kv", "heads of keys and values"},
      {"attention.key_length", "size of a head"},
      {"attention.value_length", "size of a head's values"},
      {"rope.dimension_count", "turned dimensions of a head"},
      {"tensor_data_layout", "who wrote the tensors", is_a_remark},
      {"rope.scaling.finetuned", "whether the model was trained with the scaling", is_a_remark},
      {"pooling_type", "how embeddings of texts are made of tokens'", is_a_remark},
      {"attention.causal", "whether a token sees those after it", has_to_be, {1}},
      {"use_parallel_residual", "attention and MLP side by side", has_to_be, {0}},
      {"attention.clamp_kqv", "limit of queries, keys and values", has_to_be, {0}},
      {"attention.max_alibi_bias", "ALiBi's slope", has_to_be, {0}},
      {"attention.scale", "factor of attention's products", has_to_be, {0}},
      {"attn_logit_softcapping", "limit of attention's products", has_to_be, {0}},
      {"final_logit_softcapping", "limit of logits", has_to_be, {0}},
      {"logit_scale", "factor of logits", has_to_be, {0, 1}},
      {"residual_scale", "factor of each layer's result", has_to_be, {0, 1}},
      {"embedding_scale", "factor of embeddings", has_to_be, {0, 1}},
      {"leading_dense_block_count", "layers without experts", has_to_be, {0}},
      {"nextn_predict_layers", "layers that guess later tokens", has_to_be, {0}},
      {"expert_shared_count", "experts for all tokens", has_to_be, {0}},
  };
  return keys;
}
const std::vector<KnownKey>& llama_keys() {
  static const std::vector<KnownKey> keys = {
      {"attention.layer_norm_rms_epsilon", "epsilon of norms"},
      {"rope.freq_base", "base of rotary frequencies"},
      {"rope.scaling.type", "how rotary frequencies are stretched"},
      {"rope.scaling.factor", "by what they are stretched"},
      {"rope.scale_linear", "the same in files of 2023"},
      {"rope.scaling.original_context_length", "positions before they were stretched"},
      // Keys of yarn; llama.cpp takes -1 for the usual value.
      {"rope.scaling.attn_factor", "factor of attention's products", has_to_be, {0, 1}},
      {"rope.scaling.yarn_log_multiplier", "another factor of them", has_to_be, {0}},
      {"rope.scaling.yarn_ext_factor", "share of frequencies that stay", has_to_be, {-1, 1}},
      {"rope.scaling.yarn_attn_factor", "factor of attention's products", has_to_be, {-1, 1}},
      {"rope.scaling.yarn_beta_fast", "where frequencies begin to be stretched", has_to_be, {-1, 32}},
      {"rope.scaling.yarn_beta_slow", "where they are stretched whole", has_to_be, {-1, 1}},
      {"attention.sliding_window", "how far a token sees"},
      {"expert_count", "experts in a layer"},
      {"expert_used_count", "experts for a token"},
      {"expert_weights_norm", "whether the weights of a token's experts add up to 1", has_to_be, {1}},
      {"expert_weights_scale", "factor of the experts' weights", has_to_be, {0, 1}},
      {"expert_gating_func", "how experts are weighed", has_to_be, {0, 1}},
  };
  return keys;
}
const std::vector<KnownKey>& gpt2_keys() {
  static const std::vector<KnownKey> keys = {
      {"attention.layer_norm_epsilon", "epsilon of norms"},
      {"rope.freq_base", "base of rotary frequencies, which GPT-2 has none of", is_a_remark},
      {"expert_count", "experts in a layer", has_to_be, {0}},
      {"expert_used_count", "experts for a token", has_to_be, {0}},
  };
  return keys;
}

const KnownKey* find(std::span<const KnownKey> keys, std::string_view name) {
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const KnownKey& known) { return name == known.key; });
  return found == keys.end() ? nullptr : &*found;
}

std::string show(const GgufValue& value) {
  const auto text = [](const auto& found) -> std::string {
    using Found = std::decay_t<decltype(found)>;
    if constexpr (std::is_same_v<Found, std::string>) return "'" + found.substr(0, 100) + "'";
    else if constexpr (requires { found.size(); }) return fmt::format("a list of {}", found.size());
    else return fmt::format("{}", found);
  };
  return std::visit(text, value.content);
}

bool is_harmless(const KnownKey& known, const GgufValue& value) {
  const auto* flag = std::get_if<bool>(&value.content);
  const auto* whole = std::get_if<int64_t>(&value.content);
  const auto* real = std::get_if<double>(&value.content);
  if (!flag && !whole && !real) return false;
  const double number = flag ? *flag : whole ? static_cast<double>(*whole) : *real;
  return std::ranges::find(known.harmless, number) != known.harmless.end();
}

}  // namespace

void check_gguf_keys(const GgufMetadata& metadata, const GgufFields& fields) {
  const auto prefix = fields.architecture() + ".";
  const auto& own = fields.architecture() == "gpt2" ? gpt2_keys() : llama_keys();
  for (auto entry = metadata.lower_bound(prefix); entry != metadata.end() && entry->first.starts_with(prefix);
       ++entry) {
    const auto name = std::string_view(entry->first).substr(prefix.size());
    const auto* known = find(own, name);
    if (!known) known = find(common_keys(), name);
    if (!known)
      fields.fail(
          "it has the field {} = {}, which is not known here: it may change what the model computes, so that results "
          "would be wrong without a word. Use the model's Hugging Face folder, or a newer version of this library.",
          entry->first.substr(0, 200), show(entry->second));
    if (known->use == has_to_be && !is_harmless(*known, entry->second))
      fields.fail(
          "{} ({}) is {}, expected {} or none: models of the architecture {} have nothing of the kind here, and "
          "results would be wrong without it. Use the model's Hugging Face folder, or a newer version of this library.",
          entry->first, known->about, show(entry->second), fmt::join(known->harmless, " or "), fields.architecture());
  }
}

}  // namespace accelerate::formats
