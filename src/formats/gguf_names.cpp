#include "formats/gguf_names.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>

#include <nlohmann/json.hpp>

namespace accelerate::formats {
namespace {

using nlohmann::ordered_json;

enum class Change { none, query, key, transposed, experts };

struct Rule {
  const char* gguf;          ///< "blk.#." stands for the layer's prefix; endings ".weight" and ".bias" are kept.
  const char* hugging_face;  ///< "#" is the layer, "@" the expert.
  Change change = Change::none;
};

/// Rotary projections are stored in the order of rows that llama.cpp's kernels want.
constexpr Rule kLlama[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
    {"blk.#.attn_norm", "model.layers.#.input_layernorm"},
    {"blk.#.ffn_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.attn_q", "model.layers.#.self_attn.q_proj", Change::query},
    {"blk.#.attn_k", "model.layers.#.self_attn.k_proj", Change::key},
    {"blk.#.attn_v", "model.layers.#.self_attn.v_proj"},
    {"blk.#.attn_output", "model.layers.#.self_attn.o_proj"},
    {"blk.#.ffn_gate", "model.layers.#.mlp.gate_proj"},
    {"blk.#.ffn_up", "model.layers.#.mlp.up_proj"},
    {"blk.#.ffn_down", "model.layers.#.mlp.down_proj"},
    {"blk.#.ffn_gate_inp", "model.layers.#.block_sparse_moe.gate"},
    {"blk.#.ffn_gate_exps", "model.layers.#.block_sparse_moe.experts.@.w1", Change::experts},
    {"blk.#.ffn_down_exps", "model.layers.#.block_sparse_moe.experts.@.w2", Change::experts},
    {"blk.#.ffn_up_exps", "model.layers.#.block_sparse_moe.experts.@.w3", Change::experts},
};

/// Its linear layers are Conv1D, [in, out].
constexpr Rule kGpt2[] = {
    {"token_embd", "transformer.wte"},
    {"position_embd", "transformer.wpe"},
    {"output_norm", "transformer.ln_f"},
    {"output", "lm_head"},
    {"blk.#.attn_norm", "transformer.h.#.ln_1"},
    {"blk.#.ffn_norm", "transformer.h.#.ln_2"},
    {"blk.#.attn_qkv", "transformer.h.#.attn.c_attn", Change::transposed},
    {"blk.#.attn_output", "transformer.h.#.attn.c_proj", Change::transposed},
    {"blk.#.ffn_up", "transformer.h.#.mlp.c_fc", Change::transposed},
    {"blk.#.ffn_down", "transformer.h.#.mlp.c_proj", Change::transposed},
};

std::string architecture_of(const GgufHeader& header) {
  const auto* name = header.metadata.find_as<std::string>("general.architecture");
  return name ? *name : std::string();
}

std::map<std::string, Rule> rules_of(const std::string& architecture) {
  std::map<std::string, Rule> rules;
  if (architecture == "llama" || architecture == "qwen2")
    for (auto rule : kLlama) {
      if (architecture == "qwen2") rule.change = Change::none;
      rules.emplace(rule.gguf, rule);
    }
  if (architecture == "gpt2")
    for (const auto& rule : kGpt2) rules.emplace(rule.gguf, rule);
  return rules;
}

void replace(std::string& text, char mark, const std::string& by) {
  if (const auto at = text.find(mark); at != std::string::npos) text.replace(at, 1, by);
}

/// Fields of the metadata below the architecture's prefix.
class Fields {
 public:
  Fields(const GgufHeader& header, const std::string& file)
      : header_(header), file_(file), architecture_(architecture_of(header)) {}

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("GGUF file '{}': {}", file_, fmt::format(what, std::forward<Args>(args)...));
  }
  const std::string& architecture() const { return architecture_; }
  std::optional<int64_t> integer(const std::string& key) const {
    return header_.metadata.integer(architecture_ + "." + key);
  }
  std::optional<double> number(const std::string& key) const {
    return header_.metadata.number(architecture_ + "." + key);
  }
  const std::string* text(const std::string& key) const {
    return header_.metadata.find_as<std::string>(architecture_ + "." + key);
  }
  int64_t need_integer(const std::string& key) const {
    const auto value = integer(key);
    if (!value)
      fail("its metadata lacks the number '{}.{}', which the model needs. It holds no model, or is damaged.",
           architecture_, key);
    return *value;
  }
  double need_number(const std::string& key) const {
    const auto value = number(key);
    if (!value)
      fail("its metadata lacks the number '{}.{}', which the model needs. It holds no model, or is damaged.",
           architecture_, key);
    return *value;
  }
  int64_t heads() const { return need_integer("attention.head_count"); }
  int64_t key_value_heads() const { return integer("attention.head_count_kv").value_or(heads()); }

  const GgufTensor* tensor(const std::string& name) const {
    const auto found = std::find_if(header_.tensors.begin(), header_.tensors.end(),
                                    [&](const GgufTensor& t) { return t.name == name; });
    return found == header_.tensors.end() ? nullptr : &*found;
  }

 private:
  const GgufHeader& header_;
  const std::string& file_;
  std::string architecture_;
};

// --- config.json
// -------------------------------------------------------------------------------------------------------------------

int64_t vocabulary_size(const GgufHeader& header, const Fields& fields) {
  if (const auto* embeddings = fields.tensor("token_embd.weight"); embeddings && embeddings->shape.size() == 2)
    return embeddings->shape[0];
  const auto tokens = std::ranges::find(header.entries, "tokenizer.ggml.tokens", &GgufEntry::key);
  return tokens != header.entries.end() ? tokens->elements : fields.need_integer("vocab_size");
}

void add_special_tokens(ordered_json& config, const GgufHeader& header) {
  for (const auto& [field, key] :
       {std::pair{"bos_token_id", "bos"}, {"eos_token_id", "eos"}, {"pad_token_id", "padding"}})
    if (const auto id = header.metadata.integer("tokenizer.ggml." + std::string(key) + "_token_id"))
      config[field] = *id;
}

/// LLaMA 3's stretching of slow frequencies lies in the file as one factor per frequency. The four numbers of
/// config.json follow from it: the largest factor is its own, the others are the same in all models of that form, which
/// is checked.
ordered_json llama3_scaling(const Fields& fields, const GgufTensor& factors, const float* values, double theta,
                            int64_t head_size) {
  constexpr double kLow = 1, kHigh = 4, kContext = 8192, kTolerance = 1e-3;
  const auto count = factors.row();
  if (factors.shape.size() != 1 || count != head_size / 2)
    fields.fail("'rope_freqs.weight' has {} factors, expected one for each of the {} frequencies.", count,
                head_size / 2);
  const double factor = *std::max_element(values, values + count);
  for (int64_t i = 0; i < count; ++i) {
    const double waves = kContext * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_size)) /
                         (2 * std::numbers::pi);
    const double share = std::clamp((waves - kLow) / (kHigh - kLow), 0.0, 1.0);
    const double expected = 1 / ((1 - share) / factor + share);
    if (!(std::abs(values[i] - expected) <= kTolerance * expected))
      fields.fail(
          "'rope_freqs.weight' holds factors of rotary frequencies that are not LLaMA 3's ({} at {}, expected {}), and "
          "no other form is supported.",
          values[i], i, expected);
  }
  return {{"rope_type", "llama3"},
          {"factor", factor},
          {"low_freq_factor", kLow},
          {"high_freq_factor", kHigh},
          {"original_max_position_embeddings", static_cast<int64_t>(kContext)}};
}

ordered_json llama_config(const GgufHeader& header, const Fields& fields, const float* rope_factors) {
  const auto experts = fields.integer("expert_count").value_or(0);
  const bool qwen = fields.architecture() == "qwen2", mixtral = experts > 0;
  ordered_json config;
  config["architectures"] = {qwen ? "Qwen2ForCausalLM" : mixtral ? "MixtralForCausalLM" : "LlamaForCausalLM"};
  config["model_type"] = qwen ? "qwen2" : mixtral ? "mixtral" : "llama";
  config["vocab_size"] = vocabulary_size(header, fields);
  config["hidden_size"] = fields.need_integer("embedding_length");
  config["intermediate_size"] = fields.need_integer("feed_forward_length");
  config["num_hidden_layers"] = fields.need_integer("block_count");
  config["num_attention_heads"] = fields.heads();
  config["num_key_value_heads"] = fields.key_value_heads();
  const auto head_size =
      fields.integer("attention.key_length")
          .value_or(fields.integer("rope.dimension_count")
                        .value_or(fields.need_integer("embedding_length") / std::max<int64_t>(fields.heads(), 1)));
  config["head_dim"] = head_size;
  config["hidden_act"] = "silu";
  config["max_position_embeddings"] = fields.need_integer("context_length");
  config["rms_norm_eps"] = fields.need_number("attention.layer_norm_rms_epsilon");
  const double theta = fields.number("rope.freq_base").value_or(10000);
  config["rope_theta"] = theta;
  const auto* scaling = fields.text("rope.scaling.type");
  if (rope_factors) {
    config["rope_scaling"] =
        llama3_scaling(fields, *fields.tensor("rope_freqs.weight"), rope_factors, theta, head_size);
  } else if (scaling && *scaling != "none") {
    if (*scaling != "linear" && *scaling != "yarn")
      fields.fail("rope.scaling.type is '{}', expected none, linear or yarn: no other form is supported.", *scaling);
    for (const char* key : {"attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor",
                            "yarn_beta_fast", "yarn_beta_slow"})
      if (fields.number(std::string("rope.scaling.") + key))
        fields.fail("it has the field rope.scaling.{}, which is not supported.", key);
    config["rope_scaling"] = {{"rope_type", *scaling}, {"factor", fields.need_number("rope.scaling.factor")}};
    if (const auto original = fields.integer("rope.scaling.original_context_length"))
      config["rope_scaling"]["original_max_position_embeddings"] = *original;
  }
  if (mixtral) {
    config["num_local_experts"] = experts;
    config["num_experts_per_tok"] = fields.need_integer("expert_used_count");
  } else if (!qwen) {
    config["attention_bias"] = fields.tensor("blk.0.attn_q.bias") != nullptr;
  }
  config["tie_word_embeddings"] = fields.tensor("output.weight") == nullptr;
  add_special_tokens(config, header);
  return config;
}

ordered_json gpt2_config(const GgufHeader& header, const Fields& fields) {
  ordered_json config;
  config["architectures"] = {"GPT2LMHeadModel"};
  config["model_type"] = "gpt2";
  config["vocab_size"] = vocabulary_size(header, fields);
  config["n_positions"] = fields.need_integer("context_length");
  config["n_embd"] = fields.need_integer("embedding_length");
  config["n_layer"] = fields.need_integer("block_count");
  config["n_head"] = fields.heads();
  config["n_inner"] = fields.need_integer("feed_forward_length");
  config["activation_function"] = "gelu_new";
  config["layer_norm_epsilon"] = fields.need_number("attention.layer_norm_epsilon");
  config["tie_word_embeddings"] = fields.tensor("output.weight") == nullptr;
  add_special_tokens(config, header);
  return config;
}

}  // namespace

std::vector<std::pair<std::string, GgufSource>> hugging_face_tensors(const GgufHeader& header,
                                                                     const std::string& file) {
  const Fields fields(header, file);
  const auto rules = rules_of(fields.architecture());
  std::vector<std::pair<std::string, GgufSource>> result;
  for (size_t index = 0; index < header.tensors.size(); ++index) {
    const auto& stored = header.tensors[index];
    GgufSource source{.tensor = index, .shape = stored.shape};
    // blk.12.attn_q.weight: layer 12, rule blk.#.attn_q, ending .weight
    const auto dot = stored.name.rfind('.');
    std::string stem = stored.name.substr(0, dot), layer;
    const std::string ending = dot == std::string::npos ? "" : stored.name.substr(dot);
    if (stem.starts_with("blk.")) {
      const auto begin = std::string_view("blk.").size(), end = stem.find('.', begin);
      if (end != std::string::npos && end > begin &&
          std::all_of(stem.begin() + static_cast<std::ptrdiff_t>(begin),
                      stem.begin() + static_cast<std::ptrdiff_t>(end),
                      [](unsigned char c) { return std::isdigit(c); })) {
        layer = stem.substr(begin, end - begin);
        stem.replace(begin, end - begin, "#");
      }
    }
    const auto rule = rules.find(stem);
    if (rule == rules.end() || (ending != ".weight" && ending != ".bias")) {
      result.emplace_back(stored.name, std::move(source));
      continue;
    }
    std::string name = rule->second.hugging_face + ending;
    replace(name, '#', layer);
    const auto wrong_shape = [&](const std::string& expected) {
      fields.fail("tensor '{}' has {} dimensions, the first of {}, expected {}.", stored.name, stored.shape.size(),
                  stored.shape.empty() ? 1 : stored.shape[0], expected);
    };
    const bool matrix = stored.shape.size() == 2;
    switch (rule->second.change) {
      case Change::none:
        break;
      case Change::transposed:
        if (matrix) {
          std::swap(source.shape[0], source.shape[1]);
          source.transposed = true;
        }
        break;
      case Change::query:
      case Change::key: {
        source.rotary_heads = rule->second.change == Change::query ? fields.heads() : fields.key_value_heads();
        if (source.rotary_heads < 1 || stored.shape.empty() || stored.shape.size() > 2 ||
            stored.shape[0] % (2 * source.rotary_heads) != 0)
          wrong_shape(fmt::format("an even number of rows for each of the {} heads", source.rotary_heads));
        break;
      }
      case Change::experts: {
        const auto experts = fields.need_integer("expert_count");
        if (stored.shape.size() != 3 || stored.shape[0] != experts)
          wrong_shape(fmt::format("three, the first of the {} experts", experts));
        source.shape.erase(source.shape.begin());
        for (int64_t expert = 0; expert < experts; ++expert) {
          auto of_expert = name;
          replace(of_expert, '@', std::to_string(expert));
          source.first_row = expert * source.shape[0];
          result.emplace_back(std::move(of_expert), source);
        }
        continue;
      }
    }
    result.emplace_back(std::move(name), std::move(source));
  }
  return result;
}

std::string gguf_config_json(const GgufHeader& header, const std::string& file, const float* rope_factors) {
  const Fields fields(header, file);
  const auto& architecture = fields.architecture();
  ordered_json config;
  if (architecture == "llama" || architecture == "qwen2") {
    config = llama_config(header, fields, rope_factors);
  } else if (architecture == "gpt2") {
    config = gpt2_config(header, fields);
  } else if (architecture.empty()) {
    fields.fail("its metadata names no architecture (general.architecture). It holds no model.");
  } else {
    fields.fail("it is of the architecture '{}', expected one of llama, qwen2, gpt2, those that are supported.",
                architecture);
  }
  return config.dump(2) + "\n";
}

}  // namespace accelerate::formats
