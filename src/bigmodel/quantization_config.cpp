#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/utils/error.hpp"
#include "bigmodel/quantizer.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using formats::python_name;

bool one_of(at::ScalarType dtype, std::initializer_list<at::ScalarType> all) {
  return std::ranges::find(all, dtype) != all.end();
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
                       std::is_same_v<T, bool>          ? "true or false"
                       : std::is_same_v<T, double>      ? "a number"
                       : std::is_same_v<T, std::string> ? "a text"
                                                        : "a list of texts");
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

void check_method(const nlohmann::json& method) {
  if (method == bigmodel::kUnfinished)
    raise<ConfigError>(
        "quantization_config: quant_method is \"{}\": save_quantized_model() was interrupted while it replaced the "
        "weights, which may be the old or the new ones; expected a finished save. Save the model again (what "
        "quantization_config was before is in its field \"before\")",
        bigmodel::kUnfinished);
  if (method != "bitsandbytes")
    raise<ConfigError>(
        "quantization_config: quant_method is {}, expected \"bitsandbytes\": weights of other methods can't be read. "
        "Take the model's folder before it was quantized, or one for bitsandbytes, or a GGUF file of it",
        show_json(method));
}

}  // namespace

void bigmodel::refuse_other_methods(const std::string& config) {
  const auto json = parse_json<nlohmann::json>(config);
  const auto* quantization = json.is_object() ? find(json, "quantization_config") : nullptr;
  const auto* method = quantization && quantization->is_object() ? find(*quantization, "quant_method") : nullptr;
  if (method) check_method(*method);
}

void bigmodel::check_quant_storage(const char* caller, at::ScalarType dtype) {
  if (!one_of(dtype, {at::kByte, at::kChar, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}))
    raise<ConfigError>(
        "{}: found bnb_4bit_quant_storage = {}, expected uint8, int8, float16, bfloat16, float32 or float64", caller,
        python_name(dtype));
}

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
  bigmodel::check_quant_storage("BnbQuantizationConfig", bnb_4bit_quant_storage);
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
  auto json = parse_json<nlohmann::json>(text, &problem);
  if (!json.is_object())
    raise<ConfigError>("quantization_config: the text {}", problem.empty() ? "is no JSON object" : problem);
  if (json.contains("quantization_config")) json = nlohmann::json(json["quantization_config"]);
  const auto* method = json.is_object() ? find(json, "quant_method") : nullptr;
  if (!json.is_object() || !(json.contains("load_in_4bit") || json.contains("load_in_8bit") || method))
    raise<ConfigError>(
        "quantization_config: there is none in the text, expected a config.json of a quantized model, or the object "
        "itself");
  if (method) check_method(*method);
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

}  // namespace accelerate
