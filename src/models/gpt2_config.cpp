#include "models/gpt2_config.hpp"
#include "models/activations.hpp"
#include "models/check_field.hpp"
#include "models/json_file.hpp"
#include "models/refused_fields.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

/// The fields that config.json has as they are. @tparam Config  const or not  @param f  (name, field)
template <class Config, class F> void each_gpt2_field(Config& config, const F& f) {
  f("vocab_size", config.vocab_size);
  f("n_positions", config.n_positions);
  f("n_embd", config.n_embd);
  f("n_layer", config.n_layer);
  f("n_head", config.n_head);
  f("n_inner", config.n_inner);
  f("activation_function", config.activation_function);
  f("resid_pdrop", config.resid_pdrop);
  f("embd_pdrop", config.embd_pdrop);
  f("attn_pdrop", config.attn_pdrop);
  f("layer_norm_epsilon", config.layer_norm_epsilon);
  f("initializer_range", config.initializer_range);
  f("scale_attn_weights", config.scale_attn_weights);
  f("scale_attn_by_inverse_layer_idx", config.scale_attn_by_inverse_layer_idx);
  f("tie_word_embeddings", config.tie_word_embeddings);
}

}  // namespace

void rename_gpt2_fields(JsonFile& file) {
  file.rename({{"hidden_size", "n_embd"},
               {"num_hidden_layers", "n_layer"},
               {"num_attention_heads", "n_head"},
               {"max_position_embeddings", "n_positions"}});
}

void GPT2Config::validate() const {
  const FieldCheck require{"GPT2Config"};
  const std::pair<const char*, int64_t> sizes[] = {{"vocab_size", vocab_size}, {"n_positions", n_positions},
                                                   {"n_embd", n_embd},         {"n_layer", n_layer},
                                                   {"n_head", n_head},         {"n_inner", inner_size()}};
  for (const auto& [field, size] : sizes) require(size >= 1, field, size, "at least 1");
  require(n_embd % n_head == 0, "n_embd", n_embd, fmt::format("a multiple of n_head, which is {}", n_head));
  require(find_activation(activation_function).has_value(), "activation_function", "'" + activation_function + "'",
          "one of " + known_activations());
  const std::pair<const char*, double> probabilities[] = {
      {"resid_pdrop", resid_pdrop}, {"embd_pdrop", embd_pdrop}, {"attn_pdrop", attn_pdrop}};
  for (const auto& [field, probability] : probabilities)
    require(probability >= 0 && probability < 1, field, probability, "a probability from 0 to below 1");
  require(n_layer <= kMostLayers, "n_layer", n_layer, fmt::format("at most {}", kMostLayers));
  require(initializer_range >= 0, "initializer_range", initializer_range, "0 or more");
  require(layer_norm_epsilon > 0, "layer_norm_epsilon", layer_norm_epsilon, "more than 0");
}

GPT2Config GPT2Config::from_pretrained(const std::filesystem::path& folder) {
  const auto path = config_file(folder);
  JsonFile file(path);
  rename_gpt2_fields(file);
  std::string model_type = "gpt2";
  file.read("model_type", model_type);
  if (model_type != "gpt2") file.fail("model_type", model_type, "'gpt2'; load it with the class of its architecture");
  refuse_foreign_fields(file);
  bool cross_attention = false;
  file.read("add_cross_attention", cross_attention);
  if (cross_attention) file.fail("add_cross_attention", true, "false; only the decoder alone is supported");
  GPT2Config config;
  each_gpt2_field(config, [&](const char* name, auto& field) { file.read(name, field); });
  config.other_fields = file.root().dump();
  return validated(config, path);
}

std::string to_json(const GPT2Config& config, const std::string& architecture, const std::string& dtype) {
  auto json = parse_fields(config.other_fields);
  json["architectures"] = {architecture};
  json["model_type"] = "gpt2";
  each_gpt2_field(config, [&](const char* name, const auto& field) { write_field(json, name, field); });
  json.erase("torch_dtype");  // the old name of the next
  json["dtype"] = dtype;
  return json.dump(2) + "\n";
}

}  // namespace accelerate::models
