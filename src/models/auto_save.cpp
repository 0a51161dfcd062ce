#include "models/auto_save.hpp"

#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/checkpoint.hpp"
#include "checkpoint/weight_files.hpp"
#include "formats/torch_dtypes.hpp"
#include "models/weights.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;
using Source = PretrainedModel::Source;

int64_t shard_bytes(const std::optional<std::string>& max_shard_size) {
  return checkpointing::parse_size(max_shard_size.value_or("50GB"));  // transformers' default
}

const Source& expect_source(const std::shared_ptr<const Source>& source) {
  if (!source)
    throw ConfigError(
        "save_pretrained: this model was put together by the program, so that no config.json describes it; expected "
        "one of from_pretrained() or from_config(). Accelerator::save_model() writes its weights");
  return *source;
}

/// Writes all but the weights, of which `weights` are the names and dtypes.
template <class Weights> void write_source(const Source& source, const Weights& weights, const fs::path& folder) {
  auto config = parse_json<nlohmann::ordered_json>(source.config);
  config.erase("torch_dtype");  // the old name of the next
  for (const auto& [name, weight] : weights) {
    if (!weight.is_floating_point() || !config.contains("model_type")) continue;  // timm's files have no such field
    config["dtype"] = formats::python_name(weight.scalar_type());
    break;
  }
  create_folder(folder);
  write_text_file(folder / "config.json", config.dump(2) + "\n");
  if (source.generation_config) write_text_file(folder / "generation_config.json", *source.generation_config);
}

void save_codes(const Source& source, const ModelRef& model, const fs::path& folder,
                const std::optional<std::string>& max_shard_size) {
  if (!source.quantization)
    throw ConfigError(
        "save_pretrained: the weights are blocks of a .gguf file (keep_codes), which such a folder can't hold. Copy "
        "the file, or load it without keep_codes");
  if (max_shard_size)
    raise<ConfigError>(
        "save_pretrained: max_shard_size is '{}', and weights in few bits are written into one file; leave it out",
        *max_shard_size);
  write_source(source, model.state(), folder);
  save_quantized_model(model, *source.quantization, folder);
}

}  // namespace

std::string class_of(const torch::nn::Module& module) {
  auto name = module.name();
  name.erase(0, name.rfind(':') + 1);  // nothing where there are none
  if (name.ends_with("Impl")) name.resize(name.size() - std::string_view("Impl").size());
  return name;
}

std::shared_ptr<Source> source_of(const fs::path& path, const JsonFile& config, const torch::nn::Module& module) {
  auto fields = config.root();
  fields.erase("quantization_config");
  if (fields.contains("model_type")) fields["architectures"] = {class_of(module)};
  auto source = std::make_shared<Source>();
  source->config = fields.dump();
  if (const auto file = path / "generation_config.json"; is_folder(path) && is_there(file))
    source->generation_config = read_text_file(file, kMostSettingsBytes);
  return source;
}

void PretrainedModel::save_pretrained(const fs::path& folder, const std::optional<std::string>& max_shard_size) const {
  const auto& source = expect_source(source_);
  const ModelRef model(module_);
  if (dispatched_ && dispatched_->code_bytes() > 0) return save_codes(source, model, folder, max_shard_size);
  checkpointing::save_model(model, folder, shard_bytes(max_shard_size), /*safe_serialization=*/true);
  write_source(source, model.state(), folder);
}

void PretrainedModel::save_pretrained(const fs::path& folder, const std::map<std::string, at::Tensor>& weights,
                                      const std::optional<std::string>& max_shard_size) const {
  const auto& source = expect_source(source_);
  checkpointing::save_model(ModelRef(module_), weights, nullptr, folder, shard_bytes(max_shard_size),
                            /*safe_serialization=*/true);
  write_source(source, weights, folder);
}

}  // namespace accelerate::models
