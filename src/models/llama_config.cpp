#include <algorithm>
#include <functional>
#include <iterator>

#include "accelerate/models/llama.hpp"
#include "models/activations.hpp"
#include "models/check_field.hpp"
#include "models/json_file.hpp"
#include "models/llama_config.hpp"
#include "models/refused_fields.hpp"
#include "models/rope_config.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

using nlohmann::ordered_json;

constexpr std::pair<const char*, const char*> kFamilies[] = {
    {"llama", "Llama"}, {"mistral", "Mistral"}, {"qwen2", "Qwen2"}, {"mixtral", "Mixtral"}};
constexpr const char* kKnownTypes = "llama, mistral, qwen2 or mixtral";

/// The values that transformers takes where config.json has no such field.
LlamaConfig defaults(const std::string& model_type) {
  LlamaConfig config;
  config.model_type = model_type;
  if (model_type == "mistral" || model_type == "mixtral") {
    config.intermediate_size = 14336;
    config.num_key_value_heads = 8;
    config.max_position_embeddings = 131072;
  }
  if (model_type == "mistral") config.sliding_window = 4096;
  if (model_type == "mixtral") config.rms_norm_eps = 1e-5, config.rope_theta = 1e6, config.num_local_experts = 8;
  if (model_type == "qwen2") {
    config.vocab_size = 151936;
    config.intermediate_size = 22016;
    config.max_position_embeddings = 32768;
    config.num_key_value_heads = 32;
    config.qkv_bias = true;
    config.sliding_window = 4096;
  }
  return config;
}

/// Which layers slide. In transformers all of Mistral's and Mixtral's do or none, and Qwen2 has a switch, a list, and
/// for files without the list the number of the first layer that does.
void read_windows(const JsonFile& file, LlamaConfig& config) {
  if (file.is_null("sliding_window")) config.sliding_window.reset();
  file.read("sliding_window", config.sliding_window);
  const bool slides = config.sliding_window && *config.sliding_window < config.max_position_embeddings;
  const auto listed = file.root().find("layer_types");
  if (listed != file.root().end() && !listed->is_null()) {
    for (const auto& item : *listed) {
      if (!item.is_string()) file.fail("layer_types", *listed, "a list of names");
      const auto name = item.get<std::string>();
      config.layer_types.push_back(name == "attention" ? "full_attention" : name);
    }
    const bool differ = std::adjacent_find(config.layer_types.begin(), config.layer_types.end(),
                                           std::not_equal_to<>()) != config.layer_types.end();
    if (differ && slides && config.model_type != "qwen2")
      file.fail("layer_types", *listed, "the same for all layers, but for model_type qwen2");
  }
  if (config.model_type == "llama") {
    // Here transformers has no window in its masks, but one in its cache: a sequence would depend on how it is cut.
    if (slides && (config.layer_types.empty() || config.layer_types.front() != "full_attention"))
      file.fail(
          "sliding_window", *config.sliding_window,
          fmt::format(
              "null, or at least max_position_embeddings, which is {}: LLaMA has no windows; model_type mistral has",
              config.max_position_embeddings));
    config.sliding_window.reset();
  }
  if (config.model_type != "qwen2") {
    config.layer_types.clear();
    return;
  }
  if (!file.get("use_sliding_window", false)) config.sliding_window.reset();
  if (!config.layer_types.empty()) return;
  const int64_t first = file.get("max_window_layers", int64_t{28});
  for (int64_t i = 0; i < config.num_hidden_layers && config.sliding_window; ++i)
    config.layer_types.emplace_back(i < first ? "full_attention" : "sliding_attention");
}

/// Sets what a file says about rotary positions.
void read_positions(const JsonFile& file, LlamaConfig& config) {
  double share = file.get("partial_rotary_factor", 1.0);
  read_rope(file, config.max_position_embeddings, config.rope_scaling, config.rope_theta, share);
  auto& scaling = config.rope_scaling;
  if (scaling.type == "proportional") {
    scaling.partial_rotary_factor = share;
    return;
  }
  const auto turned = static_cast<double>(config.head_size()) * share, all = static_cast<double>(config.head_size());
  if (scaling.type != "default" && !(turned >= all && turned < all + 1)) {
    // Without scaling transformers ignores the field in these architectures; with it, it fails.
    file.fail("partial_rotary_factor", share, "1: these architectures turn all dimensions of a head");
  }
}

}  // namespace

std::string LlamaConfig::family() const {
  for (const auto& [type, name] : kFamilies)
    if (model_type == type) return name;
  raise<ConfigError>("LlamaConfig: model_type is '{}', expected {}.", model_type, kKnownTypes);
}

void LlamaConfig::validate() const {
  const FieldCheck require{"LlamaConfig"};
  family();
  const std::pair<const char*, int64_t> sizes[] = {{"vocab_size", vocab_size},
                                                   {"hidden_size", hidden_size},
                                                   {"intermediate_size", intermediate_size},
                                                   {"num_hidden_layers", num_hidden_layers},
                                                   {"num_attention_heads", num_attention_heads},
                                                   {"num_key_value_heads", key_value_heads()},
                                                   {"max_position_embeddings", max_position_embeddings}};
  for (const auto& [field, size] : sizes) require(size >= 1, field, size, "at least 1");
  require(num_hidden_layers <= kMostLayers, "num_hidden_layers", num_hidden_layers,
          fmt::format("at most {}", kMostLayers));
  require(num_attention_heads % key_value_heads() == 0, "num_key_value_heads", key_value_heads(),
          fmt::format("a divisor of num_attention_heads, which is {}", num_attention_heads));
  if (!head_dim)
    require(hidden_size % num_attention_heads == 0, "hidden_size", hidden_size,
            fmt::format("a multiple of num_attention_heads, which is {}, where head_dim is not given",
                        num_attention_heads));
  require(head_size() >= 2 && head_size() % 2 == 0, "head_dim", head_size(),
          "an even number: rotary positions turn pairs of dimensions");
  require(find_activation(hidden_act).has_value(), "hidden_act", "'" + hidden_act + "'",
          "one of " + known_activations());
  require(initializer_range >= 0, "initializer_range", initializer_range, "0 or more");
  require(rms_norm_eps > 0, "rms_norm_eps", rms_norm_eps, "more than 0");
  require(rope_theta > 0, "rope_theta", rope_theta, "more than 0");
  require(attention_dropout >= 0 && attention_dropout < 1, "attention_dropout", attention_dropout,
          "a probability from 0 to below 1");
  if (pad_token_id)
    require(*pad_token_id >= 0 && *pad_token_id < vocab_size, "pad_token_id", *pad_token_id,
            fmt::format("an id below vocab_size, which is {}", vocab_size));
  if (sliding_window) require(*sliding_window >= 1, "sliding_window", *sliding_window, "at least 1");
  require(layer_types.empty() || static_cast<int64_t>(layer_types.size()) == num_hidden_layers, "layer_types",
          "a list of " + std::to_string(layer_types.size()),
          fmt::format("one for each of the layers, num_hidden_layers, which is {}", num_hidden_layers));
  for (const auto& type : layer_types)
    require(type == "full_attention" || type == "sliding_attention", "layer_types", "'" + type + "'",
            "full_attention or sliding_attention");
  if (!sliding_window)
    for (const auto& type : layer_types)
      require(type != "sliding_attention", "layer_types", "'sliding_attention'",
              "full_attention where there is no sliding_window");
  require(num_local_experts >= 0, "num_local_experts", num_local_experts, "0 or more");
  if (num_local_experts)
    require(num_experts_per_tok >= 1 && num_experts_per_tok <= num_local_experts, "num_experts_per_tok",
            num_experts_per_tok, fmt::format("1 to num_local_experts, which is {}", num_local_experts));
  rope_scaling.validate(head_size());
}

LlamaConfig LlamaConfig::from_pretrained(const std::filesystem::path& folder) {
  const auto path = config_file(folder);
  JsonFile file(path);
  refuse_foreign_fields(file);
  std::string model_type = "llama";
  file.read("model_type", model_type);
  if (std::none_of(std::begin(kFamilies), std::end(kFamilies),
                   [&](const auto& row) { return model_type == row.first; }))
    file.fail("model_type", model_type,
              fmt::format("{}; load it with AutoModelForCausalLM or the class of its architecture", kKnownTypes));

  if (model_type == "mixtral") file.rename({{"num_experts", "num_local_experts"}});
  LlamaConfig config = defaults(model_type);
  file.read("vocab_size", config.vocab_size);
  file.read("hidden_size", config.hidden_size);
  file.read("intermediate_size", config.intermediate_size);
  config.num_attention_heads = file.size("num_attention_heads", config.num_attention_heads);  // is divided by
  config.num_hidden_layers = file.size("num_hidden_layers", config.num_hidden_layers);
  if (file.is_null("num_key_value_heads")) config.num_key_value_heads.reset();  // a missing key means the default
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
  if (model_type == "llama") {  // the others have them as they have them
    file.read("attention_bias", config.attention_bias);
    file.read("mlp_bias", config.mlp_bias);
  }
  file.read("attention_dropout", config.attention_dropout);
  if (model_type == "mixtral") file.read("num_local_experts", config.num_local_experts);
  file.read("num_experts_per_tok", config.num_experts_per_tok);
  read_windows(file, config);
  read_positions(file, config);
  config.other_fields = file.root().dump();
  return validated(config, path);
}

std::string to_json(const LlamaConfig& config, const std::string& architecture, const std::string& dtype) {
  auto json = parse_fields(config.other_fields);
  json["architectures"] = {architecture};
  json["model_type"] = config.model_type;
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
  write_field(json, "pad_token_id", config.pad_token_id);
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  if (config.model_type == "llama") {
    json["attention_bias"] = config.attention_bias;
    json["mlp_bias"] = config.mlp_bias;
  } else {
    write_field(json, "sliding_window", config.sliding_window);
  }
  if (config.model_type == "qwen2") {
    json["use_sliding_window"] = config.sliding_window.has_value();
    if (config.layer_types.empty()) {
      json["max_window_layers"] = config.sliding_window ? 0 : config.num_hidden_layers;
    } else {
      json["layer_types"] = config.layer_types;
    }
  }
  if (config.num_local_experts) {
    json["num_local_experts"] = config.num_local_experts;
    json["num_experts_per_tok"] = config.num_experts_per_tok;
  }
  json["attention_dropout"] = config.attention_dropout;
  // The older form, which all versions read.
  for (const char* key : {"rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"})
    json.erase(key);
  json["rope_theta"] = config.rope_theta;
  json["rope_scaling"] = to_json(config.rope_scaling);
  json.erase("torch_dtype");  // the old name of the next
  json["dtype"] = dtype;
  return json.dump(2) + "\n";
}

}  // namespace accelerate::models
