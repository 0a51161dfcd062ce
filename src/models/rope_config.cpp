#include "models/rope_config.hpp"

#include <algorithm>
#include <map>

#include "models/check_field.hpp"
#include "utils/raise.hpp"
#include "utils/strings_of.hpp"

namespace accelerate::models {
namespace {

using nlohmann::ordered_json;

/// Types, and the fields that they can't do without. Those of longrope and yarn for the original context have a
/// fallback.
const std::map<std::string, std::vector<const char*>> kTypes = {
    {"default", {}},
    {"linear", {"factor"}},
    {"dynamic", {"factor"}},
    {"yarn", {}},
    {"longrope", {"short_factor", "long_factor"}},
    {"llama3", {"factor", "low_freq_factor", "high_freq_factor"}},
    {"proportional", {}}};

std::string known_types() {
  return fmt::format("{}", fmt::join(strings_of(kTypes, [](const auto& one) { return one.first; }), ", "));
}

/// rope_scaling, or where that is missing or empty rope_parameters; null where there is neither.
const char* rope_key(const JsonFile& file) {
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (const auto found = file.root().find(key); found != file.root().end() && !found->empty())
      return key;  // null is empty too
  return nullptr;
}

/// A factor of 0 means the default, as in transformers.
void read_beta(const JsonFile& inner, const char* key, double& value) {
  if (const double found = inner.get(key, 0.0); found != 0) value = found;
}

}  // namespace

void LlamaRopeScaling::validate(std::optional<int64_t> dimensions) const {
  const FieldCheck require{"LlamaConfig"};
  require(kTypes.contains(type), "rope_type", "'" + type + "'",
          fmt::format("one of {}, those that are supported", known_types()));
  require(factor > 0, "rope_scaling.factor", factor, "more than 0");
  if (type == "llama3") {
    require(low_freq_factor > 0, "rope_scaling.low_freq_factor", low_freq_factor, "more than 0");
    require(high_freq_factor > low_freq_factor, "rope_scaling.high_freq_factor", high_freq_factor,
            fmt::format("more than low_freq_factor, which is {}", low_freq_factor));
  }
  if (type == "llama3" || type == "yarn" || type == "longrope")
    require(original_max_position_embeddings >= 1, "rope_scaling.original_max_position_embeddings",
            original_max_position_embeddings, "at least 1");
  if (type == "yarn") {
    require(beta_fast > 0, "rope_scaling.beta_fast", beta_fast, "more than 0");
    require(beta_slow > 0, "rope_scaling.beta_slow", beta_slow, "more than 0");
  }
  if (type == "longrope")
    require(original_max_position_embeddings >= 2 || attention_factor || factor <= 1,
            "rope_scaling.original_max_position_embeddings", original_max_position_embeddings, "at least 2");
  if (type == "proportional")
    require(partial_rotary_factor >= 0 && partial_rotary_factor <= 1, "partial_rotary_factor", partial_rotary_factor,
            "0 to 1");
  if (!dimensions) return;
  if (type == "dynamic")
    require(*dimensions > 2, "head_dim", *dimensions, "more than 2 turned dimensions, where rope_type is dynamic");
  if (type == "yarn" || type == "proportional")
    require(*dimensions % 2 == 0, "head_dim", *dimensions,
            "an even number of turned dimensions, where rope_type is " + type);
  if (type != "longrope") return;
  const auto wanted = static_cast<size_t>((*dimensions + 1) / 2);
  for (const auto& [name, list] :
       {std::pair("rope_scaling.short_factor", &short_factor), std::pair("rope_scaling.long_factor", &long_factor)}) {
    require(list->size() == wanted, name, "a list of " + std::to_string(list->size()),
            fmt::format("one number for each of the {} frequencies", wanted));
    require(std::all_of(list->begin(), list->end(), [](double x) { return x > 0; }), name,
            "a list with a number that is not above 0", "numbers above 0");
  }
}

void read_rope(const JsonFile& file, int64_t max_positions, LlamaRopeScaling& scaling, double& theta, double& share) {
  scaling.original_max_position_embeddings = max_positions;
  const char* const key = rope_key(file);
  if (!key) return;
  const JsonFile inner = file.at(key);
  for (const auto& item : inner.root())
    if (item.is_object())
      file.fail(key, inner.root(), "one set of parameters: one for each type of layers is not supported");
  inner.read("type", scaling.type);
  inner.read("rope_type", scaling.type);
  inner.read("rope_theta", theta);
  inner.read("partial_rotary_factor", share);
  const auto needed = kTypes.find(scaling.type);
  if (needed == kTypes.end())
    file.fail(std::string(key) + ".rope_type", scaling.type,
              fmt::format("one of {}, those that are supported", known_types()));
  for (const char* field : needed->second)
    if (!inner.root().contains(field) || inner.root()[field].is_null())
      file.fail(fmt::format("{}.{}", key, field), nullptr,
                fmt::format("a value, which rope_type {} needs", scaling.type));
  if (scaling.type == "llama3" || scaling.type == "yarn" || scaling.type == "longrope") {
    inner.read("original_max_position_embeddings", scaling.original_max_position_embeddings);
    // Wins, as in transformers.
    file.read("original_max_position_embeddings", scaling.original_max_position_embeddings);
  }
  // The factor by which the context grows, if nothing else is said.
  if (scaling.type == "yarn" || scaling.type == "longrope")
    scaling.factor = static_cast<double>(max_positions) /
                     static_cast<double>(std::max<int64_t>(scaling.original_max_position_embeddings, 1));
  inner.read("factor", scaling.factor);
  inner.read("low_freq_factor", scaling.low_freq_factor);
  inner.read("high_freq_factor", scaling.high_freq_factor);
  inner.read("attention_factor", scaling.attention_factor);
  inner.read("mscale", scaling.mscale);
  inner.read("mscale_all_dim", scaling.mscale_all_dim);
  read_beta(inner, "beta_fast", scaling.beta_fast);
  read_beta(inner, "beta_slow", scaling.beta_slow);
  inner.read("truncate", scaling.truncate);
  scaling.short_factor = inner.numbers("short_factor");
  scaling.long_factor = inner.numbers("long_factor");
}

ordered_json to_json(const LlamaRopeScaling& scaling) {
  if (scaling.type == "default") return {};
  ordered_json json = {{"rope_type", scaling.type}, {"factor", scaling.factor}};
  if (scaling.type == "llama3") {
    json["low_freq_factor"] = scaling.low_freq_factor;
    json["high_freq_factor"] = scaling.high_freq_factor;
  }
  if (scaling.type == "llama3" || scaling.type == "yarn" || scaling.type == "longrope")
    json["original_max_position_embeddings"] = scaling.original_max_position_embeddings;
  if (scaling.attention_factor) json["attention_factor"] = *scaling.attention_factor;
  if (scaling.type == "yarn") {
    json["beta_fast"] = scaling.beta_fast;
    json["beta_slow"] = scaling.beta_slow;
    json["truncate"] = scaling.truncate;
    if (scaling.mscale != 0 && scaling.mscale_all_dim != 0)
      json["mscale"] = scaling.mscale, json["mscale_all_dim"] = scaling.mscale_all_dim;
  }
  if (scaling.type == "longrope")
    json["short_factor"] = scaling.short_factor, json["long_factor"] = scaling.long_factor;
  if (scaling.type == "proportional") json["partial_rotary_factor"] = scaling.partial_rotary_factor;
  return json;
}

}  // namespace accelerate::models
