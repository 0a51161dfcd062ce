#include "accelerate/bigmodel/quantize.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "accelerate/bigmodel.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "bigmodel/quantizer.hpp"
#include "codes/bitsandbytes.hpp"
#include "formats/torch_dtypes.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/member.hpp"
#include "utils/atomic_file.hpp"
#include "utils/json.hpp"
#include "utils/raise.hpp"
#include "utils/read_file.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using bigmodel::LoadTarget;

constexpr const char* kCaller = "load_and_quantize_model";

std::string python_name(at::ScalarType dtype) {
  const auto* known = formats::find_torch_dtype(dtype);
  return known ? std::string(known->name.substr(known->name.find('.') + 1)) : c10::toString(dtype);
}

bool one_of(at::ScalarType dtype, std::initializer_list<at::ScalarType> all) {
  return std::ranges::find(all, dtype) != all.end();
}

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

/// torch::nn's, a script module's, or that of accelerate::models.
bool is_linear(const Submodule& module) {
  return module.class_name == "Linear" || module.qualified_class_name == "accelerate::models::detail::Dense";
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

/// A key of a JSON object, if it is there and not null.
const nlohmann::json* find(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

template <class T> void read_into(const nlohmann::json& object, const char* key, T& value) {
  const auto* found = find(object, key);
  if (!found) return;
  try {
    value = found->get<T>();
  } catch (const nlohmann::json::exception&) {
    raise<ConfigError>("quantization_config: {} is {}, expected {}", key, show_json(*found),
                       std::is_same_v<T, bool>     ? "true or false"
                       : std::is_same_v<T, double> ? "a number"
                                                   : "a text, or a list of texts");
  }
}

void read_into(const nlohmann::json& object, const char* key, at::ScalarType& value) {
  std::string name;
  read_into(object, key, name);
  if (name.empty()) return;
  const auto* known = formats::find_torch_dtype("torch." + name);
  if (!known) raise<ConfigError>("quantization_config: {} is '{}', expected a dtype such as float16", key, name);
  value = known->type;
}

}  // namespace

void BnbQuantizationConfig::validate() const {
  if (load_in_8bit == load_in_4bit)
    raise<ConfigError>("BnbQuantizationConfig: found load_in_8bit = {0} and load_in_4bit = {0}, expected one of them",
                       load_in_8bit);
  if (!(llm_int8_threshold >= 0))
    raise<ConfigError>("BnbQuantizationConfig: found llm_int8_threshold = {}, expected 0 or more", llm_int8_threshold);
  if (load_in_4bit && llm_int8_threshold != 6.0)
    raise<ConfigError>(
        "BnbQuantizationConfig: found llm_int8_threshold = {} with load_in_4bit, expected it with load_in_8bit only",
        llm_int8_threshold);
  if (bnb_4bit_quant_type != "fp4" && bnb_4bit_quant_type != "nf4")
    raise<ConfigError>("BnbQuantizationConfig: found bnb_4bit_quant_type = '{}', expected 'fp4' or 'nf4'",
                       bnb_4bit_quant_type);
  for (const auto& [name, dtype] :
       {std::pair("bnb_4bit_compute_dtype", bnb_4bit_compute_dtype), std::pair("torch_dtype", loaded_dtype())})
    if (!one_of(dtype, {at::kFloat, at::kHalf, at::kBFloat16}))
      raise<ConfigError>("BnbQuantizationConfig: found {} = {}, expected float32, float16 or bfloat16", name,
                         python_name(dtype));
  if (!one_of(bnb_4bit_quant_storage, {at::kByte, at::kChar, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}))
    raise<ConfigError>(
        "BnbQuantizationConfig: found bnb_4bit_quant_storage = {}, expected uint8, int8, float16, bfloat16, float32 or "
        "float64",
        python_name(bnb_4bit_quant_storage));
  const int64_t size = bnb_4bit_blocksize;
  if (size < 32 || size > 4096 || (size & (size - 1)) != 0)
    raise<ConfigError>("BnbQuantizationConfig: found bnb_4bit_blocksize = {}, expected a power of two from 32 to 4096",
                       size);
}

std::string BnbQuantizationConfig::to_json() const {
  nlohmann::ordered_json json{{"_load_in_4bit", load_in_4bit},
                              {"_load_in_8bit", load_in_8bit},
                              {"bnb_4bit_compute_dtype", python_name(bnb_4bit_compute_dtype)},
                              {"bnb_4bit_quant_storage", python_name(bnb_4bit_quant_storage)},
                              {"bnb_4bit_quant_type", bnb_4bit_quant_type},
                              {"bnb_4bit_use_double_quant", bnb_4bit_use_double_quant},
                              {"llm_int8_enable_fp32_cpu_offload", false},
                              {"llm_int8_has_fp16_weight", false},
                              {"llm_int8_skip_modules", nullptr},
                              {"llm_int8_threshold", llm_int8_threshold},
                              {"load_in_4bit", load_in_4bit},
                              {"load_in_8bit", load_in_8bit},
                              {"quant_method", "bitsandbytes"}};
  if (skip_modules) json["llm_int8_skip_modules"] = *skip_modules;
  if (bnb_4bit_blocksize != 64) json["bnb_4bit_blocksize"] = bnb_4bit_blocksize;
  return json.dump(2);
}

BnbQuantizationConfig BnbQuantizationConfig::from_json(const std::string& text) {
  std::string problem;
  nlohmann::json json = parse_json<nlohmann::json>(text, &problem);
  if (!json.is_object())
    raise<ConfigError>("quantization_config: the text {}", problem.empty() ? "is no JSON object" : problem);
  if (json.contains("quantization_config")) json = nlohmann::json(json["quantization_config"]);
  const auto* method = json.is_object() ? find(json, "quant_method") : nullptr;
  if (!json.is_object() || !(json.contains("load_in_4bit") || json.contains("load_in_8bit") || method))
    raise<ConfigError>(
        "quantization_config: there is none in the text, expected a config.json of a quantized model, or the object "
        "itself");
  if (method && *method != "bitsandbytes")
    raise<ConfigError>("quantization_config: quant_method is {}, expected \"bitsandbytes\"", show_json(*method));
  BnbQuantizationConfig config;
  read_into(json, "load_in_8bit", config.load_in_8bit);
  read_into(json, "load_in_4bit", config.load_in_4bit);
  read_into(json, "bnb_4bit_quant_type", config.bnb_4bit_quant_type);
  read_into(json, "bnb_4bit_use_double_quant", config.bnb_4bit_use_double_quant);
  if (config.load_in_8bit) read_into(json, "llm_int8_threshold", config.llm_int8_threshold);
  config.bnb_4bit_compute_dtype = at::kFloat;  // transformers' default
  read_into(json, "bnb_4bit_compute_dtype", config.bnb_4bit_compute_dtype);
  read_into(json, "bnb_4bit_quant_storage", config.bnb_4bit_quant_storage);
  if (const auto* size = find(json, "bnb_4bit_blocksize")) config.bnb_4bit_blocksize = whole_number(*size).value_or(0);
  if (find(json, "llm_int8_skip_modules")) {
    config.skip_modules.emplace();
    read_into(json, "llm_int8_skip_modules", *config.skip_modules);
  }
  bool fp16_weight = false;
  read_into(json, "llm_int8_has_fp16_weight", fp16_weight);
  if (fp16_weight)
    raise<ConfigError>(
        "quantization_config: found llm_int8_has_fp16_weight = true, which keeps weights in fp16 to train them; "
        "expected false, weights in few bits are frozen here. Train adapters beside them");
  config.validate();
  return config;
}

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
  const std::string& root = modules.at(0).qualified_class_name;
  const bool is_base = root.find("accelerate::models::") != std::string::npos &&
                       modules.at(0).class_name.ends_with("Model") &&
                       !modules.at(0).class_name.ends_with("LMHeadModel");
  if (keys.empty() && is_base) return keys;
  for (auto module = modules.rbegin(); module != modules.rend(); ++module)
    if (module->parent == 0) {
      add(module->path);
      break;
    }
  return keys;
}

DispatchedModel load_and_quantize_model(const ModelRef& model, const BnbQuantizationConfig& config,
                                        const fs::path& weights_location, const LoadAndQuantizeOptions& options) {
  config.validate();
  std::vector<std::string> not_these = config.skip_modules ? *config.skip_modules : get_keys_to_not_convert(model);
  not_these.insert(not_these.end(), config.keep_in_fp32_modules.begin(), config.keep_in_fp32_modules.end());
  const auto chosen = chosen_modules(model, not_these);
  const auto in_fp32 = [&](const std::string& name) {
    return std::ranges::any_of(config.keep_in_fp32_modules,
                               [&](const std::string& key) { return name.find(key) != std::string::npos; });
  };
  const at::ScalarType dtype = config.loaded_dtype();
  bigmodel::Quantizer quantizer{
      .how = [chosen, how = how_of(config)](const LoadTarget& target) -> std::optional<codes::EncodeOptions> {
        for (const auto& name : target.names)
          if (const auto [module, own] = split(name); own == "weight" && chosen.contains(module)) return how;
        return std::nullopt;
      },
      .keep_codes = true,
      .compute_dtype = config.load_in_4bit ? std::optional(config.bnb_4bit_compute_dtype) : std::nullopt,
      .outlier_threshold = config.load_in_8bit ? config.llm_int8_threshold : 0,
      .exact = config.exact_products,
      .dtype =
          [=](const LoadTarget& target) { return std::ranges::any_of(target.names, in_fp32) ? at::kFloat : dtype; },
      .map_dtype = config.load_in_4bit ? "int4" : "int8",
      .offload_folder = options.offload_folder};
  for (const auto& [name, tensor] : model.parameters()) {
    const auto matches = [&name = name](const std::string& key) { return name.find(key) != std::string::npos; };
    if (std::ranges::any_of(not_these, matches)) quantizer.special_dtypes[name] = python_name(dtype);
    if (in_fp32(name)) quantizer.special_dtypes[name] = "float32";
  }
  const auto device = bigmodel::accelerator_or_host();
  const DeviceMap everything{{"", device.is_cpu() ? Place("cpu") : Place(static_cast<int64_t>(device.index()))}};
  if (!weights_location.empty())
    return bigmodel::load_and_dispatch(kCaller, model, weights_location,
                                       {.device_map = options.device_map.value_or(everything),
                                        .max_memory = options.max_memory,
                                        .no_split_module_classes = options.no_split_module_classes,
                                        .offload_folder = options.offload_folder,
                                        .dtype = dtype,
                                        .keep_in_fp32_modules = config.keep_in_fp32_modules,
                                        .strict = options.strict,
                                        .offload = options.offload},
                                       &quantizer);
  DeviceMap map = everything;
  if (options.device_map) {
    const auto* strategy = std::get_if<std::string>(&*options.device_map);
    map = strategy ? make_device_map(model, *strategy,
                                     {.max_memory = options.max_memory,
                                      .no_split_module_classes = options.no_split_module_classes,
                                      .dtype = quantizer.map_dtype,
                                      .special_dtypes = quantizer.special_dtypes})
                   : std::get<DeviceMap>(*options.device_map);
  }
  return bigmodel::dispatch(kCaller, model, map, {.offload_dir = options.offload_folder, .offload = options.offload},
                            &quantizer);
}

std::map<std::string, at::Tensor> quantized_state_dict(const ModelRef& model, at::ScalarType quant_storage) {
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

void save_quantized_model(const ModelRef& model, const BnbQuantizationConfig& config, const fs::path& folder) {
  config.validate();
  auto state = quantized_state_dict(model, config.bnb_4bit_quant_storage);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise<CheckpointError>("can't create the folder '{}': {}.", folder.string(), error.message());
  nlohmann::ordered_json description = nlohmann::ordered_json::object();
  const fs::path file = folder / "config.json";
  if (is_there(file)) {
    std::string problem;
    description = parse_json<nlohmann::ordered_json>(
        read_text<CheckpointError>("save_quantized_model", file, kMostSettingsBytes), &problem);
    if (!description.is_object())
      raise<CheckpointError>("'{}' {}", file.string(), problem.empty() ? "is no JSON object" : problem);
  }
  description["quantization_config"] = parse_json<nlohmann::ordered_json>(config.to_json());
  save_safetensors(folder / "model.safetensors", state, {{"format", "pt"}});
  AtomicFile written("save_quantized_model", file);
  written.write(description.dump(2) + "\n");
  written.finish();
}

}  // namespace accelerate
