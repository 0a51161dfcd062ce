#include "bigmodel/weight_sources.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "accelerate/bigmodel.hpp"
#include "bigmodel/offload_places.hpp"
#include "bigmodel/replace.hpp"
#include "memory/huge_pages.hpp"
#include "utils/raise.hpp"

namespace accelerate::bigmodel {
namespace {

namespace fs = std::filesystem;
using residency::TensorInFile;

/// A GPU that isn't there is an error now, not in the middle of loading.
void check_devices(const std::string& caller, const DeviceMap& map, const std::optional<at::Device>& main) {
  const auto accelerator = at::getAccelerator();
  const int64_t count = accelerator ? at::accelerator::deviceCount() : 0;
  const auto check = [&](const std::string& what, int64_t index) {
    if (index >= count)
      raise<ConfigError>(
          "{}: found {}, but this machine has {} GPU(s) that LibTorch sees. Use \"cpu\" and \"disk\", or a map that "
          "infer_auto_device_map() works out here.",
          caller, what, count);
  };
  for (const auto& [name, place] : map)
    if (place.is_gpu() || place.is_mps())
      check((name.empty() ? "the whole model" : "'" + name + "'") + " on " +
                (place.is_mps() ? "mps" : "GPU " + place.str()),
            place.is_gpu() ? place.gpu() : 0);
  if (main && !main->is_cpu() && !main->is_meta())
    check("the device " + main->str() + " to compute on", std::max<int64_t>(main->index(), 0));
}

/// Values that were given instead of the model's.
void take_over(const std::string& caller, std::vector<PlacedWeight>& weights,
               const std::map<std::string, at::Tensor>& state_dict) {
  const c10::NoGradGuard no_grad;
  std::string wrong;
  for (auto& weight : weights)
    for (const auto& name : weight.target.names)
      if (const auto given = state_dict.find(name);
          given != state_dict.end() && !given->second.sizes().equals(weight.target.tensor.sizes()))
        wrong += fmt::format("\n  {}: {} given, {} in the model", name, c10::str(given->second.sizes()),
                             c10::str(weight.target.tensor.sizes()));
  if (!wrong.empty()) raise<ShapeError>("{}: state_dict has tensors of other shapes than the model:{}", caller, wrong);
  for (auto& weight : weights)
    for (const auto& name : weight.target.names)
      if (const auto given = state_dict.find(name); given != state_dict.end() && weight.is_placed_outside()) {
        replace_values(weight.target.tensor, given->second.detach().to(weight.target.dtype));
        break;
      }
}

/// Compares an offload folder's copy of a weight from before with the model, which has the weight too. @throws
/// CheckpointError where the two are not the same, to the bit
void check_same_values(const std::string& caller, const PlacedWeight& weight, const residency::TensorInFile& file,
                       const fs::path& folder) {
  if (weight.target.tensor.is_meta()) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor mapped = file.map(),
                   mine = weight.target.tensor.detach().to(at::kCPU, weight.target.dtype).contiguous(),
                   stored = mapped.to(mine.scalar_type()).contiguous();
  const bool same = std::memcmp(stored.const_data_ptr(), mine.const_data_ptr(), mine.nbytes()) == 0;
  if (mapped.is_contiguous()) give_pages_back(mapped.mutable_data_ptr(), static_cast<int64_t>(mapped.nbytes()));
  if (same) return;
  raise<CheckpointError>(
      "{}: the offload folder '{}' has other values of '{}' than the model, expected the same ones. It is probably "
      "from an earlier run or of another model. For the model's values give another folder, or remove this one; for "
      "the folder's, build the model with init_empty_weights(), or give load_offload_index() of it as offload_index.",
      caller, folder.string(), weight.name());
}

/// A file of an offload folder that fill() will write.
TensorInFile file_to_write(const fs::path& folder, const PlacedWeight& weight) {
  const auto file = folder / (weight.name() + ".dat");
  const auto sizes = weight.target.tensor.sizes();
  const auto form =
      offloaded_weight_of(at::empty(sizes, at::TensorOptions().dtype(weight.target.dtype).device(at::kMeta)));
  return {.file = file,
          .begin = 0,
          .bytes = weight.bytes(),
          .dtype = weight.target.dtype,
          .shape = sizes.vec(),
          .map = [file, form] { return load_offloaded_weight(file, form); },
          .decode = nullptr};
}

/// The model's own values, and what an offload folder has.
class ModelSource : public WeightSource {
 public:
  ModelSource(std::string caller, const DispatchOptions& options, bool converts)
      : caller_(std::move(caller)), options_(options), converts_(converts) {
    std::optional<OffloadIndex> index = options.offload_index;
    if (!index && !options.offload_dir.empty() && fs::exists(options.offload_dir / "index.json"))
      index = load_offload_index(options.offload_dir);
    has_folder_ = index || !options.offload_dir.empty();
    if (index) saved_.insert(index->begin(), index->end());
  }

  std::optional<TensorInFile> file_of(const PlacedWeight& weight) override {
    if (!has_folder_)
      raise<ConfigError>(
          "{}: the device map has parts on disk ('{}' is the first), and offload_dir is empty. Give a folder for them, "
          "or one that has them already.",
          caller_, weight.name());
    const auto& [names, tensor] = std::tie(weight.target.names, weight.target.tensor);
    const auto& folder = options_.offload_dir;
    const auto name = std::ranges::find_if(names, [&](const std::string& one) { return saved_.contains(one); });
    if (name != names.end()) {
      auto file = tensor_in_folder(folder, *name, saved_.at(*name));
      if (!at::IntArrayRef(file.shape).equals(tensor.sizes()))
        raise<CheckpointError>(
            "{}: '{}' is of shape {} in the offload folder '{}', {} in the model. The folder is of another model: use "
            "another, or remove it.",
            caller_, *name, c10::str(at::IntArrayRef(file.shape)), folder.string(), c10::str(tensor.sizes()));
      if (!options_.offload_index) check_same_values(caller_, weight, file, folder);
      return file;
    }
    if (tensor.is_meta()) return std::nullopt;
    to_write_.emplace_back(weight.name(), tensor);
    return file_to_write(folder, weight);
  }

  void check(const std::vector<PlacedWeight>& weights) const override {
    constexpr int64_t kNamed = 5;
    std::string missing;  // the first of them
    int64_t count = 0;
    for (const auto& weight : weights)
      if (weight.target.tensor.is_meta() && !weight.file && count++ < kNamed) missing += "\n  " + weight.name();
    if (count > 0)
      raise<ConfigError>(
          "{}: these weights have no values (they are on the meta device), neither in the model nor in state_dict nor "
          "in the offload folder:{}{}\nLoad a checkpoint with load_checkpoint_and_dispatch, or materialize() the "
          "model.",
          caller_, missing, count > kNamed ? fmt::format("\n  … ({} in all)", count) : "");
  }

  void fill(const std::vector<PlacedWeight>& weights) override {
    const c10::NoGradGuard no_grad;
    for (const auto& weight : weights)
      if (const auto& tensor = weight.target.tensor;
          converts_ && !weight.encode && tensor.scalar_type() != weight.target.dtype)
        replace_values(tensor, tensor.to(weight.target.dtype));
    if (!to_write_.empty()) offload_state_dict(options_.offload_dir, to_write_);
  }

 private:
  std::string caller_;
  const DispatchOptions& options_;
  bool converts_, has_folder_ = false;
  std::map<std::string, OffloadedWeight> saved_;
  NamedTensors to_write_;
};

/// A checkpoint, whose files are used where they lie.
class CheckpointSource : public WeightSource {
 public:
  CheckpointSource(std::string caller, const LoadAndDispatchOptions& options, LoadPlan plan)
      : caller_(std::move(caller)), options_(options), plan_(std::move(plan)) {}

  std::optional<TensorInFile> file_of(const PlacedWeight& weight) override {
    if (!weight.target.stored) return std::nullopt;
    const auto& [name, tensor] = *weight.target.stored;
    const bool converted = tensor.dtype != weight.target.dtype || (tensor.bytes && tensor.bytes->decode);
    if (!tensor.bytes || (converted && !options_.offload_folder.empty())) {
      if (options_.offload_folder.empty())
        raise<CheckpointError>(
            "{}: '{}' is to be on disk, and can't be used where it lies in '{}', because its elements are not in one "
            "piece. Give offload_folder, a folder with room for such weights.",
            caller_, name, plan_.path.string());
      return file_to_write(options_.offload_folder, weight);
    }
    stay_.insert(weight.target.tensor.unsafeGetTensorImpl());
    return TensorInFile{.file = tensor.bytes->file,
                        .begin = tensor.bytes->begin,
                        .bytes = tensor.bytes->bytes,
                        .dtype = tensor.dtype,
                        .shape = tensor.sizes,
                        .map = plan_.checkpoint.mapped && !converted ? tensor.read_whole : nullptr,
                        .decode = tensor.bytes->decode};
  }

  void fill(const std::vector<PlacedWeight>& weights) override {
    for (const auto& weight : weights)
      if (weight.encode) stay_.insert(weight.target.tensor.unsafeGetTensorImpl());  // they are read by themselves
    load(plan_, [&](const LoadTarget& target) { return stay_.contains(target.tensor.unsafeGetTensorImpl()); });
  }

 private:
  std::string caller_;
  const LoadAndDispatchOptions& options_;
  LoadPlan plan_;
  std::set<const at::TensorImpl*> stay_;  ///< where they lie
};

}  // namespace

std::vector<PlacedWeight> weights_of(std::vector<LoadTarget> targets) {
  std::vector<PlacedWeight> weights;
  for (auto& target : targets) weights.push_back({.target = std::move(target)});
  return weights;
}

PlacedWeights place_model(const std::string& caller, const ModelRef& model, const DeviceMap& device_map,
                          const DispatchOptions& options, const Quantizer* quantizer) {
  PlacedWeights placed{.map = by_own_names(model, device_map), .weights = {}, .source = {}};
  check_devices(caller, placed.map, options.main_device);
  auto targets = targets_of(model);
  place(caller.c_str(), model, targets, placed.map);
  placed.weights = weights_of(std::move(targets));
  take_over(caller, placed.weights, options.state_dict);
  if (quantizer) {
    for (auto& weight : placed.weights)
      if (weight.target.tensor.is_floating_point()) weight.target.dtype = quantizer->dtype(weight.target);
    choose_codes(placed.weights, *quantizer, nullptr);
    send_codes_to_disk(placed.weights);
  }
  placed.source = std::make_unique<ModelSource>(caller, options, quantizer != nullptr);
  return placed;
}

PlacedWeights place_checkpoint(const char* caller, const ModelRef& model, const fs::path& checkpoint,
                               const LoadAndDispatchOptions& options, const Quantizer* quantizer) {
  if (!options.full_state_dict)
    throw ConfigError(
        "load_checkpoint_and_dispatch: found full_state_dict = false, expected a checkpoint of whole tensors; sharded "
        "ones are read by Accelerator::load_state()");
  if (options.broadcast_from_rank0)
    throw ConfigError(
        "load_checkpoint_and_dispatch: found broadcast_from_rank0 = true, which is not needed: every process reads the "
        "checkpoint by itself, and those of one machine share its pages. Put the files where all can read them.");
  auto tree = describe_for(caller, model, options.no_split_module_classes);
  LoadCheckpointOptions loading{.device_map = std::nullopt,
                                .dtype = options.dtype,
                                .keep_in_fp32_modules = options.keep_in_fp32_modules,
                                .offload_folder = options.offload_folder,
                                .offload_buffers = options.offload_buffers,
                                .strict = options.strict};
  PlacedWeights placed;
  auto& map = placed.map;
  const auto* const strategy = options.device_map ? std::get_if<std::string>(&*options.device_map) : nullptr;
  if (options.device_map && !strategy) {
    map = by_own_names(model, std::get<DeviceMap>(*options.device_map));
    check_devices(caller, map, std::nullopt);
    loading.device_map = map;
  }
  auto plan = plan_loading(caller, model, checkpoint, loading);
  auto& weights = placed.weights;
  weights = weights_of(plan.targets);
  if (quantizer) choose_codes(weights, *quantizer, &plan.checkpoint);
  if (!options.device_map) {
    if (options.max_memory)
      throw ConfigError(
          "load_checkpoint_and_dispatch: found max_memory without a device_map, expected a strategy that uses it, "
          "\"auto\" for example");
  } else if (strategy) {
    DeviceMapOptions map_options{.max_memory = options.max_memory,
                                 .no_split_module_classes = options.no_split_module_classes,
                                 .offload_buffers = options.offload_buffers};
    if (options.dtype) map_options.dtype = dtype_of_size(*options.dtype);
    if (quantizer) map_options.special_dtypes = quantizer->special_dtypes;
    count_bytes(tree, bytes_by_name(weights));
    map = make_device_map(tree, *strategy, std::move(map_options));
    check_devices(caller, map, std::nullopt);
    plan.options.device_map = map;
    place(caller, model, plan.targets, map);
    for (size_t i = 0; i < weights.size(); ++i) weights[i].target.place = plan.targets[i].place;
  }
  send_codes_to_disk(weights);
  // Vectors beside codes stay: they are little, and rows of numbers go directly from one to the other
  // (direct_rows.hpp), with the same bits however much of the codes comes and goes.
  for (size_t i = 0; quantizer && i < weights.size(); ++i)
    if (auto& place = weights[i].target.place; place && place->is_disk() && weights[i].target.tensor.dim() <= 1)
      place = plan.targets[i].place = Place("cpu");
  placed.source = std::make_unique<CheckpointSource>(caller, options, std::move(plan));
  return placed;
}

}  // namespace accelerate::bigmodel
