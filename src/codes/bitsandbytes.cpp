#include "codes/bitsandbytes.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "accelerate/codes/kernels.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

constexpr std::string_view kWeight = "weight", kState = ".quant_state.bitsandbytes__";
constexpr int64_t kMostBlock = 4096;  ///< that bitsandbytes makes

at::Tensor tensor_of(c10::ArrayRef<float> values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::TensorOptions().dtype(at::kFloat));
  std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof(float));
  return tensor;
}

at::Tensor bytes_of(std::string_view text) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(text.size())}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(tensor.mutable_data_ptr(), text.data(), text.size());
  return tensor;
}

/// "encoder.0.weight" -> "encoder.0."
std::string module_of(const std::string& weight) {
  if (weight != kWeight && !weight.ends_with(".weight"))
    raise<ConfigError>(
        "bitsandbytes' form: '{}' in int8_rowwise needs a name that ends with .weight, because its scales' name is "
        "made of that",
        weight);
  return weight.substr(0, weight.size() - kWeight.size());
}

template <class... Args>
[[noreturn]] void damaged(const std::string& weight, fmt::format_string<Args...> what, Args&&... args) {
  raise<CheckpointError>("the weight '{}' in bitsandbytes' form: {}", weight,
                         fmt::format(what, std::forward<Args>(args)...));
}

/// The tables are part of the meaning of codes; we have one of each kind.
void expect_table(const std::string& weight, const char* what, const at::Tensor& found, c10::ArrayRef<float> expected) {
  if (found.numel() != static_cast<int64_t>(expected.size()) ||
      !found.cpu().flatten().to(at::kFloat).equal(tensor_of(expected)))
    damaged(weight, "{} is another table of values than bitsandbytes 0.50 has for this type; expected its own", what);
}

at::ScalarType dtype_named(const std::string& weight, const std::string& name) {
  const auto* known = formats::find_torch_dtype("torch." + name);
  if (!known || (known->type != at::kFloat && known->type != at::kHalf && known->type != at::kBFloat16))
    damaged(weight, "its dtype is '{}', expected float32, float16 or bfloat16", name);
  return known->type;
}

/// A scale that is no number would make its whole block undefined, which nobody would see before the model's answers.
void expect_finite(const std::string& weight, const std::string& name, const at::Tensor& scales) {
  if (scales.scalar_type() != at::kFloat) return;  // codes always are; other dtypes are refused by check()
  const auto* values = scales.const_data_ptr<float>();
  for (int64_t i = 0; i < scales.numel(); ++i)
    if (!std::isfinite(values[i]))
      damaged(weight, "'{}' has {} at {}, expected finite numbers; the file may be damaged", name, values[i], i);
}

}  // namespace

std::map<std::string, at::Tensor> bitsandbytes_tensors(const std::string& weight, const Codes& given,
                                                       at::ScalarType storage) {
  check(given, weight);
  const Codes codes = unpacked(given);
  if (codes.encoding == Encoding::int8_rowwise) {
    const std::string module = module_of(weight);
    return {{weight, codes.data},
            {module + "SCB", codes.scales},
            {module + "weight_format", at::scalar_tensor(0, at::TensorOptions().dtype(at::kByte))}};
  }
  if (!is_four_bit(codes.encoding))
    raise<ConfigError>("bitsandbytes' form: '{}' is {}, expected int8_rowwise, nf4 or fp4; GGUF files keep the others",
                       weight, name(codes.encoding));
  const auto element = static_cast<int64_t>(c10::elementSize(storage));
  if (codes.data.numel() % element != 0)
    raise<ConfigError>(
        "bitsandbytes' form: the {} bytes of '{}' can't be seen as {} (bnb_4bit_quant_storage); use uint8",
        codes.data.numel(), weight, c10::toString(storage));
  std::map<std::string, at::Tensor> tensors{
      {weight, storage == at::kByte ? codes.data : codes.data.view({-1}).view(storage).unsqueeze(1)},
      {weight + ".absmax", codes.scales},
      {weight + ".quant_map", tensor_of(table(codes.encoding))}};
  nlohmann::ordered_json state{{"quant_type", name(codes.encoding)},
                               {"blocksize", codes.block_size},
                               {"dtype", formats::python_name(codes.dtype)},
                               {"shape", codes.shape}};
  if (codes.nested) {
    tensors.emplace(weight + ".nested_absmax", codes.nested->absmax);
    tensors.emplace(weight + ".nested_quant_map", tensor_of(dynamic_map()));
    state["nested_blocksize"] = codes.nested->block_size;
    state["nested_dtype"] = "float32";
    state["nested_offset"] = static_cast<double>(codes.nested->offset);
  }
  tensors.emplace(weight + std::string(kState) + std::string(name(codes.encoding)), bytes_of(state.dump()));
  return tensors;
}

std::vector<BitsandbytesWeight> find_bitsandbytes_weights(const std::vector<std::string>& names) {
  const std::set<std::string> all(names.begin(), names.end());
  std::vector<BitsandbytesWeight> weights;
  std::map<std::string, std::string> described;  // weight -> the tensor that says what it is
  const auto add = [&](BitsandbytesWeight weight) {
    const auto [found, is_new] = described.emplace(weight.weight, weight.parts.front());
    if (!is_new)
      damaged(weight.weight, "both '{}' and '{}' say what it is, expected one of them", found->second,
              weight.parts.front());
    weights.push_back(std::move(weight));
  };
  for (const auto& name : names) {
    if (name.ends_with("SCB") && (name.size() == 3 || name[name.size() - 4] == '.')) {
      const std::string module = name.substr(0, name.size() - 3);
      BitsandbytesWeight weight{.weight = module + "weight", .encoding = Encoding::int8_rowwise, .parts = {name}};
      if (all.contains(module + "weight_format")) weight.parts.push_back(module + "weight_format");
      add(std::move(weight));
      continue;
    }
    const size_t state = name.rfind(kState);
    if (state == std::string::npos) continue;
    BitsandbytesWeight weight{.weight = name.substr(0, state), .parts = {name}};
    const auto encoding = encoding_named(name.substr(state + kState.size()));
    if (!encoding || !is_four_bit(*encoding))
      damaged(weight.weight, "its type is '{}', expected nf4 or fp4", name.substr(state + kState.size()));
    weight.encoding = *encoding;
    for (const char* part : {".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"})
      if (all.contains(weight.weight + part)) weight.parts.push_back(weight.weight + part);
    add(std::move(weight));
  }
  return weights;
}

Codes read_bitsandbytes(const BitsandbytesWeight& weight, const std::function<at::Tensor(const std::string&)>& read,
                        at::ScalarType dtype) {
  const std::string& name = weight.weight;
  const auto part = [&](const std::string& which) -> at::Tensor {
    if (std::ranges::find(weight.parts, which) == weight.parts.end()) damaged(name, "'{}' is missing", which);
    return read(which);
  };
  Codes codes{.encoding = weight.encoding, .dtype = dtype, .data = read(name).contiguous()};
  if (weight.encoding == Encoding::int8_rowwise) {
    const std::string module = module_of(name);
    if (std::ranges::find(weight.parts, module + "weight_format") != weight.parts.end())
      if (const auto format = read(module + "weight_format"); format.numel() != 1 ||
                                                              !at::isIntegralType(format.scalar_type(), true) ||
                                                              format.to(at::kDouble).item<double>() != 0)
        damaged(name,
                "its weight_format is not 0 (by rows), an arrangement for old GPUs; save it again with "
                "bitsandbytes 0.45 or newer");
    codes.shape = codes.data.sizes().vec();
    codes.scales = part(module + "SCB").contiguous();
    expect_finite(name, module + "SCB", codes.scales);
  } else {
    const std::string state_name = name + std::string(kState) + std::string(codes::name(weight.encoding));
    const at::Tensor bytes = part(state_name).contiguous();
    if (bytes.scalar_type() != at::kByte) damaged(name, "'{}' is no text in bytes", state_name);
    std::string problem;
    const auto state = parse_json<nlohmann::json>(
        {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())}, &problem);
    if (!state.is_object()) damaged(name, "'{}' {}", state_name, problem.empty() ? "is no JSON object" : problem);
    const auto whole = [&](const char* key) {
      const auto number = state.contains(key) ? whole_number(state[key]) : std::nullopt;
      if (!number) damaged(name, "'{}' has no whole number '{}'", state_name, key);
      return *number;
    };
    if (!state.contains("shape") || !state["shape"].is_array()) damaged(name, "'{}' has no shape", state_name);
    int64_t numel = 1;
    for (const auto& size : state["shape"]) {
      const auto number = whole_number(size);
      if (!number || *number < 0 || __builtin_mul_overflow(numel, *number, &numel))
        damaged(name, "its shape {} has the size {}, expected sizes of a tensor", show_json(state["shape"]),
                show_json(size));
      codes.shape.push_back(*number);
    }
    if (!state.contains("dtype") || !state["dtype"].is_string()) damaged(name, "'{}' has no dtype", state_name);
    codes.dtype = dtype_named(name, state["dtype"].get<std::string>());
    if (state.contains("quant_type") && state["quant_type"] != codes::name(weight.encoding))
      damaged(name, "'{}' has quant_type {}, expected \"{}\" as its name says", state_name,
              show_json(state["quant_type"]), codes::name(weight.encoding));
    codes.block_size = whole("blocksize");
    expect_table(name, "quant_map", part(name + ".quant_map"), table(weight.encoding));
    codes.scales = part(name + ".absmax").contiguous();
    if (codes.scales.scalar_type() == at::kByte || state.contains("nested_blocksize") ||
        std::ranges::find(weight.parts, name + ".nested_absmax") != weight.parts.end()) {
      expect_table(name, "nested_quant_map", part(name + ".nested_quant_map"), dynamic_map());
      if (!state.contains("nested_offset") || !state["nested_offset"].is_number())
        damaged(name, "'{}' has no number 'nested_offset'", state_name);
      codes.nested = Nested{.absmax = part(name + ".nested_absmax").contiguous(),
                            .block_size = whole("nested_blocksize"),
                            .offset = state["nested_offset"].get<float>()};
      if (codes.nested->block_size < 1 || codes.nested->block_size > kMostBlock)
        damaged(name, "'{}' has nested_blocksize {}, expected 1 to {}", state_name, codes.nested->block_size,
                kMostBlock);
      if (!std::isfinite(codes.nested->offset))
        damaged(name, "'{}' has nested_offset {}, expected a finite number", state_name, codes.nested->offset);
      expect_finite(name, name + ".nested_absmax", codes.nested->absmax);
    }
    expect_finite(name, name + ".absmax", codes.scales);
    codes.data = codes.data.view({-1}).view(at::kByte).unsqueeze(1);
  }
  try {
    check(codes, name);
  } catch (const ShapeError& error) {
    damaged(name, "its parts don't fit each other: {}", error.what());
  }
  return codes;
}

}  // namespace accelerate::codes
