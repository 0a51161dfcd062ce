#include <set>

#include "accelerate/models/generate.hpp"
#include "models/check_field.hpp"
#include "models/json_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

void read_end_tokens(const JsonFile& file, std::vector<int64_t>& ids) {
  const auto found = file.root().find("eos_token_id");
  if (found == file.root().end() || found->is_null()) return;
  ids.clear();
  for (const auto& id : found->is_array() ? *found : ordered_json::array({*found})) {
    const auto number = whole_number(id);
    if (!number) file.fail("eos_token_id", *found, "an id or a list of ids");
    ids.push_back(*number);
  }
}

/// Fields that say nothing about which tokens come. A field in neither list changes the result, unless its value is one
/// that switches it off.
const std::set<std::string>& fields_without_effect() {
  static const std::set<std::string> names = {"_from_model_config",
                                              "transformers_version",
                                              "bos_token_id",
                                              "decoder_start_token_id",
                                              "use_cache",
                                              "cache_implementation",
                                              "cache_config",
                                              "return_dict_in_generate",
                                              "output_attentions",
                                              "output_hidden_states",
                                              "output_scores",
                                              "output_logits",
                                              "trust_remote_code",
                                              "max_matching_ngram_size",
                                              "low_memory",
                                              "num_assistant_tokens",
                                              "num_assistant_tokens_schedule",
                                              "assistant_confidence_threshold",
                                              "prompt_lookup_num_tokens",
                                              "remove_invalid_values",
                                              "token_healing",
                                              "top_h",
                                              "disable_compile",
                                              "compile_config",
                                              "prefill_chunk_size",
                                              "is_assistant",
                                              "target_lookbehind",
                                              "assistant_lookbehind",
                                              "assistant_early_exit",
                                              "use_model_defaults",
                                              "generation_kwargs",
                                              "diversity_penalty"};
  return names;
}

}  // namespace

void GenerationConfig::validate() const {
  const FieldCheck require{"GenerationConfig"};
  if (max_new_tokens) require(*max_new_tokens >= 1, "max_new_tokens", *max_new_tokens, "at least 1");
  require(min_new_tokens >= 0, "min_new_tokens", min_new_tokens, "0 or more");
  require(num_beams >= 1, "num_beams", num_beams, "at least 1");
  require(temperature > 0, "temperature", temperature, "more than 0; for the likeliest tokens set do_sample = false");
  require(top_k >= 0, "top_k", top_k, "0 or more");
  require(top_p > 0 && top_p <= 1, "top_p", top_p, "above 0, at most 1");
  require(repetition_penalty > 0, "repetition_penalty", repetition_penalty, "more than 0");
  for (const auto id : eos_token_id) require(id >= 0, "eos_token_id", id, "ids of tokens");
  if (pad_token_id) require(*pad_token_id >= 0, "pad_token_id", *pad_token_id, "the id of a token");
  for (const auto& stop : stop_strings) require(!stop.empty(), "stop_strings", "an empty one", "texts that can appear");
}

GenerationConfig GenerationConfig::from_pretrained(const fs::path& folder) {
  GenerationConfig config;
  const bool own_file = folder.extension() != ".gguf" && is_there(folder / "generation_config.json");
  const JsonFile file(own_file ? folder / "generation_config.json" : config_file(folder));
  read_end_tokens(file, config.eos_token_id);
  file.read("pad_token_id", config.pad_token_id);
  if (config.pad_token_id && *config.pad_token_id < 0) config.pad_token_id.reset();
  if (!own_file) return config;
  file.read("max_new_tokens", config.max_new_tokens);
  file.read("max_length", config.max_length);
  file.read("min_new_tokens", config.min_new_tokens);
  file.read("do_sample", config.do_sample);
  file.read("num_beams", config.num_beams);
  file.read("temperature", config.temperature);
  file.read("top_k", config.top_k);
  file.read("top_p", config.top_p);
  file.read("repetition_penalty", config.repetition_penalty);
  file.read("length_penalty", config.length_penalty);
  if (const auto found = file.root().find("early_stopping"); found != file.root().end() && !found->is_null()) {
    if (!found->is_boolean() && *found != "never") file.fail("early_stopping", *found, "true, false or \"never\"");
    config.early_stopping = !found->is_boolean() ? EarlyStopping::never
                            : found->get<bool>() ? EarlyStopping::yes
                                                 : EarlyStopping::no;
  }
  if (const auto found = file.root().find("stop_strings"); found != file.root().end() && !found->is_null()) {
    for (const auto& stop : found->is_array() ? *found : ordered_json::array({*found})) {
      if (!stop.is_string()) file.fail("stop_strings", *found, "a text or a list of texts");
      config.stop_strings.push_back(stop.get<std::string>());
    }
  }
  static const std::set<std::string> known = {"eos_token_id",   "pad_token_id", "max_new_tokens",     "max_length",
                                              "min_new_tokens", "do_sample",    "num_beams",          "temperature",
                                              "top_k",          "top_p",        "repetition_penalty", "length_penalty",
                                              "early_stopping", "stop_strings"};
  for (const auto& [name, value] : file.root().items()) {
    if (known.contains(name) || fields_without_effect().contains(name)) continue;
    const bool off = value.is_null() || value == false || value == 0 || value == 1 || value.empty();
    if (!off) file.fail(name, value, "nothing: this way to generate is not supported. Remove the field");
  }
  try {
    config.validate();
  } catch (const ConfigError& error) {
    raise<CheckpointError>("'{}': {}", (folder / "generation_config.json").string(), error.what());
  }
  return config;
}

}  // namespace accelerate::models
