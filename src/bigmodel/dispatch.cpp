#include "accelerate/bigmodel/dispatch.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>

#include "accelerate/codes/kernels.hpp"
#include "bigmodel/budget.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/quantizer.hpp"
#include "bigmodel/replace.hpp"
#include "bigmodel/weight_sources.hpp"
#include "codes/kernels/multiply.hpp"
#include "memory/held_bytes.hpp"
#include "memory/huge_pages.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/homes/file.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/read_ahead.hpp"
#include "residency/residency.hpp"
#include "residency/worker.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using bigmodel::PlacedWeight;
using bigmodel::Quantizer;
using residency::TensorInFile;

}  // namespace

at::Device bigmodel::accelerator_or_host() {
  const auto accelerator = at::getAccelerator();
  return accelerator && at::accelerator::deviceCount() > 0 ? at::Device(*accelerator, at::accelerator::getDeviceIndex())
                                                           : at::Device(at::kCPU);
}

struct DispatchedModel::Impl {
  DeviceMap map;
  at::Device main = at::kCPU;
  bool moves_inputs = false;
  std::set<std::string> skip_keys;
  int64_t streamed = 0, units = 0, code_bytes = 0;
  HeldBytes on_host{HeldFor::offloaded_host};
  /// By device; "resident": what never moves of a model across devices.
  std::map<std::string, std::unique_ptr<residency::Residency>> engines;
  std::optional<residency::ReadAhead> ahead;
};

const DeviceMap& DispatchedModel::hf_device_map() const { return impl_->map; }
at::Device DispatchedModel::main_device() const { return impl_->main; }
int64_t DispatchedModel::streamed_bytes() const { return impl_->streamed; }
int64_t DispatchedModel::units() const { return impl_->units; }
int64_t DispatchedModel::code_bytes() const { return impl_->code_bytes; }
bool DispatchedModel::moves_inputs() const { return impl_->moves_inputs; }
bool DispatchedModel::skips(const std::string& key) const { return impl_->skip_keys.contains(key); }

void DispatchedModel::check_intact() const {
  for (const auto& [device, engine] : impl_->engines)
    if (const auto* member = engine->replaced_member())
      raise<ConfigError>(
          "dispatched model: parameter '{}' was moved or replaced after the model was dispatched, probably by "
          "module->to(...) or set_data(). A model with offloaded parts can't be moved; dispatch it again with another "
          "device map, or load it without one.",
          member->name());
}

namespace {

/// From plan to engines.
class Dispatcher {
 public:
  /// Nothing is loaded or moved. @throws what can be known
  Dispatcher(const ModelRef& model, bigmodel::DispatchSettings settings, std::vector<PlacedWeight> weights)
      : settings_(std::move(settings)),
        weights_(std::move(weights)),
        budget_(bigmodel::plan_budget(model, settings_, weights_)),
        impl_(std::make_shared<DispatchedModel::Impl>()) {}
  const std::vector<PlacedWeight>& weights() const { return weights_; }

  /// Values are where plans say: in the model (host memory or a device) or in files.
  DispatchedModel finish(DeviceMap map) {
    const c10::NoGradGuard no_grad;
    auto& self = *impl_;
    self.map = std::move(map);
    self.main = settings_.main;
    self.skip_keys = {settings_.skip_keys.begin(), settings_.skip_keys.end()};
    self.moves_inputs = budget_.spread || !settings_.main.is_cpu();
    map_files();
    for (auto& weight : weights_)
      if (!weight.offloaded && !weight.encode && weight.target.tensor.device() != weight.computes &&
          !weight.target.tensor.is_meta())
        bigmodel::replace_values(weight.target.tensor, weight.target.tensor.to(weight.computes));
    const auto worker = budget_.units.empty() ? nullptr : std::make_shared<residency::Worker>();
    std::map<std::string, TensorInFile> in_files;
    for (auto& weight : weights_)
      if (weight.offloaded && weight.file) in_files.emplace(weight.name(), *weight.file);
    const residency::FileTensors files(std::move(in_files), worker,
                                       {.direct = true,
                                        .scratch = settings_.offload.scratch,
                                        .readers = std::max<int64_t>(settings_.offload.readers, 1)});
    for (auto& unit : budget_.units) {
      std::map<at::ScalarType, NamedTensors> on_disk;
      NamedTensors in_memory;
      for (auto* weight : unit.weights)
        (weight->file ? on_disk[weight->target.dtype] : in_memory).emplace_back(weight->name(), weight->target.tensor);
      std::vector<residency::PartSpec> parts;
      for (const auto& [dtype, members] : on_disk)
        for (auto& part : files.read(members, unit.device, dtype)) parts.push_back(std::move(part));
      for (auto& part : in_host_memory(in_memory, unit.device, worker)) parts.push_back(std::move(part));
      engine(unit.device).add(unit.name, std::move(parts));
      self.streamed += unit.bytes;
      ++self.units;
    }
    for (auto& [device, one] : self.engines) one->expect_order_of_addition();
    keep_codes();
    if (budget_.spread) keep_resident();
    return DispatchedModel(impl_);
  }

 private:
  residency::Residency& engine(const at::Device& device) {
    auto& engine = impl_->engines[device.str()];
    if (!engine) {
      const int64_t bytes = budget_.bytes.at(device.str());
      int64_t largest = 1;
      for (const auto& unit : budget_.units)
        if (unit.device == device) largest = std::max(largest, unit.bytes);
      const int64_t ahead = settings_.offload.prefetch.value_or(std::clamp<int64_t>(bytes / 4 / largest, 1, 8));
      engine = std::make_unique<residency::Residency>(residency::Policy{.prefetch = ahead,
                                                                        .outstanding = std::max<int64_t>(ahead, 1),
                                                                        .budget_bytes = bytes,
                                                                        .across_devices = budget_.spread});
    }
    return *engine;
  }

  void map_files() {
    std::vector<residency::MappedBytes> bytes;
    auto mappings = std::make_shared<std::vector<at::Tensor>>();
    for (auto& weight : weights_) {
      if (!weight.in_memory_whole) continue;
      const at::Tensor value = weight.file->map();
      bigmodel::replace_values(weight.target.tensor, value);
      bytes.push_back({value.const_data_ptr(), static_cast<int64_t>(value.nbytes())});
      mappings->push_back(value);
    }
    if (!bytes.empty()) impl_->ahead.emplace(std::move(bytes), std::move(mappings));
  }

  /// Flat copies, pinned where a GPU reads them.
  std::vector<residency::PartSpec> in_host_memory(const NamedTensors& members, const at::Device& device,
                                                  const std::shared_ptr<residency::Worker>& worker) const {
    std::map<std::pair<at::ScalarType, bool>, NamedTensors> kinds;
    for (const auto& [name, tensor] : members)
      kinds[{tensor.scalar_type(), tensor.requires_grad()}].emplace_back(name, tensor);
    std::vector<residency::PartSpec> parts;
    for (auto& [kind, some] : kinds) {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, tensor] : some) tensors.push_back(tensor);
      residency::PartSpec part;
      part.layout = residency::lay_out(tensors, 1, device);
      part.dtype = kind.first;
      part.device = device;
      const bool pin = at::isAccelerator(device.type());
      const at::Tensor master =
          at::empty({part.layout.numel}, at::TensorOptions().dtype(kind.first).pinned_memory(pin));
      for (size_t i = 0; i < tensors.size(); ++i)  // in the members' own order of elements: strides are kept
        master
            .as_strided(
                tensors[i].sizes(),
                tensors[i].is_non_overlapping_and_dense() ? tensors[i].strides() : tensors[i].contiguous().strides(),
                part.layout.offsets[i])
            .copy_(tensors[i]);
      part.members = std::move(some);
      impl_->on_host.add(static_cast<int64_t>(master.nbytes()));
      part.home = residency::host_home(master, worker);
      parts.push_back(std::move(part));
    }
    return parts;
  }

  /// Weights in few bits, each a unit of its own: it is decoded only for operators that can't compute on codes, and
  /// goes when another one is.
  void keep_codes() {
    int64_t most = 0;
    for (const auto& weight : weights_)
      if (weight.encode) most = std::max(most, weight.bytes());
    if (most == 0) return;
    const Quantizer& quantizer = *settings_.quantizer;
    auto& engine = impl_->engines["codes"];
    engine = std::make_unique<residency::Residency>(residency::Policy{
        .prefetch = 0, .outstanding = 1, .budget_bytes = most, .across_devices = budget_.spread, .encoded = true});
    for (auto& weight : weights_) {
      if (!weight.encode) continue;
      codes::Codes codes = weight.encode(weight);
      codes::check(codes, weight.name());
      if (weight.computes.is_cpu() && !quantizer.exact && codes::kernels::has_fast_instructions() &&
          codes::kernels_of(codes.encoding).linear) {
        // Products have an order of their own: two copies would take twice the memory.
        codes::keep_once(codes, weight.codes_in_file);
        // Reading a few bytes between weights in few bits has brought pages of these along.
        if (weight.codes_in_file)
          give_pages_back(codes.data.mutable_data_ptr(), static_cast<int64_t>(codes.data.nbytes()));
      }
      const auto encoded = std::make_shared<residency::EncodedWeight>(
          residency::EncodedWeight{.codes = codes::to(codes, weight.codes_device()),
                                   .transposed = weight.target.transposed,
                                   .compute_dtype = quantizer.compute_dtype,
                                   .outlier_threshold = quantizer.outlier_threshold,
                                   .exact = quantizer.exact,
                                   .comes_and_goes = !weight.codes_stay});
      const at::Tensor tensor = weight.target.tensor;
      tensor.set_requires_grad(false);
      bigmodel::replace_values(
          tensor, at::empty(tensor.sizes(), at::TensorOptions().dtype(weight.target.dtype).device(at::kMeta)));
      residency::PartSpec part;
      part.members = {{weight.name(), tensor}};
      part.layout = {.offsets = {0}, .numel = tensor.numel()};
      part.dtype = weight.target.dtype;
      part.device = weight.computes;
      part.home = residency::encoded_home(encoded);
      std::vector<residency::PartSpec> parts;
      parts.push_back(std::move(part));
      engine->add(weight.name(), std::move(parts));
      impl_->code_bytes += encoded->codes.bytes();
      if (!weight.codes_stay) impl_->streamed += encoded->codes.bytes();
    }
  }

  /// Weights that never move are watched too: operands come to them.
  void keep_resident() {
    auto& engine = impl_->engines["resident"];
    engine = std::make_unique<residency::Residency>(residency::Policy{.prefetch = 0, .across_devices = true});
    for (auto& weight : weights_) {
      const at::Tensor& tensor = weight.target.tensor;
      if (weight.offloaded || weight.encode || tensor.is_meta() || tensor.numel() == 0 ||
          !tensor.is_non_overlapping_and_dense())
        continue;
      residency::PartSpec part;
      part.members = {{weight.name(), tensor}};
      part.layout = {.offsets = {0}, .numel = tensor.numel()};
      part.dtype = tensor.scalar_type();
      part.device = tensor.device();
      part.home = residency::memory_home(tensor.variable_data().as_strided({tensor.numel()}, {1}));
      std::vector<residency::PartSpec> parts;
      parts.push_back(std::move(part));
      engine->add(weight.name(), std::move(parts));
    }
  }

  bigmodel::DispatchSettings settings_;
  std::vector<PlacedWeight> weights_;
  bigmodel::Budget budget_;  ///< points into them
  std::shared_ptr<DispatchedModel::Impl> impl_;
};

at::Device main_of(const DeviceMap& map, const std::optional<at::Device>& given) {
  if (given) return given->has_index() || given->is_cpu() || given->is_meta() ? *given : at::Device(given->type(), 0);
  std::optional<Place> first;
  for (const auto& [name, place] : map)
    if ((place.is_gpu() || place.is_mps()) && (!first || place < *first)) first = place;
  return first ? bigmodel::device_of(*first) : at::Device(at::kCPU);
}

/// The settings that the options of both ways have in common.
template <class Options>
bigmodel::DispatchSettings settings_of(const char* caller, const Options& options, at::Device main,
                                       const Quantizer* quantizer) {
  return {.caller = caller,
          .main = main,
          .offload_buffers = options.offload_buffers,
          .skip_keys = options.skip_keys,
          .whole_classes = options.preload_module_classes,
          .force_hooks = options.force_hooks,
          .max_memory = {},
          .offload = options.offload,
          .quantizer = quantizer};
}

/// The walk: files of what is on disk, then the plan, then values, then engines.
DispatchedModel walk(const ModelRef& model, bigmodel::PlacedWeights placed, bigmodel::DispatchSettings settings) {
  for (auto& weight : placed.weights)
    if (weight.is_on_disk(settings.offload_buffers)) weight.file = placed.source->file_of(weight);
  placed.source->check(placed.weights);
  Dispatcher dispatcher(model, std::move(settings), std::move(placed.weights));
  placed.source->fill(dispatcher.weights());
  return dispatcher.finish(std::move(placed.map));
}

}  // namespace

DispatchedModel bigmodel::dispatch(const char* caller, const ModelRef& model, const DeviceMap& device_map,
                                   const DispatchOptions& options, const Quantizer* quantizer) {
  auto placed = place_model(caller, model, device_map, options, quantizer);
  auto settings = settings_of(caller, options, main_of(placed.map, options.main_device), quantizer);
  if (quantizer) settings.max_memory = quantizer->max_memory;
  return walk(model, std::move(placed), std::move(settings));
}

DispatchedModel bigmodel::load_and_dispatch(const char* caller, const ModelRef& model, const fs::path& checkpoint,
                                            const LoadAndDispatchOptions& options, const Quantizer* quantizer) {
  auto placed = place_checkpoint(caller, model, checkpoint, options, quantizer);
  auto settings = settings_of(caller, options, main_of(placed.map, std::nullopt), quantizer);
  settings.max_memory = options.max_memory;
  settings.whole_classes.insert(settings.whole_classes.end(), options.no_split_module_classes.begin(),
                                options.no_split_module_classes.end());
  return walk(model, std::move(placed), std::move(settings));
}

namespace {

DispatchOptions whole_model(const OffloadAllOptions& options, const fs::path& offload_dir) {
  return {.main_device = options.execution_device.value_or(bigmodel::accelerator_or_host()),
          .state_dict = options.state_dict,
          .offload_dir = offload_dir,
          .offload_index = std::nullopt,
          .offload_buffers = options.offload_buffers,
          .skip_keys = {},
          .preload_module_classes = options.preload_module_classes,
          .force_hooks = false,
          .offload = options.offload};
}

}  // namespace

DispatchedModel dispatch_model(const ModelRef& model, const DeviceMap& device_map, const DispatchOptions& options) {
  return bigmodel::dispatch("dispatch_model", model, device_map, options, nullptr);
}

DispatchedModel cpu_offload(const ModelRef& model, const OffloadAllOptions& options) {
  return bigmodel::dispatch("cpu_offload", model, {{"", "cpu"}}, whole_model(options, {}), nullptr);
}

DispatchedModel disk_offload(const ModelRef& model, const fs::path& offload_dir, const OffloadAllOptions& options) {
  return bigmodel::dispatch("disk_offload", model, {{"", "disk"}}, whole_model(options, offload_dir), nullptr);
}

DispatchedModel load_checkpoint_and_dispatch(const ModelRef& model, const fs::path& checkpoint,
                                             const LoadAndDispatchOptions& options) {
  const Quantizer codes_as_they_are{
      .how = {}, .keep_codes = true, .exact = options.exact_products, .offload_folder = options.offload_folder};
  if (options.exact_products && !options.keep_codes)
    throw ConfigError(
        "load_checkpoint_and_dispatch: found exact_products without keep_codes, expected both: products with decoded "
        "weights are exact anyway");
  return bigmodel::load_and_dispatch("load_checkpoint_and_dispatch", model, checkpoint, options,
                                     options.keep_codes ? &codes_as_they_are : nullptr);
}

}  // namespace accelerate
