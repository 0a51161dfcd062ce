#include "formats/gguf_config.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "formats/gguf_fields.hpp"
#include "formats/gguf_keys.hpp"
#include "formats/gguf_writer.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

/// Sizes that config.json and the metadata both have, under their names.
struct SizeNames {
  const char *config, *gguf;
};
constexpr SizeNames kLlamaSizes[] = {{"hidden_size", "embedding_length"},
                                     {"intermediate_size", "feed_forward_length"},
                                     {"num_hidden_layers", "block_count"},
                                     {"num_attention_heads", "attention.head_count"},
                                     {"max_position_embeddings", "context_length"}};
constexpr SizeNames kGpt2Sizes[] = {{"n_positions", "context_length"},
                                    {"n_embd", "embedding_length"},
                                    {"n_layer", "block_count"},
                                    {"n_head", "attention.head_count"},
                                    {"n_inner", "feed_forward_length"}};

/// LLaMA 3's stretching of slow frequencies, by what frequency i is divided.
constexpr double kLlama3Low = 1, kLlama3High = 4, kLlama3Context = 8192;

double llama3_factor(int64_t i, double factor, double theta, int64_t head_size) {
  const double waves = kLlama3Context *
                       std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_size)) /
                       (2 * std::numbers::pi);
  const double share = std::clamp((waves - kLlama3Low) / (kLlama3High - kLlama3Low), 0.0, 1.0);
  return 1 / ((1 - share) / factor + share);
}

// --- config.json of the metadata
// -------------------------------------------------------------------------------------------------------------------

int64_t vocabulary_size(const GgufHeader& header, const GgufFields& fields) {
  const auto tokens = std::ranges::find(header.entries, "tokenizer.ggml.tokens", &GgufEntry::key);
  const bool has_tokens = tokens != header.entries.end();
  if (const auto* embeddings = fields.tensor("token_embd.weight"); embeddings && embeddings->shape.size() == 2) {
    const int64_t rows = embeddings->shape[0];
    if (has_tokens && tokens->elements > rows)
      fields.fail(
          "its vocabulary has {} tokens, and its embeddings {} rows, expected one for each token. Is the "
          "vocabulary of another model?",
          tokens->elements, rows);
    return rows;
  }
  return has_tokens ? tokens->elements : fields.need_integer("vocab_size");
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
ordered_json llama3_scaling(const GgufFields& fields, const GgufTensor& factors, const float* values, double theta,
                            int64_t head_size) {
  constexpr double kTolerance = 1e-3;
  const auto count = factors.row();
  if (factors.shape.size() != 1 || count != head_size / 2)
    fields.fail("'rope_freqs.weight' has {} factors, expected one for each of the {} frequencies.", count,
                head_size / 2);
  const double factor = *std::max_element(values, values + count);
  for (int64_t i = 0; i < count; ++i) {
    const double expected = llama3_factor(i, factor, theta, head_size);
    if (!(std::abs(values[i] - expected) <= kTolerance * expected))
      fields.fail(
          "'rope_freqs.weight' holds factors of rotary frequencies that are not LLaMA 3's ({} at {}, expected {}), and "
          "no other form is supported.",
          values[i], i, expected);
  }
  return {{"rope_type", "llama3"},
          {"factor", factor},
          {"low_freq_factor", kLlama3Low},
          {"high_freq_factor", kLlama3High},
          {"original_max_position_embeddings", static_cast<int64_t>(kLlama3Context)}};
}

/// As llama.cpp reads it: a factor without a type is a linear one, 0 is none, and files of 2023 have it under another
/// name. Null: frequencies are as they are.
ordered_json rope_scaling(const GgufFields& fields) {
  const auto* named = fields.text("rope.scaling.type");
  const std::string type = named ? *named : "linear";
  auto factor = fields.number("rope.scaling.factor");
  if (!factor) factor = fields.number("rope.scale_linear");
  if (type != "none" && type != "linear" && type != "yarn")
    fields.fail("rope.scaling.type is '{}', expected none, linear or yarn: no other form is supported.", type);
  if (type == "none" || factor.value_or(0) == 0 || factor == 1) return nullptr;
  ordered_json scaling = {{"rope_type", type}, {"factor", *factor}};
  if (const auto original = fields.integer("rope.scaling.original_context_length"); original && type == "yarn")
    scaling["original_max_position_embeddings"] = *original;
  return scaling;
}

/// llama.cpp lets these architectures see all tokens, so that files are of models whose window is as long as their
/// context, or are meant for another reader.
void check_window(const GgufFields& fields) {
  const auto window = fields.integer("attention.sliding_window").value_or(0);
  if (window != 0 && window < fields.need_integer("context_length"))
    fields.fail(
        "'{}.attention.sliding_window' is {}, fewer tokens than the context_length: attention of that kind is not "
        "supported in this architecture. Use the model's Hugging Face folder.",
        fields.architecture(), window);
}

/// A model here has one size of heads, all of whose dimensions are turned.
void check_head_size(const GgufFields& fields, int64_t head_size) {
  for (const char* key : {"attention.value_length", "rope.dimension_count"})
    if (const auto size = fields.integer(key); size && *size != head_size)
      fields.fail(
          "'{}.{}' is {}, and heads have the size {}: models of this architecture with other values or with dimensions "
          "that are not turned are not supported.",
          fields.architecture(), key, *size, head_size);
}

ordered_json llama_config(const GgufHeader& header, const GgufFields& fields, const float* rope_factors) {
  const auto experts = fields.integer("expert_count").value_or(0);
  const bool qwen = fields.architecture() == "qwen2", mixtral = experts > 0;
  ordered_json config;
  config["architectures"] = {qwen ? "Qwen2ForCausalLM" : mixtral ? "MixtralForCausalLM" : "LlamaForCausalLM"};
  config["model_type"] = qwen ? "qwen2" : mixtral ? "mixtral" : "llama";
  config["vocab_size"] = vocabulary_size(header, fields);
  for (const auto& [field, key] : kLlamaSizes) config[field] = fields.need_integer(key);
  config["num_key_value_heads"] = fields.key_value_heads();
  const auto head_size =
      fields.integer("attention.key_length")
          .value_or(fields.integer("rope.dimension_count")
                        .value_or(fields.need_integer("embedding_length") / std::max<int64_t>(fields.heads(), 1)));
  check_head_size(fields, head_size);
  check_window(fields);
  config["head_dim"] = head_size;
  config["hidden_act"] = "silu";
  config["rms_norm_eps"] = fields.need_number_above_0("attention.layer_norm_rms_epsilon");
  const double theta = fields.number_above_0("rope.freq_base").value_or(10000);
  config["rope_theta"] = theta;
  const auto scaling = rope_scaling(fields);
  if (rope_factors) {
    if (!scaling.is_null())
      fields.fail("it stretches rotary frequencies twice, by 'rope_freqs.weight' and by rope.scaling ({}).",
                  scaling.dump());
    config["rope_scaling"] =
        llama3_scaling(fields, *fields.tensor("rope_freqs.weight"), rope_factors, theta, head_size);
  } else if (!scaling.is_null()) {
    config["rope_scaling"] = scaling;
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

ordered_json gpt2_config(const GgufHeader& header, const GgufFields& fields) {
  for (const auto& [key, only] :
       {std::pair("attention.head_count_kv", fields.heads()),
        {"attention.key_length", fields.need_integer("embedding_length") / std::max<int64_t>(fields.heads(), 1)}})
    if (const auto found = fields.integer(key); found && *found != only)
      fields.fail("'gpt2.{}' is {}, expected {}: no other GPT-2 is supported.", key, *found, only);
  ordered_json config;
  config["architectures"] = {"GPT2LMHeadModel"};
  config["model_type"] = "gpt2";
  config["vocab_size"] = vocabulary_size(header, fields);
  for (const auto& [field, key] : kGpt2Sizes) config[field] = fields.need_integer(key);
  config["activation_function"] = "gelu_new";
  config["layer_norm_epsilon"] = fields.need_number_above_0("attention.layer_norm_epsilon");
  config["tie_word_embeddings"] = fields.tensor("output.weight") == nullptr;
  add_special_tokens(config, header);
  return config;
}

// --- the metadata of config.json
// -------------------------------------------------------------------------------------------------------------------

/// The fields of a config.json, with their types checked.
class ConfigFields {
 public:
  ConfigFields(const json& config, const std::string& source) : config_(config), source_(source) {}

  /// Null where it is missing.
  const json& at(const std::string& field) const {
    static const json kNull;
    const auto found = config_.find(field);
    return found == config_.end() ? kNull : *found;
  }
  [[noreturn]] void fail(const std::string& field, const std::string& expected) const {
    raise<CheckpointError>("'{}': {} is {}, expected {}.", source_, field, show_json(at(field)), expected);
  }
  std::optional<int64_t> size(const std::string& field) const {
    if (at(field).is_null()) return std::nullopt;
    const auto number = whole_number(at(field));
    if (!number || *number < 1 || *number > INT32_MAX) fail(field, "a size");
    return number;
  }
  int64_t need_size(const std::string& field) const {
    const auto found = size(field);
    if (!found) fail(field, "a size, which the model has");
    return *found;
  }
  double number(const std::string& field, std::optional<double> missing = {}) const {
    if (at(field).is_null() && missing) return *missing;
    if (!at(field).is_number() || !(at(field).get<double>() > 0)) fail(field, "a number above 0");
    return at(field).get<double>();
  }
  bool flag(const std::string& field, bool missing) const {
    if (at(field).is_null()) return missing;
    if (!at(field).is_boolean()) fail(field, "true or false");
    return at(field).get<bool>();
  }
  std::string text(const std::string& field, const std::string& missing) const {
    if (at(field).is_null()) return missing;
    if (!at(field).is_string()) fail(field, "a text");
    return at(field).get<std::string>();
  }
  /// A value that the format has no field for has to be the one that every program takes it to be.
  void expect(const std::string& field, const json& only) const {
    if (!at(field).is_null() && at(field) != only)
      fail(field, show_json(only) + ", the only one that a .gguf file of this architecture can have");
  }

 private:
  const json& config_;
  const std::string& source_;
};

void put_size(GgufModel& model, const std::string& key, int64_t size) {
  model.entries.push_back(gguf_entry(model.form.architecture + "." + key, static_cast<uint32_t>(size)));
}
void put_number(GgufModel& model, const std::string& key, double number) {
  model.entries.push_back(gguf_entry(model.form.architecture + "." + key, static_cast<float>(number)));
}

void put_rope(GgufModel& model, const ConfigFields& fields, int64_t head_size, double usual_theta,
              const std::string& source) {
  const auto empty = json::object();
  const char* const key = fields.at("rope_scaling").empty() ? "rope_parameters" : "rope_scaling";
  const auto& scaling = fields.at(key).empty() ? empty : fields.at(key);
  if (!scaling.is_object()) fields.fail(key, "an object");
  const std::string inner = source + ": " + key;
  const ConfigFields rope(scaling, inner);
  for (const auto& item : scaling)
    if (item.is_object()) fields.fail(key, "one set of parameters: a .gguf file has one for all layers");
  fields.expect("partial_rotary_factor", 1.0);
  rope.expect("partial_rotary_factor", 1.0);
  const double theta = rope.number("rope_theta", fields.number("rope_theta", usual_theta));
  put_size(model, "rope.dimension_count", head_size);
  put_number(model, "rope.freq_base", theta);
  const auto type = rope.text("rope_type", rope.text("type", "default"));
  const auto put_type = [&] {
    model.entries.push_back(gguf_entry(model.form.architecture + ".rope.scaling.type", type));
  };
  if (type == "default") return;
  if (type == "linear") {
    put_type();
    put_number(model, "rope.scaling.factor", rope.number("factor"));
  } else if (type == "yarn") {
    // Others would be llama.cpp's own way to say it, which differs between its versions.
    const std::pair<const char*, json> usual[] = {{"attention_factor", nullptr},
                                                  {"mscale", 0},
                                                  {"mscale_all_dim", 0},
                                                  {"beta_fast", 32},
                                                  {"beta_slow", 1},
                                                  {"truncate", true}};
    for (const auto& [field, only] : usual) rope.expect(field, only);
    const auto positions = fields.need_size("max_position_embeddings");
    const int64_t original = fields.size("original_max_position_embeddings")
                                 .value_or(rope.size("original_max_position_embeddings").value_or(positions));
    put_type();
    put_number(model, "rope.scaling.factor",
               rope.number("factor", static_cast<double>(positions) / static_cast<double>(original)));
    put_size(model, "rope.scaling.original_context_length", original);
  } else if (type == "llama3") {
    for (const auto& [field, only] : {std::pair("low_freq_factor", kLlama3Low),
                                      {"high_freq_factor", kLlama3High},
                                      {"original_max_position_embeddings", kLlama3Context}})
      rope.expect(field, only);
    for (int64_t i = 0; i < head_size / 2; ++i)
      model.rope_factors.push_back(static_cast<float>(llama3_factor(i, rope.number("factor"), theta, head_size)));
  } else {
    rope.fail(rope.at("rope_type").is_null() ? "type" : "rope_type",
              "default, linear, yarn or llama3, those that a .gguf file can have");
  }
}

void put_llama(GgufModel& model, const ConfigFields& fields, const std::string& type, const std::string& source) {
  auto& form = model.form;
  for (const auto& [field, key] : kLlamaSizes) put_size(model, key, fields.need_size(field));
  form.layers = fields.need_size("num_hidden_layers");
  form.heads = fields.need_size("num_attention_heads");
  // For all families but LLaMA, transformers takes a number of its own where the field is missing.
  form.key_value_heads = type == "llama" ? fields.size("num_key_value_heads").value_or(form.heads)
                                         : fields.need_size("num_key_value_heads");
  const int64_t head_size = fields.size("head_dim").value_or(fields.need_size("hidden_size") / form.heads);
  put_size(model, "attention.head_count_kv", form.key_value_heads);
  put_size(model, "attention.key_length", head_size);
  put_size(model, "attention.value_length", head_size);
  put_number(model, "attention.layer_norm_rms_epsilon", fields.number("rms_norm_eps"));
  const std::pair<const char*, json> usual[] = {{"hidden_act", "silu"}, {"mlp_bias", false}, {"is_causal", true}};
  for (const auto& [field, only] : usual) fields.expect(field, only);
  if (type == "mixtral") {
    form.experts = fields.size("num_local_experts").value_or(fields.size("num_experts").value_or(8));
    put_size(model, "expert_count", form.experts);
    put_size(model, "expert_used_count", fields.size("num_experts_per_tok").value_or(2));
  }
  put_rope(model, fields, head_size, type == "mixtral" ? 1e6 : 1e4, source);
  const auto window = fields.size("sliding_window");
  if (window && *window < fields.need_size("max_position_embeddings") && type != "llama" &&
      (type != "qwen2" || fields.flag("use_sliding_window", false)))
    model.notes.push_back(fmt::format(
        "A .gguf file of this architecture has no field for sliding_window, {} in config.json: beyond so many tokens "
        "its attention sees all that came before.",
        *window));
  form.tied = fields.flag("tie_word_embeddings", false);
}

void put_gpt2(GgufModel& model, const ConfigFields& fields) {
  auto& form = model.form;
  for (const auto& [field, key] : kGpt2Sizes)
    put_size(model, key,
             field == std::string_view("n_inner") ? fields.size(field).value_or(4 * fields.need_size("n_embd"))
                                                  : fields.need_size(field));
  form.layers = fields.need_size("n_layer");
  form.heads = form.key_value_heads = fields.need_size("n_head");
  put_number(model, "attention.layer_norm_epsilon", fields.number("layer_norm_epsilon", 1e-5));
  const std::pair<const char*, json> usual[] = {{"activation_function", "gelu_new"},
                                                {"scale_attn_weights", true},
                                                {"scale_attn_by_inverse_layer_idx", false},
                                                {"add_cross_attention", false},
                                                {"is_causal", true}};
  for (const auto& [field, only] : usual) fields.expect(field, only);
  form.tied = fields.flag("tie_word_embeddings", true);
}

}  // namespace

GgufModel gguf_model(const json& config, const std::string& source) {
  const ConfigFields fields(config, source);
  const auto type = fields.text("model_type", "");
  const bool llama = type == "llama" || type == "mistral" || type == "mixtral";
  if (!llama && type != "qwen2" && type != "gpt2")
    raise<ConfigError>(
        "'{}': model_type is {}, expected llama, mistral, mixtral, qwen2 or gpt2: of other architectures no .gguf "
        "files are made. Convert it with llama.cpp's convert_hf_to_gguf.py, or choose nf4, fp4 or int8, which keep "
        "Hugging Face's form",
        source, show_json(fields.at("model_type")));
  GgufModel model{.form = {.architecture = llama ? "llama" : type}};
  model.vocabulary = fields.need_size("vocab_size");
  put_size(model, "vocab_size", model.vocabulary);
  if (type == "gpt2") put_gpt2(model, fields);
  else put_llama(model, fields, type, source);
  return model;
}

std::string gguf_config_json(const GgufHeader& header, const std::string& file, const float* rope_factors) {
  const GgufFields fields(header, file);
  const auto& architecture = fields.architecture();
  ordered_json config;
  if (architecture == "llama" || architecture == "qwen2" || architecture == "gpt2")
    check_gguf_keys(header.metadata, fields);
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
