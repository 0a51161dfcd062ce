#include "accelerate/bigmodel/quantize.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "accelerate/bigmodel.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/utils/error.hpp"
#include "bigmodel/quantizer.hpp"
#include "codes/bitsandbytes.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/member.hpp"
#include "utils/atomic_file.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using bigmodel::LoadTarget;

constexpr const char *kCaller = "load_and_quantize_model", *kSaver = "save_quantized_model";

/// "a.b.weight" -> {"a.b", "weight"}
std::pair<std::string, std::string> split(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? std::pair(std::string(), name)
                                  : std::pair(name.substr(0, dot), name.substr(dot + 1));
}

/// The reference's rule: a module's own name, its path, or a module above it. (It asks whether `key.` is anywhere in
/// the path, so that "a" also stands for what is below "ba".)
bool stays(const std::string& path, const std::vector<std::string>& keys) {
  const std::string own = split(path).second;
  return std::ranges::any_of(keys, [&](const std::string& key) {
    return own == key || path == key || path.find(key + ".") != std::string::npos;
  });
}

/// torch::nn's, a script module's, that of accelerate::models, or transformers' other one.
bool is_linear(const Submodule& module) {
  return module.class_name == "Linear" || module.qualified_class_name == "accelerate::models::detail::Dense" ||
         bigmodel::is_transposed_linear(module);
}

/// Paths of the modules whose weights are to be in few bits.
std::set<std::string> chosen_modules(const ModelRef& model, const std::vector<std::string>& not_these) {
  std::set<std::string> chosen;
  for (const auto& module : model.submodules())
    if (is_linear(module) && !module.path.empty() && !stays(module.path, not_these)) chosen.insert(module.path);
  return chosen;
}

codes::EncodeOptions how_of(const BnbQuantizationConfig& config) {
  if (config.load_in_8bit) return {.encoding = codes::Encoding::int8_rowwise};
  return {.encoding = config.bnb_4bit_quant_type == "nf4" ? codes::Encoding::nf4 : codes::Encoding::fp4,
          .block_size = config.bnb_4bit_blocksize,
          .double_quantize = config.bnb_4bit_use_double_quant};
}

}  // namespace

std::vector<std::string> get_keys_to_not_convert(const ModelRef& model) {
  std::vector<std::string> keys;
  const auto add = [&](const std::string& name) {
    if (std::ranges::find(keys, name) == keys.end()) keys.push_back(name);
  };
  for (const auto& group : find_tied_parameters(model))
    for (const auto& name : group) {
      const auto [module, own] = split(name);
      add(own == "weight" || own == "bias" ? module : name);
    }
  const auto modules = model.submodules();
  // Some of ours have a name of their own, without a namespace; their layers tell.
  const bool ours = std::ranges::any_of(modules, [](const auto& module) {
    return module.qualified_class_name.find("accelerate::models::") != std::string::npos;
  });
  const std::string& root = modules.at(0).class_name;
  const bool is_base = root.ends_with("Model") && !root.ends_with("LMHeadModel");
  if (ours && keys.empty() && is_base) return keys;
  // A model of ours whose embeddings are its head has no module for that: its one child is the body.
  if (ours && std::ranges::count_if(modules, [](const auto& module) { return module.parent == 0; }) == 1) return keys;
  for (auto module = modules.rbegin(); module != modules.rend(); ++module)
    if (module->parent == 0) {
      add(module->path);
      break;
    }
  return keys;
}

namespace {

std::vector<std::string> modules_that_stay(const ModelRef& model, const BnbQuantizationConfig& config) {
  auto names = config.skip_modules ? *config.skip_modules : get_keys_to_not_convert(model);
  for (const auto& name : config.keep_in_fp32_modules)
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  return names;
}

}  // namespace

DispatchedModel load_and_quantize_model(const ModelRef& model, const BnbQuantizationConfig& config,
                                        const fs::path& weights_location, const LoadAndQuantizeOptions& options) {
  config.validate();
  if (!weights_location.empty() && is_there(weights_location / "config.json"))
    bigmodel::refuse_other_methods(
        read_text<CheckpointError>(kCaller, weights_location / "config.json", kMostSettingsBytes));
  const auto not_these = modules_that_stay(model, config);
  const auto chosen = chosen_modules(model, not_these);
  const auto in_fp32 = [&](const std::string& name) {
    return std::ranges::any_of(config.keep_in_fp32_modules,
                               [&](const std::string& key) { return name.find(key) != std::string::npos; });
  };
  const at::ScalarType dtype = config.loaded_dtype();
  bigmodel::Quantizer quantizer{
      .how = [chosen, how = how_of(config)](const LoadTarget& target) -> std::optional<codes::EncodeOptions> {
        for (const auto& name : target.names)
          if (const auto [module, own] = split(name);
              own == "weight" && chosen.contains(module) && target.tensor.dim() == 2)
            return how;
        return std::nullopt;
      },
      .keep_codes = true,
      .compute_dtype = config.load_in_4bit ? std::optional(config.bnb_4bit_compute_dtype) : std::nullopt,
      .outlier_threshold = config.load_in_8bit ? config.llm_int8_threshold : 0,
      .exact = config.exact_products,
      .dtype =
          [=](const LoadTarget& target) { return std::ranges::any_of(target.names, in_fp32) ? at::kFloat : dtype; },
      .max_memory = options.max_memory,
      .offload_folder = options.offload_folder};
  for (const auto& [name, tensor] : model.parameters())
    if (in_fp32(name)) quantizer.special_dtypes[name] = "float32";
  const auto device = bigmodel::accelerator_or_host();
  const DeviceMap everything{{"", device.is_cpu() ? Place("cpu") : Place(static_cast<int64_t>(device.index()))}};
  const auto with_word = [](DispatchedModel dispatched) {
    if (dispatched.code_bytes() == 0)
      logs::warn(
          "accelerate.bigmodel",
          "load_and_quantize_model: no weight is in few bits: the model has no linear layers, or all of them are "
          "among those that stay (skip_modules, its head, the model itself)");
    return dispatched;
  };
  if (!weights_location.empty())
    return with_word(bigmodel::load_and_dispatch(kCaller, model, weights_location,
                                                 {.device_map = options.device_map.value_or(everything),
                                                  .max_memory = options.max_memory,
                                                  .no_split_module_classes = options.no_split_module_classes,
                                                  .offload_folder = options.offload_folder,
                                                  .dtype = dtype,
                                                  .keep_in_fp32_modules = config.keep_in_fp32_modules,
                                                  .strict = options.strict,
                                                  .offload = options.offload},
                                                 &quantizer));
  DeviceMap map = everything;
  if (options.device_map) {
    const auto* strategy = std::get_if<std::string>(&*options.device_map);
    if (strategy) {
      auto tree = bigmodel::describe_for(kCaller, model, options.no_split_module_classes);
      bigmodel::count_bytes(tree, bigmodel::bytes_in_few_bits(model, quantizer));
      map = make_device_map(tree, *strategy,
                            {.max_memory = options.max_memory,
                             .no_split_module_classes = options.no_split_module_classes,
                             .dtype = bigmodel::dtype_of_size(dtype),
                             .special_dtypes = quantizer.special_dtypes});
    } else {
      map = std::get<DeviceMap>(*options.device_map);
    }
  }
  return with_word(bigmodel::dispatch(kCaller, model, map,
                                      {.offload_dir = options.offload_folder, .offload = options.offload}, &quantizer));
}

std::map<std::string, at::Tensor> quantized_state_dict(const ModelRef& model, at::ScalarType quant_storage) {
  bigmodel::check_quant_storage("quantized_state_dict", quant_storage);
  std::map<std::string, at::Tensor> state;
  std::set<const at::TensorImpl*> seen;  // tied weights are saved once, under their first name
  for (const auto& [name, tensor] : model.state()) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (const auto* weight = residency::encoded_weight(tensor)) {
      residency::Pins pins;
      residency::pin_codes(*weight, pins);
      for (auto& [part, values] : codes::bitsandbytes_tensors(name, weight->codes, quant_storage))
        state.emplace(part, residency::Member::of(values) ? values.clone() : values);
    } else {
      state.emplace(name, tensor.detach());
    }
  }
  return state;
}

namespace {

/// @throws ConfigError unless the model has the codes that the configuration says
void check_description(const ModelRef& model, const BnbQuantizationConfig& config) {
  const auto wanted = how_of(config);
  bool some = false;
  for (const auto& [name, tensor] : model.state()) {
    const auto* weight = residency::encoded_weight(tensor);
    if (!weight) continue;
    some = true;
    const auto& codes = weight->codes;
    const bool four = wanted.encoding != codes::Encoding::int8_rowwise;
    if (codes.encoding != wanted.encoding ||
        (four && (codes.block_size != wanted.block_size || codes.nested.has_value() != wanted.double_quantize)))
      raise<ConfigError>(
          "{}: '{}' is in {}, blocks of {}{}, and the configuration says {}, blocks of {}{}, expected the one with "
          "which the weights were encoded (BnbQuantizationConfig::from_json() reads it from their config.json): "
          "readers go by it",
          kSaver, name, codes::name(codes.encoding), codes.block_size, codes.nested ? " with scales in 8 bits" : "",
          codes::name(wanted.encoding), four ? wanted.block_size : codes.block_size,
          four && wanted.double_quantize ? " with scales in 8 bits" : "");
  }
  if (!some)
    raise<ConfigError>(
        "{}: the model has no weights in few bits, expected one that load_and_quantize_model() has quantized; "
        "Accelerator::save_model() saves others",
        kSaver);
}

/// `config` with what was left out by name: readers make all other linear layers ones in few bits.
BnbQuantizationConfig described(const ModelRef& model, BnbQuantizationConfig config) {
  if (config.keep_in_fp32_modules.empty()) return config;
  config.skip_modules = modules_that_stay(model, config);
  return config;
}

}  // namespace

void save_quantized_model(const ModelRef& model, const BnbQuantizationConfig& config, const fs::path& folder) {
  config.validate();
  check_description(model, config);
  auto state = quantized_state_dict(model, config.bnb_4bit_quant_storage);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise<CheckpointError>("can't create the folder '{}': {}.", folder.string(), error.message());
  nlohmann::ordered_json description = nlohmann::ordered_json::object();
  const fs::path file = folder / "config.json";
  if (is_there(file)) {
    std::string problem;
    description =
        parse_json<nlohmann::ordered_json>(read_text<CheckpointError>(kSaver, file, kMostSettingsBytes), &problem);
    if (!description.is_object())
      raise<CheckpointError>("'{}' {}", file.string(), problem.empty() ? "is no JSON object" : problem);
  }
  const auto put_description = [&](nlohmann::ordered_json quantization) {
    auto with = description;
    with["quantization_config"] = std::move(quantization);
    AtomicFile written(kSaver, file);
    written.write(with.dump(2) + "\n");
    written.finish();
  };
  AtomicFiles weights(kSaver, folder);
  save_safetensors(weights.place("model.safetensors"), state, {{"format", "pt"}});
  // Two files can't change at once. Codes beside the description of something else would be read as weights; so until
  // both are there, the description has a method that every reader refuses, and keeps what it said before.
  nlohmann::ordered_json before = description.value("quantization_config", nlohmann::ordered_json());
  if (before.is_object() && before.value("quant_method", nlohmann::ordered_json()) == bigmodel::kUnfinished)
    before = before.value("before", nlohmann::ordered_json());
  put_description({{"quant_method", bigmodel::kUnfinished}, {"before", std::move(before)}});
  weights.finish();
  put_description(parse_json<nlohmann::ordered_json>(described(model, config).to_json()));
}

}  // namespace accelerate
