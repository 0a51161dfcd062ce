#include "accelerate/models/auto_model.hpp"

#include <algorithm>

#include <torch/nn/module.h>

#include "accelerate/residency/deferred.hpp"
#include "models/architecture.hpp"
#include "models/auto_load.hpp"
#include "models/auto_save.hpp"
#include "models/json_file.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

/// The first row of a model type holds for a config.json without `architectures`.
struct ArchitectureRow {
  const char* model_type;
  const char* class_name;
  BuildArchitecture build;
};
constexpr ArchitectureRow kArchitectures[] = {
    {"bert", "BertModel", build_bert},
    {"bert", "BertForSequenceClassification", build_bert},
    {"bert", "BertForMaskedLM", build_bert},  // BertModel; the head of its training is left over
    {"bert", "BertForPreTraining", build_bert},
    {"efficientnet_lite", "efficientnet_lite0", build_efficientnet_lite},
    {"gpt2", "GPT2LMHeadModel", build_gpt2},
    {"gptj", "GPTJForCausalLM", build_gptj},
    {"gpt_neox", "GPTNeoXForCausalLM", build_gpt_neox},
    {"llama", "LlamaForCausalLM", build_llama},
    {"mistral", "MistralForCausalLM", build_llama},
    {"mixtral", "MixtralForCausalLM", build_llama},
    {"opt", "OPTForCausalLM", build_opt},
    {"qwen2", "Qwen2ForCausalLM", build_llama},
    {"resnet", "ResNetForImageClassification", build_resnet},
    {"t5", "T5ForConditionalGeneration", build_t5},
    {"vit", "ViTForImageClassification", build_vit},
};

/// Class and builder for a config.json.
const ArchitectureRow& find_row(const JsonFile& file) {
  auto model_type = file.get("model_type", "");
  // timm's files have no model type, but a name for each variant.
  const auto variant = file.get("architecture", "");
  if (model_type.empty() && variant.find("efficientnet_lite") != std::string::npos) model_type = "efficientnet_lite";
  std::string class_name;
  if (const auto classes = file.root().find("architectures");
      classes != file.root().end() && classes->is_array() && !classes->empty() && classes->front().is_string())
    class_name = classes->front().get<std::string>();
  const ArchitectureRow* first = nullptr;
  std::string types, known;
  for (const auto& row : kArchitectures) {
    if (types.find(row.model_type) == std::string::npos) types.append(types.empty() ? "" : ", ").append(row.model_type);
    if (model_type != row.model_type) continue;
    if (class_name == row.class_name) return row;
    if (!first) first = &row;
    known.append(known.empty() ? "" : ", ").append(row.class_name);
  }
  if (!first) file.fail("model_type", model_type, "one of " + types);
  // A model that is saved as a body alone (LlamaModel) can be loaded with a head, which is then a fresh one.
  if (!class_name.empty() && !class_name.ends_with("Model")) file.fail("architectures", class_name, known);
  return *first;
}

/// Builds; nothing is in the weights yet.
Architecture build(const fs::path& path) {
  const auto file = config_file(path);
  const JsonFile config(file);
  const auto& row = find_row(config);
  try {
    auto result = row.build(file, row.class_name);
    result.source = source_of(path, config, *result.module);
    return result;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of memory that is not there, or of products that overflow
    raise<ResourceError>(
        "'{}': a model of these sizes can't be made: {}. Check the sizes in it, or use a larger machine.",
        file.string(), text_of(error).substr(0, 200));
  }
}

Architecture built(const fs::path& path, Weights weights) {
  const auto empty = zero3_init(path);
  auto result = build(path);
  if (weights == Weights::fresh)
    for (const auto& item : result.module->named_parameters()) result.initialize(item.key(), item.value());
  return result;
}

struct Loaded {
  Architecture model;
  std::optional<DispatchedModel> dispatched = {};
};

Loaded loaded(const fs::path& folder, const AutoLoadOptions& options, LoadReport* report) {
  const auto plan = plan_auto_load(folder, options);
  if (plan.dispatches) {
    auto model = [&] {
      const auto empty = init_empty_weights();
      return build(folder);
    }();
    model.module->eval();
    auto dispatched = load_in_places(model, folder, options, plan, report);
    model.source->quantization = plan.quantization;
    return {std::move(model), std::move(dispatched)};
  }
  const auto empty = zero3_init(folder);
  auto result = build(folder);
  if (plan.dtype) result.module->to(*plan.dtype);
  auto found = load_pretrained(*result.module, folder, result.rules);
  const auto parameters = result.module->named_parameters();
  for (const auto& name : found.missing_keys)
    if (const auto* parameter = parameters.find(name)) result.initialize(name, *parameter);
  result.module->eval();
  if (report) *report = std::move(found);
  return {std::move(result)};
}

AutoModelForCausalLM as_causal(Loaded loaded, const fs::path& path) {
  auto& [model, dispatched] = loaded;
  if (!model.causal)
    raise<CheckpointError>("'{}': {} is no causal language model; use AutoModel{}", config_file(path).string(),
                           class_of(*model.module), model.encode ? "ForSeq2SeqLM." : ".");
  return PretrainedModel::Source::describe(
      AutoModelForCausalLM(std::move(model.module), std::move(model.causal), model.max_positions),
      std::move(model.source), std::move(dispatched));
}

AutoModelForSeq2SeqLM as_seq2seq(Loaded loaded, const fs::path& path) {
  auto& [model, dispatched] = loaded;
  if (!model.encode)
    raise<CheckpointError>("'{}': {} has no encoder with a decoder; use AutoModel{}", config_file(path).string(),
                           class_of(*model.module), model.causal ? "ForCausalLM." : ".");
  return PretrainedModel::Source::describe(AutoModelForSeq2SeqLM(std::move(model.module), std::move(model.encode)),
                                           std::move(model.source), std::move(dispatched));
}

AutoModel as_any(Loaded loaded) {
  auto& [model, dispatched] = loaded;
  if (model.causal)
    model.forward = [forward = std::move(model.causal)](const AutoModel::Tensors& inputs) {
      const auto given = take_inputs(inputs, {"input_ids", "attention_mask", "position_ids"}, 1);
      return AutoModel::Tensors{{"logits", forward(given[0], given[1], given[2], nullptr, 0)}};
    };
  if (model.encode)
    model.forward = [encode = std::move(model.encode)](const AutoModel::Tensors& inputs) {
      const auto given =
          take_inputs(inputs, {"input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask"}, 2);
      return AutoModel::Tensors{{"logits", encode(given[0], given[2])(given[1], given[3], {}, nullptr, 0)}};
    };
  return PretrainedModel::Source::describe(AutoModel(std::move(model.module), std::move(model.forward)),
                                           std::move(model.source), std::move(dispatched));
}

}  // namespace

std::vector<at::Tensor> take_inputs(const AutoModel::Tensors& inputs, const std::vector<std::string>& names,
                                    size_t required) {
  std::vector<at::Tensor> taken(names.size());
  for (const auto& [name, tensor] : inputs) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end())
      raise<ConfigError>("AutoModel::forward: found an input '{}', expected some of {}.", name, fmt::join(names, ", "));
    taken[found - names.begin()] = tensor;
  }
  for (size_t i = 0; i < required; ++i)
    if (!taken[i].defined())
      raise<ConfigError>("AutoModel::forward: the input '{}' is missing; this model takes {}.", names[i],
                         fmt::join(names, ", "));
  return taken;
}

std::function<void(const std::string&, at::Tensor)> initialize_normal(double deviation) {
  return [deviation](const std::string& name, const at::Tensor& parameter) {
    const c10::NoGradGuard no_grad;
    // The last part but one names the module: input_layernorm, ln_1, self_attn_layer_norm.
    const auto end = name.rfind('.'), begin = end == std::string::npos ? end : name.rfind('.', end - 1);
    const auto module = end == std::string::npos ? std::string()
                                                 : name.substr(begin == std::string::npos ? 0 : begin + 1,
                                                               end - (begin == std::string::npos ? 0 : begin + 1));
    if (name.ends_with("bias")) {
      parameter.zero_();
    } else if (module.starts_with("ln_") || module.find("norm") != std::string::npos) {
      parameter.fill_(1);
    } else {
      parameter.normal_(0, deviation);
    }
  };
}

AutoModelForCausalLM AutoModelForCausalLM::from_pretrained(const fs::path& folder, const AutoLoadOptions& options,
                                                           LoadReport* report) {
  return as_causal(loaded(folder, options, report), folder);
}
AutoModelForCausalLM AutoModelForCausalLM::from_config(const fs::path& config, Weights weights) {
  return as_causal({built(config, weights)}, config);
}
AutoModelForSeq2SeqLM AutoModelForSeq2SeqLM::from_pretrained(const fs::path& folder, const AutoLoadOptions& options,
                                                             LoadReport* report) {
  return as_seq2seq(loaded(folder, options, report), folder);
}
AutoModelForSeq2SeqLM AutoModelForSeq2SeqLM::from_config(const fs::path& config, Weights weights) {
  return as_seq2seq({built(config, weights)}, config);
}
AutoModel AutoModel::from_pretrained(const fs::path& folder, const AutoLoadOptions& options, LoadReport* report) {
  return as_any(loaded(folder, options, report));
}
AutoModel AutoModel::from_config(const fs::path& config, Weights weights) { return as_any({built(config, weights)}); }

}  // namespace accelerate::models
