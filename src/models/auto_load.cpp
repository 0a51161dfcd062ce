#include "models/auto_load.hpp"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/left_over.hpp"
#include "bigmodel/quantizer.hpp"
#include "formats/torch_dtypes.hpp"
#include "models/blocks.hpp"
#include "models/json_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

bool is_gguf(const fs::path& checkpoint) { return checkpoint.extension() == ".gguf"; }

/// How a folder's weights are in few bits, as its config.json says.
std::optional<BnbQuantizationConfig> own_quantization(const fs::path& checkpoint) {
  const auto file = config_file(checkpoint);
  if (is_gguf(checkpoint) || !is_there(file)) return std::nullopt;
  const JsonFile config(file);
  const auto found = config.root().find("quantization_config");
  if (found == config.root().end() || found->empty()) return std::nullopt;
  return BnbQuantizationConfig::from_json(config.root().dump());
}

bool has_blocks(const GgufFile& file) {
  return std::ranges::any_of(file.names(), [&](const std::string& name) {
    return codes::encoding_named(file.info(name).encoding).has_value();
  });
}

/// @param in_few_bits  the folder's matrices are codes
std::optional<at::ScalarType> dtype_of_files(const fs::path& checkpoint, bool in_few_bits) {
  if (is_gguf(checkpoint)) return at::kFloat;
  const JsonFile config(config_file(checkpoint));
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto name = config.get(key, "");
    if (name.empty()) continue;
    const auto* dtype = formats::find_torch_dtype(name.starts_with("torch.") ? name : "torch." + name);
    if (!dtype || !c10::isFloatingType(dtype->type)) config.fail(key, name, "float32, float16 or bfloat16");
    return dtype->type;
  }
  if (in_few_bits) return std::nullopt;
  for (const auto& [name, tensor] : load_checkpoint_files(checkpoint))
    if (tensor.is_floating_point()) return tensor.scalar_type();
  return std::nullopt;
}

std::variant<std::string, DeviceMap> device_map_of(const AutoLoadOptions& options) {
  if (!options.device_map) {
    if (options.max_memory) return "auto";
    const auto device = bigmodel::accelerator_or_host();
    return DeviceMap{{"", device.is_cpu() ? Place("cpu") : Place(static_cast<int64_t>(device.index()))}};
  }
  const auto* const text = std::get_if<std::string>(&*options.device_map);
  const bool is_place = text && !text->empty() &&
                        (*text == "cpu" || *text == "disk" || *text == "mps" || text->starts_with("cuda") ||
                         text->find_first_not_of("0123456789") == std::string::npos);
  if (is_place) return DeviceMap{{"", Place(*text)}};
  return *options.device_map;
}

/// Room for what is made for parts on disk. Once the model is loaded it has these files open or mapped, so that they
/// need no names any more: nothing stays behind, however the program ends.
class RoomOnDisk {
 public:
  RoomOnDisk() {
    std::error_code error;
    std::string name = (fs::temp_directory_path(error) / "accelerate-weights-XXXXXX").string();
    if (error || !::mkdtemp(name.data()))
      raise<ResourceError>(
          "can't create a temporary folder for the part of the model that is to be on disk: {}. Set TMPDIR to a folder "
          "with room.",
          error ? error.message() : std::strerror(errno));
    folder_ = name;
  }
  RoomOnDisk(const RoomOnDisk&) = delete;
  RoomOnDisk& operator=(const RoomOnDisk&) = delete;
  ~RoomOnDisk() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  const fs::path& folder() const { return folder_; }

 private:
  fs::path folder_;
};

DispatchedModel load(const ModelRef& module, const fs::path& checkpoint, const AutoLoadOptions& options,
                     const AutoLoadPlan& plan, const std::vector<std::string>& blocks) {
  const auto device_map = device_map_of(options);
  const bool strict = !bigmodel::has_left_over_only(module, checkpoint);
  if (!plan.quantization)
    return load_checkpoint_and_dispatch(module, checkpoint,
                                        {.device_map = device_map,
                                         .max_memory = options.max_memory,
                                         .no_split_module_classes = blocks,
                                         .dtype = plan.dtype,
                                         .keep_codes = options.keep_codes,
                                         .exact_products = options.keep_codes && options.exact_products,
                                         .strict = strict});
  auto config = *plan.quantization;
  config.exact_products |= options.exact_products;
  const auto* const places = std::get_if<DeviceMap>(&device_map);
  const bool may_use_disk =
      !places || std::ranges::any_of(*places, [](const auto& entry) { return entry.second.is_disk(); });
  const auto room = may_use_disk ? std::make_unique<RoomOnDisk>() : nullptr;
  return load_and_quantize_model(module, config, checkpoint,
                                 {.device_map = device_map,
                                  .no_split_module_classes = blocks,
                                  .max_memory = options.max_memory,
                                  .offload_folder = room ? room->folder() : fs::path(),
                                  .strict = strict});
}

/// The tensor on the device where the model computes, if that is elsewhere.
at::Tensor there(const at::Tensor& tensor, const DispatchedModel& dispatched) {
  return tensor.defined() && dispatched.moves_inputs() ? tensor.to(dispatched.main_device()) : tensor;
}

AutoModelForCausalLM::Forward placed(AutoModelForCausalLM::Forward forward, const DispatchedModel& dispatched) {
  return [forward = std::move(forward), dispatched](const at::Tensor& input_ids, const at::Tensor& attention_mask,
                                                    const at::Tensor& position_ids, KeyValueCache* cache,
                                                    int64_t logits_to_keep) {
    dispatched.check_intact();
    const auto logits = forward(there(input_ids, dispatched), there(attention_mask, dispatched),
                                there(position_ids, dispatched), cache, logits_to_keep);
    return dispatched.moves_inputs() ? logits.to(input_ids.device()) : logits;
  };
}

void place(Architecture& model, const DispatchedModel& dispatched) {
  if (model.causal) model.causal = placed(std::move(model.causal), dispatched);
  if (model.encode)
    model.encode = [encode = std::move(model.encode), dispatched](const at::Tensor& input_ids,
                                                                  const at::Tensor& attention_mask) {
      dispatched.check_intact();
      return placed(encode(there(input_ids, dispatched), there(attention_mask, dispatched)), dispatched);
    };
  if (model.forward)
    model.forward = [forward = std::move(model.forward), dispatched](const AutoModel::Tensors& inputs) {
      dispatched.check_intact();
      auto moved = inputs;
      for (auto& [name, tensor] : moved) tensor = there(tensor, dispatched);
      auto outputs = forward(moved);
      const auto first = std::ranges::find_if(inputs, [](const auto& input) { return input.second.defined(); });
      if (dispatched.moves_inputs())
        for (auto& [name, tensor] : outputs) tensor = tensor.to(first->second.device());
      return outputs;
    };
}

}  // namespace

AutoLoadPlan plan_auto_load(const fs::path& checkpoint, const AutoLoadOptions& options) {
  AutoLoadPlan plan;
  plan.quantization = own_quantization(checkpoint);
  const bool its_own = plan.quantization.has_value();
  if (options.quantization) {
    if (its_own || (is_gguf(checkpoint) && has_blocks(GgufFile(checkpoint))))
      raise<ConfigError>(
          "from_pretrained: quantization was asked for (--load_in_4bit, --load_in_8bit), and '{}' has its weights in "
          "few bits already, which are used as they are; leave it out",
          checkpoint.string());
    plan.quantization = options.quantization;
  }
  if (options.dtype) {
    const auto* const given = std::get_if<at::ScalarType>(&*options.dtype);
    if (const auto* const word = std::get_if<std::string>(&*options.dtype); word && *word != "auto")
      raise<ConfigError>("from_pretrained: dtype is '{}', expected \"auto\", or at::kFloat, at::kHalf or at::kBFloat16",
                         *word);
    plan.dtype = given ? *given : dtype_of_files(checkpoint, its_own);
    if (given && its_own) plan.quantization->bnb_4bit_compute_dtype = *given;
  }
  if (plan.quantization && !plan.quantization->torch_dtype && (plan.dtype || its_own))
    plan.quantization->torch_dtype = plan.dtype.value_or(plan.quantization->bnb_4bit_compute_dtype);
  plan.dispatches = plan.quantization || options.device_map || options.max_memory || options.keep_codes;
  return plan;
}

DispatchedModel load_in_places(Architecture& model, const fs::path& checkpoint, const AutoLoadOptions& options,
                               const AutoLoadPlan& plan, LoadReport* report) {
  const ModelRef module(model.module);
  if (report) {
    auto check = check_state_dict(module, checkpoint);
    report->missing_keys = std::move(check.missing);
    report->unexpected_keys = std::move(check.unexpected);
  }
  auto dispatched = load(module, checkpoint, options, plan, block_classes(*model.module));
  place(model, dispatched);
  return dispatched;
}

}  // namespace accelerate::models
