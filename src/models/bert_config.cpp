#include <array>
#include <map>
#include <string_view>

#include "accelerate/models/bert.hpp"
#include "models/activations.hpp"
#include "models/bert_config.hpp"
#include "models/check_field.hpp"
#include "models/json_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

using nlohmann::ordered_json;

/// "id2label" is an object from a number, as text, to a name; the numbers must be 0, 1, 2, ...
std::vector<std::string> read_labels(const JsonFile& file, const ordered_json& id2label) {
  const char* const kExpected = "an object of names with the keys \"0\", \"1\", ...";
  if (!id2label.is_object()) file.fail("id2label", id2label, kExpected);
  std::map<std::string, const ordered_json*> names;  // the object itself would be searched from its beginning
  for (const auto& [id, name] : id2label.items()) names.emplace(id, &name);
  std::vector<std::string> labels(id2label.size());
  for (size_t id = 0; id < labels.size(); ++id) {
    const auto found = names.find(std::to_string(id));
    if (found == names.end() || !found->second->is_string()) file.fail("id2label", id2label, kExpected);
    labels[id] = found->second->get<std::string>();
  }
  return labels;
}

/// As each_gpt2_field().
template <class Config, class F> void each_bert_field(Config& config, const F& f) {
  f("vocab_size", config.vocab_size);
  f("hidden_size", config.hidden_size);
  f("num_hidden_layers", config.num_hidden_layers);
  f("num_attention_heads", config.num_attention_heads);
  f("intermediate_size", config.intermediate_size);
  f("max_position_embeddings", config.max_position_embeddings);
  f("type_vocab_size", config.type_vocab_size);
  f("hidden_act", config.hidden_act);
  f("hidden_dropout_prob", config.hidden_dropout_prob);
  f("attention_probs_dropout_prob", config.attention_probs_dropout_prob);
  f("classifier_dropout", config.classifier_dropout);
  f("initializer_range", config.initializer_range);
  f("layer_norm_eps", config.layer_norm_eps);
}

}  // namespace

void BertConfig::set_num_labels(int64_t count) {
  if (count == num_labels()) return;
  if (count < 1) raise<ConfigError>("BertConfig: num_labels is {}, expected at least 1.", count);
  labels.clear();
  for (int64_t id = 0; id < count; ++id) labels.push_back("LABEL_" + std::to_string(id));
}

void BertConfig::validate() const {
  const FieldCheck require{"BertConfig"};
  const std::pair<const char*, int64_t> sizes[] = {{"vocab_size", vocab_size},
                                                   {"hidden_size", hidden_size},
                                                   {"num_hidden_layers", num_hidden_layers},
                                                   {"num_attention_heads", num_attention_heads},
                                                   {"intermediate_size", intermediate_size},
                                                   {"max_position_embeddings", max_position_embeddings},
                                                   {"type_vocab_size", type_vocab_size}};
  for (const auto& [field, size] : sizes) require(size >= 1, field, size, "at least 1");
  require(num_hidden_layers <= kMostLayers, "num_hidden_layers", num_hidden_layers,
          fmt::format("at most {}", kMostLayers));
  require(hidden_size % num_attention_heads == 0, "hidden_size", hidden_size,
          fmt::format("a multiple of num_attention_heads, which is {}", num_attention_heads));
  require(find_activation(hidden_act).has_value(), "hidden_act", "'" + hidden_act + "'",
          "one of " + known_activations());
  const std::pair<const char*, double> probabilities[] = {
      {"hidden_dropout_prob", hidden_dropout_prob},
      {"attention_probs_dropout_prob", attention_probs_dropout_prob},
      {"classifier_dropout", classifier_dropout.value_or(0)}};
  for (const auto& [field, probability] : probabilities)
    require(probability >= 0 && probability < 1, field, probability, "a probability from 0 to below 1");
  require(initializer_range >= 0, "initializer_range", initializer_range, "0 or more");
  require(layer_norm_eps > 0, "layer_norm_eps", layer_norm_eps, "more than 0");
  require(!labels.empty(), "num_labels", 0, "at least 1");
  if (pad_token_id)
    require(*pad_token_id >= 0 && *pad_token_id < vocab_size, "pad_token_id", *pad_token_id,
            fmt::format("an id below vocab_size, which is {}", vocab_size));
}

BertConfig BertConfig::from_pretrained(const std::filesystem::path& folder) {
  const auto path = config_file(folder);
  const JsonFile file(path);
  const auto refuse = [&](const char* key, const std::string& found, const std::string& expected) {
    raise<CheckpointError>("'{}': {} is {}, expected {}.", path.string(), key, found, expected);
  };
  std::string model_type = "bert";
  file.read("model_type", model_type);
  if (model_type != "bert")
    refuse("model_type", "'" + model_type + "'", "'bert'; load it with the class of its architecture");
  std::string positions = "absolute";
  file.read("position_embedding_type", positions);
  if (positions != "absolute")
    refuse("position_embedding_type", "'" + positions + "'", "'absolute', the only one that is supported");
  for (const char* key : {"is_decoder", "add_cross_attention"}) {
    bool set = false;
    file.read(key, set);
    if (set) refuse(key, "true", "false; only the encoder is supported");
  }

  BertConfig config;
  each_bert_field(config, [&](const char* name, auto& field) { file.read(name, field); });
  file.read("problem_type", config.problem_type);
  if (const auto pad = file.root().find("pad_token_id"); pad != file.root().end()) {
    config.pad_token_id.reset();  // null means none, a missing key the default
    file.read("pad_token_id", config.pad_token_id);
  }
  int64_t num_labels = config.num_labels();
  file.read("num_labels", num_labels);
  if (const auto id2label = file.root().find("id2label"); id2label != file.root().end() && !id2label->is_null())
    config.labels = read_labels(file, *id2label);
  constexpr int64_t kMostLabels = 1'000'000;
  if (num_labels < 1 || num_labels > kMostLabels)
    file.fail("num_labels", num_labels, fmt::format("1 to {}", kMostLabels));
  if (file.root().contains("num_labels") || config.labels.empty())
    config.set_num_labels(num_labels);  // wins over names, as in transformers
  config.other_fields = file.root().dump();
  return validated(config, path);
}

std::string to_json(const BertConfig& config, const std::string& architecture, const std::string& dtype) {
  auto json = parse_fields(config.other_fields);
  json["architectures"] = {architecture};
  json["model_type"] = "bert";
  each_bert_field(config, [&](const char* name, const auto& field) { write_field(json, name, field); });
  write_field(json, "pad_token_id", config.pad_token_id);
  json["position_embedding_type"] = "absolute";
  write_field(json, "problem_type", config.problem_type);
  json["id2label"] = ordered_json::object();
  json["label2id"] = ordered_json::object();
  for (size_t id = 0; id < config.labels.size(); ++id) {
    json["id2label"][std::to_string(id)] = config.labels[id];
    json["label2id"][config.labels[id]] = id;
  }
  json.erase("num_labels");   // follows from id2label; both would have to agree
  json.erase("torch_dtype");  // the old name of the next
  json["dtype"] = dtype;
  return json.dump(2) + "\n";
}

}  // namespace accelerate::models
