#include <string_view>

#include "accelerate/error.hpp"
#include "accelerate/models/llama.hpp"
#include "models/bert_config.hpp"
#include "models/check_field.hpp"
#include "models/json_file.hpp"
#include "models/llama_config.hpp"

namespace accelerate::models {
namespace {

using nlohmann::ordered_json;

constexpr auto require = [](bool holds, const char* field, const auto& found, const std::string& expected) { check_field(holds, "LlamaConfig", field, found, expected); };

}  // namespace

void LlamaConfig::validate() const {
  const std::pair<const char*, int64_t> sizes[] = {{"vocab_size", vocab_size}, {"hidden_size", hidden_size}, {"intermediate_size", intermediate_size}, {"num_hidden_layers", num_hidden_layers},
                                                   {"num_attention_heads", num_attention_heads}, {"num_key_value_heads", key_value_heads()}, {"max_position_embeddings", max_position_embeddings}};
  for (const auto& [field, size] : sizes) require(size >= 1, field, size, "at least 1");
  require(num_attention_heads % key_value_heads() == 0, "num_key_value_heads", key_value_heads(), "a divisor of num_attention_heads, which is " + std::to_string(num_attention_heads));
  if (!head_dim) require(hidden_size % num_attention_heads == 0, "hidden_size", hidden_size, "a multiple of num_attention_heads, which is " + std::to_string(num_attention_heads) + ", where head_dim is not given");
  require(head_size() >= 2 && head_size() % 2 == 0, "head_dim", head_size(), "an even number: rotary positions turn pairs of dimensions");
  require(find_activation(hidden_act).has_value(), "hidden_act", "'" + hidden_act + "'", "one of " + known_activations());
  require(initializer_range >= 0, "initializer_range", initializer_range, "0 or more");
  require(rms_norm_eps > 0, "rms_norm_eps", rms_norm_eps, "more than 0");
  require(rope_theta > 0, "rope_theta", rope_theta, "more than 0");
  require(attention_dropout >= 0 && attention_dropout < 1, "attention_dropout", attention_dropout, "a probability from 0 to below 1");
  if (pad_token_id) require(*pad_token_id >= 0 && *pad_token_id < vocab_size, "pad_token_id", *pad_token_id, "an id below vocab_size, which is " + std::to_string(vocab_size));
  const auto& scaling = rope_scaling;
  require(scaling.type == "default" || scaling.type == "linear" || scaling.type == "llama3", "rope_type", "'" + scaling.type + "'", "default, linear or llama3, those that are supported");
  require(scaling.factor >= 1, "rope_scaling.factor", scaling.factor, "1 or more");
  if (scaling.type != "llama3") return;
  require(scaling.low_freq_factor > 0, "rope_scaling.low_freq_factor", scaling.low_freq_factor, "more than 0");
  require(scaling.high_freq_factor > scaling.low_freq_factor, "rope_scaling.high_freq_factor", scaling.high_freq_factor, "more than low_freq_factor, which is " + std::to_string(scaling.low_freq_factor));
  require(scaling.original_max_position_embeddings >= 1, "rope_scaling.original_max_position_embeddings", scaling.original_max_position_embeddings, "at least 1");
}

LlamaConfig LlamaConfig::from_pretrained(const std::filesystem::path& folder) {
  const JsonFile file(config_path(folder));
  std::string model_type = "llama";
  file.read("model_type", model_type);
  if (model_type != "llama") file.fail("model_type", model_type, "'llama'; load it with the class of its architecture");

  LlamaConfig config;
  file.read("vocab_size", config.vocab_size);
  file.read("hidden_size", config.hidden_size);
  file.read("intermediate_size", config.intermediate_size);
  file.read("num_hidden_layers", config.num_hidden_layers);
  file.read("num_attention_heads", config.num_attention_heads);
  file.read("num_key_value_heads", config.num_key_value_heads);
  file.read("head_dim", config.head_dim);
  file.read("hidden_act", config.hidden_act);
  file.read("max_position_embeddings", config.max_position_embeddings);
  file.read("initializer_range", config.initializer_range);
  file.read("rms_norm_eps", config.rms_norm_eps);
  file.read("pad_token_id", config.pad_token_id);
  if (config.pad_token_id == -1) config.pad_token_id.reset();  // how some folders write "none"
  file.read("tie_word_embeddings", config.tie_word_embeddings);
  file.read("rope_theta", config.rope_theta);
  file.read("attention_bias", config.attention_bias);
  file.read("mlp_bias", config.mlp_bias);
  file.read("attention_dropout", config.attention_dropout);
  auto& scaling = config.rope_scaling;
  scaling.original_max_position_embeddings = config.max_position_embeddings;
  // transformers 5 writes rope_parameters with rope_theta inside, earlier versions rope_scaling beside it, with "type" before "rope_type".
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto found = file.root().find(key);
    if (found == file.root().end() || found->is_null()) continue;
    const JsonFile inner = file.at(key);
    inner.read("type", scaling.type);
    inner.read("rope_type", scaling.type);
    inner.read("rope_theta", config.rope_theta);
    inner.read("factor", scaling.factor);
    inner.read("low_freq_factor", scaling.low_freq_factor);
    inner.read("high_freq_factor", scaling.high_freq_factor);
    inner.read("original_max_position_embeddings", scaling.original_max_position_embeddings);
  }
  config.other_fields = file.root().dump();
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError("'" + config_path(folder).string() + "': " + error.what());
  }
  return config;
}

std::string to_json(const LlamaConfig& config, const std::string& architecture, const std::string& dtype) {
  auto json = ordered_json::parse(config.other_fields);
  json["architectures"] = {architecture};
  json["model_type"] = "llama";
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = config.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.num_hidden_layers;
  json["num_attention_heads"] = config.num_attention_heads;
  json["num_key_value_heads"] = config.key_value_heads();
  json["head_dim"] = config.head_size();
  json["hidden_act"] = config.hidden_act;
  json["max_position_embeddings"] = config.max_position_embeddings;
  json["initializer_range"] = config.initializer_range;
  json["rms_norm_eps"] = config.rms_norm_eps;
  json["pad_token_id"] = config.pad_token_id ? ordered_json(*config.pad_token_id) : ordered_json();
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  json["attention_bias"] = config.attention_bias;
  json["mlp_bias"] = config.mlp_bias;
  json["attention_dropout"] = config.attention_dropout;
  // The older form, which all versions read.
  const auto& scaling = config.rope_scaling;
  json.erase("rope_parameters");
  json["rope_theta"] = config.rope_theta;
  json["rope_scaling"] = ordered_json();
  if (scaling.type != "default") json["rope_scaling"] = {{"rope_type", scaling.type}, {"factor", scaling.factor}};
  if (scaling.type == "llama3") {
    json["rope_scaling"]["low_freq_factor"] = scaling.low_freq_factor;
    json["rope_scaling"]["high_freq_factor"] = scaling.high_freq_factor;
    json["rope_scaling"]["original_max_position_embeddings"] = scaling.original_max_position_embeddings;
  }
  json.erase("torch_dtype");  // the old name of the next
  json["dtype"] = dtype;
  return json.dump(2) + "\n";
}

}  // namespace accelerate::models
