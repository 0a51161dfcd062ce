#include "accelerate/bigmodel/dispatch.hpp"

#include <algorithm>
#include <limits>
#include <set>
#include <unordered_map>

#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/error.hpp"
#include "residency/homes/file.hpp"
#include "residency/residency.hpp"
#include "residency/worker.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

/// Parameters on disk by unit: a module of a class that is not split, or the parameters directly in a module.
std::vector<std::pair<std::string, NamedTensors>> units_of(const ModelRef& model, const DeviceMap& map, const residency::FileTensors& files, const std::vector<std::string>& no_split) {
  // A tied weight is where its first name with a place is, and is read under the name that the files have.
  std::unordered_map<const at::TensorImpl*, std::optional<Place>> places;
  std::unordered_map<const at::TensorImpl*, std::string> saved_names;
  for (const auto& [name, tensor] : model.state()) {
    auto& place = places[tensor.unsafeGetTensorImpl()];
    if (!place) place = place_of(map, name);
    if (files.contains(name)) saved_names.try_emplace(tensor.unsafeGetTensorImpl(), name);
  }
  const auto modules = model.submodules();
  std::vector<std::string> unit_of(modules.size());
  std::vector<std::pair<std::string, NamedTensors>> units;
  std::set<const at::TensorImpl*> taken;
  for (size_t i = 0; i < modules.size(); ++i) {
    const auto& module = modules[i];
    const std::string* above = module.parent < 0 ? nullptr : &unit_of[static_cast<size_t>(module.parent)];
    const bool whole = std::find(no_split.begin(), no_split.end(), module.class_name) != no_split.end();
    if (above && !above->empty()) unit_of[i] = *above;
    else if (whole) unit_of[i] = module.path;
    const std::string& unit = unit_of[i].empty() ? module.path : unit_of[i];
    for (const auto& [name, tensor] : module.parameters) {
      const auto* impl = tensor.unsafeGetTensorImpl();
      const auto saved = saved_names.find(impl);
      if (saved == saved_names.end() || !places[impl] || !places[impl]->is_disk() || !taken.insert(impl).second) continue;
      if (units.empty() || units.back().first != unit) units.emplace_back(unit, NamedTensors());
      units.back().second.emplace_back(saved->second, tensor);
    }
  }
  return units;
}

/// Where the model computes.
Place computing_place(const DeviceMap& map) {
  std::set<Place> gpus;
  bool host = false;
  for (const auto& [name, place] : map) {
    if (place.is_gpu() || place.is_mps()) gpus.insert(place);
    host = host || place.is_cpu();
  }
  if (gpus.empty()) return "cpu";
  if (gpus.size() > 1 || host)
    throw ConfigError("load_checkpoint_and_dispatch: the device map has parts on " + std::to_string(gpus.size()) + " GPU(s)" + (host ? " and on the host" : "") +
                      ", expected one place that computes, besides disk. Give a device_map without the others, or a max_memory that leaves them out.");
  return *gpus.begin();
}

}  // namespace

struct DispatchedModel::Impl {
  DeviceMap map;
  int64_t streamed = 0;
  std::unique_ptr<residency::Residency> engine;
};

const DeviceMap& DispatchedModel::device_map() const { return impl_->map; }
int64_t DispatchedModel::streamed_bytes() const { return impl_->streamed; }

DispatchedModel load_checkpoint_and_dispatch(const ModelRef& model, const fs::path& checkpoint, const DispatchOptions& options) {
  auto impl = std::make_shared<DispatchedModel::Impl>();
  if (options.device_map) {
    impl->map = *options.device_map;
  } else {
    DeviceMapOptions map_options{.max_memory = options.max_memory, .no_split_module_classes = options.no_split_module_classes, .offload_buffers = options.loading.offload_buffers};
    if (options.loading.dtype) map_options.dtype = std::string(c10::elementSize(*options.loading.dtype) == 2 ? "float16" : "float32");
    impl->map = make_device_map(describe(model), options.strategy, std::move(map_options));
  }
  const Place computes = computing_place(impl->map);
  auto loading = options.loading;
  loading.device_map = impl->map;
  load_checkpoint_in_model(model, checkpoint, loading);

  const bool on_disk = std::any_of(impl->map.begin(), impl->map.end(), [](const auto& entry) { return entry.second.is_disk(); });
  if (!on_disk || !loading.offload_folder.empty()) return DispatchedModel(std::move(impl));  // what had to be converted is mapped in its folder
  const residency::FileTensors files(checkpoint, std::make_shared<residency::Worker>());
  const auto units = units_of(model, impl->map, files, options.no_split_module_classes);
  int64_t bytes = 0;
  for (const auto& [name, members] : units) bytes += files.bytes(members);
  const bool on_host = computes.is_cpu();
  if (on_host && residency::FileTensors::fits(bytes, options.disk_memory_bytes)) return DispatchedModel(std::move(impl));  // mapped already

  const double half_of_free = get_max_memory().at(computes).bytes / 2;
  const auto budget = options.disk_memory_bytes.value_or(static_cast<int64_t>(std::min(half_of_free, static_cast<double>(std::numeric_limits<int64_t>::max() / 2))));
  impl->engine = std::make_unique<residency::Residency>(residency::Policy{.prefetch = options.prefetch, .budget_bytes = budget});
  const at::Device device = on_host ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(computes.gpu()));
  for (const auto& [name, members] : units) {
    impl->engine->add(name, files.read(members, device));
    impl->streamed += files.bytes(members);
  }
  return DispatchedModel(std::move(impl));
}

DispatchedModel disk_offload(const ModelRef& model, const fs::path& folder, DispatchOptions options) {
  const bool saved = fs::exists(folder / "model.safetensors") || fs::exists(folder / "model.safetensors.index.json");
  constexpr int64_t kShardBytes = 5'000'000'000;
  if (!saved) checkpointing::save_model(model, folder, kShardBytes, /*safe_serialization=*/true);
  if (!options.device_map) options.device_map = DeviceMap{{"", "disk"}};
  return load_checkpoint_and_dispatch(model, folder, options);
}

}  // namespace accelerate
