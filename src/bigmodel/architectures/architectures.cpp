#include "bigmodel/architectures/architectures.hpp"

#include <algorithm>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/config.hpp"
#include "bigmodel/architectures/layers.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using bigmodel::Config;
using bigmodel::OutlinedArchitecture;

struct Known {
  const char* model_type;  ///< as config.json names it
  const char* library;
  const char* family;  ///< what the class names begin with
  OutlinedArchitecture (*build)(const Config& config, const std::string& family);
  const char* body = "";  ///< the name of the model without its head in the class with one, or "": no such class here
  const char* head_class = "";
  std::vector<std::pair<const char*, const char*>> aliases = {};  ///< other names of fields, and their own
};

const Known kKnown[] = {
    {"bert", "transformers", "Bert", bigmodel::bert},
    {"distilbert",
     "transformers",
     "DistilBert",
     bigmodel::distilbert,
     "",
     "",
     {{"hidden_size", "dim"}, {"num_hidden_layers", "n_layers"}}},
    {"gpt2",
     "transformers",
     "GPT2",
     bigmodel::gpt2,
     "transformer",
     "LMHeadModel",
     {{"hidden_size", "n_embd"}, {"max_position_embeddings", "n_positions"}, {"num_hidden_layers", "n_layer"}}},
    {"gpt_neox", "transformers", "GPTNeoX", bigmodel::gpt_neox},
    {"gptj",
     "transformers",
     "GPTJ",
     bigmodel::gptj,
     "",
     "",
     {{"hidden_size", "n_embd"}, {"max_position_embeddings", "n_positions"}, {"num_hidden_layers", "n_layer"}}},
    {"idefics", "transformers", "Idefics", bigmodel::idefics},
    {"llama", "transformers", "Llama", bigmodel::llama, "model", "ForCausalLM"},
    {"mistral", "transformers", "Mistral", bigmodel::llama, "model", "ForCausalLM"},
    {"mixtral",
     "transformers",
     "Mixtral",
     bigmodel::llama,
     "model",
     "ForCausalLM",
     {{"num_experts", "num_local_experts"}}},
    {"opt", "transformers", "OPT", bigmodel::opt},
    {"qwen2", "transformers", "Qwen2", bigmodel::llama, "model", "ForCausalLM"},
    {"qwen3", "transformers", "Qwen3", bigmodel::llama, "model", "ForCausalLM"},
    {"resnet", "transformers", "ResNet", bigmodel::resnet},
    {"roberta", "transformers", "Roberta", bigmodel::bert},
    {"t5",
     "transformers",
     "T5",
     bigmodel::t5,
     "",
     "",
     {{"hidden_size", "d_model"},
      {"num_attention_heads", "num_heads"},
      {"num_hidden_layers", "num_layers"},
      {"head_dim", "d_kv"}}},
    {"vit", "transformers", "ViT", bigmodel::vit},
    {"resnet18", "timm", "resnet18", bigmodel::timm_resnet},
    {"resnet34", "timm", "resnet34", bigmodel::timm_resnet},
    {"resnet50", "timm", "resnet50", bigmodel::timm_resnet},
    {"resnet101", "timm", "resnet101", bigmodel::timm_resnet},
    {"resnet152", "timm", "resnet152", bigmodel::timm_resnet},
};

/// The model inside of one with a language model's head, which has a row for each word as the embedding has.
ModuleTree with_head(ModuleTree body, const Known& known, const std::string& class_name) {
  auto words = body.children.front().parameters.front();
  body.name = known.body;
  auto head = bigmodel::linear("lm_head", words.shape.at(1), words.shape.at(0), false);
  return bigmodel::module("", class_name, {std::move(body), std::move(head)});
}

}  // namespace

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const auto& known : kKnown) names.emplace_back(known.model_type);
  return names;
}

ModelDescription describe_architecture(const std::string& text, const std::string& class_name) {
  Config config(parse_json<nlohmann::json>(text));
  const bool timm = !config.find("model_type") && config.find("architecture");
  const std::string type = config.text(timm ? "architecture" : "model_type", "");
  const auto known = std::find_if(std::begin(kKnown), std::end(kKnown), [&](const Known& k) {
    return type == k.model_type && (std::string_view(k.library) == "timm") == timm;
  });
  if (known == std::end(kKnown)) {
    std::vector<std::string_view> models;
    for (const auto& k : kKnown)
      if ((std::string_view(k.library) == "timm") == timm) models.emplace_back(k.model_type);
    const auto nearest = nearest_name(type, known_architectures());
    raise<ConfigError>(
        "{}{}. Known are: {}.",
        type.empty() ? "the config has no \"model_type\"" : fmt::format("the architecture '{}' is not known", type),
        nearest ? fmt::format(" (did you mean '{}'?)", *nearest) : "", fmt::join(models, ", "));
  }
  for (const auto& [alias, key] : known->aliases) config.rename(alias, key);
  const std::string family = known->family;
  auto [tree, no_split, in_fp32] = known->build(config, family);
  if (config.find("_no_split_modules")) no_split = config.texts("_no_split_modules");
  if (!class_name.empty() && class_name != tree.class_name) {
    const std::string with = *known->body ? family + known->head_class : "";
    if (class_name != with)
      raise<ConfigError>("class '{}': for a config of '{}' expected {}{}.", class_name, type, tree.class_name,
                         with.empty() ? "" : " or " + with);
    tree = with_head(std::move(tree), *known, class_name);
  }
  return {.library = known->library,
          .tree = std::move(tree),
          .no_split_module_classes = std::move(no_split),
          .keep_in_fp32_modules = std::move(in_fp32)};
}

}  // namespace accelerate
