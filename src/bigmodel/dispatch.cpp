#include "accelerate/bigmodel/dispatch.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <unordered_map>

#include "accelerate/bigmodel.hpp"
#include "accelerate/codes/kernels.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/offload_places.hpp"
#include "bigmodel/quantizer.hpp"
#include "bigmodel/replace.hpp"
#include "bigmodel/walk.hpp"
#include "codes/bitsandbytes.hpp"
#include "codes/kernels/multiply.hpp"
#include "formats/torch_dtypes.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/homes/file.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/read_ahead.hpp"
#include "residency/residency.hpp"
#include "residency/worker.hpp"
#include "utils/file_mappings.hpp"
#include "utils/held_bytes.hpp"
#include "utils/huge_pages.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using bigmodel::LoadTarget;
using bigmodel::Quantizer;
using residency::TensorInFile;

/// One tensor of the model, and what becomes of it.
struct Weight {
  LoadTarget target;
  at::Device computes = at::kCPU;
  std::optional<TensorInFile> file;  ///< on disk: its bytes
  bool offloaded = false;            ///< comes and goes
  bool in_memory_whole = false;      ///< on disk, and used where it is mapped
  /// In few bits: makes the codes, or maps them. Called once.
  std::function<codes::Codes(const Weight&)> encode;
  int64_t code_bytes = 0;        ///< that they take in memory, in the order of products
  bool codes_in_file = false;    ///< they are mapped, so that memory need not hold them
  int64_t scale_bytes = 0;       ///< of code_bytes: scales that lie beside the codes, and stay
  bool codes_stay = true;        ///< once in the order of products they stay so, though they are in a file
  bool is_encoded_here = false;  ///< the checkpoint has numbers

  const std::string& name() const { return target.names.front(); }
  int64_t bytes() const { return target.tensor.numel() * static_cast<int64_t>(c10::elementSize(target.dtype)); }
  /// That can't leave memory.
  int64_t memory_bytes() const { return !encode ? bytes() : codes_in_file ? scale_bytes : code_bytes; }
  /// What memory may hold of codes in a file.
  bool may_have_packed_codes() const { return encode && codes_in_file && computes.is_cpu(); }
};

/// What moves as one.
struct UnitPlan {
  std::string name;
  at::Device device = at::kCPU;
  std::vector<Weight*> weights;
  int64_t bytes = 0;
};

struct Settings {
  std::string caller;
  DeviceMap map;
  at::Device main = at::kCPU;
  bool offload_buffers = false;
  std::vector<std::string> skip_keys, whole_classes;
  bool force_hooks = false;
  std::optional<MaxMemory> max_memory;
  OffloadOptions offload;
  const Quantizer* quantizer = nullptr;
};

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

at::Device main_of(const DeviceMap& map, const std::optional<at::Device>& given) {
  if (given) return given->has_index() || given->is_cpu() || given->is_meta() ? *given : at::Device(given->type(), 0);
  std::optional<Place> first;
  for (const auto& [name, place] : map)
    if ((place.is_gpu() || place.is_mps()) && (!first || place < *first)) first = place;
  return first ? bigmodel::device_of(*first) : at::Device(at::kCPU);
}

}  // namespace

at::Device bigmodel::accelerator_or_host() {
  const auto accelerator = at::getAccelerator();
  return accelerator && at::accelerator::deviceCount() > 0 ? at::Device(*accelerator, at::accelerator::getDeviceIndex())
                                                           : at::Device(at::kCPU);
}

namespace {

constexpr int64_t kUnitBytes = 64 << 20;  ///< large for a disk or a bus, small beside a model: the smaller the units,
                                          ///< the more of the budget is left for those that stay

/// Whole modules while they are small or of a class that is kept together; else each module's own tensors.
std::vector<UnitPlan> plan_units(const ModelRef& model, std::vector<Weight>& weights, int64_t unit_bytes,
                                 const std::vector<std::string>& whole_classes) {
  std::unordered_map<const at::TensorImpl*, Weight*> moving;
  for (auto& weight : weights)
    if (weight.offloaded) moving.emplace(weight.target.tensor.unsafeGetTensorImpl(), &weight);
  const auto modules = model.submodules();
  std::unordered_map<std::string, size_t> index;
  for (size_t i = 0; i < modules.size(); ++i) index.emplace(modules[i].path, i);
  // Each tensor is owned by the first module that has it.
  std::vector<std::vector<Weight*>> own(modules.size());
  for (const auto& [name, tensor] : model.state()) {
    const auto found = moving.find(tensor.unsafeGetTensorImpl());
    if (found == moving.end()) continue;
    const auto dot = name.rfind('.');
    own[index.at(dot == std::string::npos ? "" : name.substr(0, dot))].push_back(found->second);
    moving.erase(found);
  }
  std::vector<int64_t> bytes(modules.size(), 0);
  for (size_t i = modules.size(); i-- > 0;) {  // children come after their parents
    for (const auto* weight : own[i]) bytes[i] += weight->bytes();
    if (modules[i].parent >= 0) bytes[static_cast<size_t>(modules[i].parent)] += bytes[i];
  }
  std::vector<UnitPlan> units;
  std::vector<std::string> unit_of(modules.size());
  std::vector<bool> inside(modules.size(), false);  // of a module that is one unit
  for (size_t i = 0; i < modules.size(); ++i) {
    const auto parent = static_cast<size_t>(std::max<int64_t>(modules[i].parent, 0));
    if (i > 0 && inside[parent]) {
      inside[i] = true, unit_of[i] = unit_of[parent];
    } else {
      unit_of[i] = modules[i].path;
      inside[i] = bytes[i] <= unit_bytes ||
                  std::find(whole_classes.begin(), whole_classes.end(), modules[i].class_name) != whole_classes.end();
    }
    for (auto* weight : own[i]) {
      auto unit = std::find_if(units.rbegin(), units.rend(), [&](const UnitPlan& other) {
        return other.name == unit_of[i] && other.device == weight->computes;
      });
      if (unit == units.rend())
        unit = (units.push_back({.name = unit_of[i], .device = weight->computes, .weights = {}}), units.rbegin());
      unit->weights.push_back(weight);
      unit->bytes += weight->bytes();
    }
  }
  return units;
}

/// What of `device` may be used.
std::optional<int64_t> memory_of(const MaxMemory& memory, const at::Device& device) {
  const auto found = memory.find(device.is_cpu()             ? Place("cpu")
                                 : device.type() == at::kMPS ? Place("mps")
                                                             : Place(static_cast<int64_t>(device.index())));
  return found == memory.end() ? std::nullopt
                               : std::optional(static_cast<int64_t>(std::min(found->second.bytes, 0x1p62)));
}

/// "1234567 bytes (1.24 MB)", rounded up, since it says how much is needed.
std::string megabytes(int64_t bytes) {
  const auto hundredths = static_cast<int64_t>(std::ceil(static_cast<double>(bytes) / 1e4));
  return fmt::format("{} bytes ({}.{:02} MB)", bytes, hundredths / 100, hundredths % 100);
}

}  // namespace

struct DispatchedModel::Impl {
  DeviceMap map;
  at::Device main = at::kCPU;
  bool moves_inputs = false;
  std::set<std::string> skip_keys;
  int64_t streamed = 0, units = 0, code_bytes = 0;
  HeldBytes on_host{HeldFor::offloaded_host};
  std::map<std::string, std::unique_ptr<residency::Residency>>
      engines;  ///< by device; "resident": what never moves of a model across devices
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

/// From plan to engines. Making one throws what can be known; nothing is loaded or moved before finish().
class Dispatcher {
 public:
  Dispatcher(const ModelRef& model, Settings settings, std::vector<Weight> weights)
      : model_(model),
        settings_(std::move(settings)),
        weights_(std::move(weights)),
        impl_(std::make_shared<DispatchedModel::Impl>()) {
    decide();
  }
  std::vector<Weight>& weights() { return weights_; }

  /// Values are where plans say: in the model (host memory or a device) or in files.
  DispatchedModel finish() {
    const c10::NoGradGuard no_grad;
    auto& self = *impl_;
    self.map = settings_.map;
    self.main = settings_.main;
    self.skip_keys = {settings_.skip_keys.begin(), settings_.skip_keys.end()};
    self.moves_inputs = spread_ || !settings_.main.is_cpu();
    map_files();
    for (auto& weight : weights_)
      if (!weight.offloaded && !weight.encode && weight.target.tensor.device() != weight.computes &&
          !weight.target.tensor.is_meta())
        bigmodel::replace_values(weight.target.tensor, weight.target.tensor.to(weight.computes));
    const auto worker = units_.empty() ? nullptr : std::make_shared<residency::Worker>();
    std::map<std::string, TensorInFile> in_files;
    for (auto& weight : weights_)
      if (weight.offloaded && weight.file) in_files.emplace(weight.name(), *weight.file);
    const residency::FileTensors files(std::move(in_files), worker,
                                       {.direct = true,
                                        .scratch = settings_.offload.scratch,
                                        .readers = std::max<int64_t>(settings_.offload.readers, 1)});
    for (auto& unit : units_) {
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
    if (spread_) keep_resident();
    return DispatchedModel(impl_);
  }

 private:
  void decide() {
    // Files on the host are mapped when all of them fit into memory, and into the budget.
    std::set<at::Device, bool (*)(const at::Device&, const at::Device&)> devices(
        [](const at::Device& a, const at::Device& b) { return a.str() < b.str(); });
    int64_t on_disk = 0;
    for (auto& weight : weights_) {
      const auto& place = weight.target.place;
      if (place) weight.computes = place->is_gpu() || place->is_mps() ? bigmodel::device_of(*place) : settings_.main;
      else
        weight.computes =
            weight.target.tensor.is_meta() ? settings_.main : weight.target.tensor.device();  // where it is
      devices.insert(weight.computes);
      if (weight.file && weight.computes.is_cpu()) on_disk += weight.bytes();
      if (weight.may_have_packed_codes()) on_disk += weight.code_bytes;
    }
    spread_ = devices.size() > 1 || settings_.force_hooks;
    const auto stays_out = [&](const Weight& weight) {
      return weight.target.place && (weight.target.place->is_cpu() || weight.target.place->is_disk()) &&
             (!weight.target.is_buffer || settings_.offload_buffers);
    };
    const bool all_fit = on_disk <= host_memory_for_mapping(), mapped = !settings_.offload.always_read && all_fit;
    for (auto& weight : weights_) {
      const bool mappable =
          weight.file && weight.file->map && weight.file->dtype == weight.target.dtype && weight.computes.is_cpu();
      weight.in_memory_whole = mappable && mapped;
      weight.offloaded = !weight.encode && !weight.in_memory_whole && stays_out(weight) &&
                         (weight.file || !weight.computes.is_cpu()) && weight.target.tensor.numel() > 0;
    }
    std::map<std::string, std::pair<at::Device, int64_t>> resident;
    for (const auto& weight : weights_) {
      auto& [device, bytes] = resident.try_emplace(weight.computes.str(), weight.computes, 0).first->second;
      // Buffers of parts on disk come on top, as in infer_auto_device_map(): what the map has put there counts.
      if (!weight.offloaded && !weight.in_memory_whole && !(weight.target.place && weight.target.place->is_disk()))
        bytes += weight.encode ? 0 : weight.bytes();
    }
    for (const auto& weight : weights_)
      if (const auto there = resident.find(codes_device(weight).str()); weight.encode && there != resident.end())
        there->second.second += weight.memory_bytes();
    for (const auto& [name, of] : resident) {
      check_limit(of.first, of.second);
      budgets_[name] = budget(of.first, of.second);
    }
    int64_t unit_bytes = kUnitBytes;
    for (const auto& [name, bytes] : budgets_) unit_bytes = std::min(unit_bytes, bytes / 4);
    units_ = plan_units(model_, weights_, unit_bytes, settings_.whole_classes);
    for (const auto& unit : units_) {
      const auto& [device, held] = resident.at(unit.device.str());
      if (unit.bytes > budgets_.at(unit.device.str())) {
        int64_t largest = 0;
        for (const auto& other : units_)
          if (other.device == unit.device) largest = std::max(largest, other.bytes);
        raise<ConfigError>(
            "{}: there are {} on {} for weights that come and go, which is less than '{}' needs to compute, {}. "
            "Nothing was loaded. At least {} are needed for them{}; give more ({}){}.",
            settings_.caller, megabytes(std::max<int64_t>(budgets_.at(unit.device.str()), 0)), unit.device.str(),
            unit.name, megabytes(unit.bytes), megabytes(largest),
            held > 0 ? fmt::format(", besides {} for what stays there", megabytes(held)) : "", limit_name(),
            unit.weights.size() > 1 && !settings_.whole_classes.empty()
                ? fmt::format(", or take the class of '{}' out of those that are kept whole", unit.name)
                : "");
      }
    }
    if (!all_fit) choose_codes_that_stay();
  }

  /// What decides how much there is for what comes and goes, for people.
  const char* limit_name() const { return settings_.offload.budget_bytes ? "budget_bytes" : "max_memory"; }

  /// What never leaves a device is to fit into its limit.
  void check_limit(const at::Device& device, int64_t resident) const {
    if (!settings_.max_memory) return;
    const auto limit = memory_of(*settings_.max_memory, device);
    if (!limit || resident <= *limit) return;
    if (std::ranges::any_of(weights_,
                            [&](const Weight& weight) { return weight.encode && codes_device(weight) == device; }))
      raise<ConfigError>(
          "{}: found a limit of {} for {} (max_memory), expected at least {}, which stay there: weights in few bits, "
          "and whole ones that the device map has there. Nothing was loaded. Give more, or a device map with more of "
          "the model on disk.",
          settings_.caller, megabytes(*limit), device.str(), megabytes(resident));
  }

  /// What is computed with at a time: "model.layers.3" of a weight in a list of modules, whose blocks may hold all of
  /// theirs (packed_for_rows()); else the weight alone.
  static std::string used_together(const std::string& name) {
    for (size_t begin = 0, dot = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1)
      if (name.find_first_not_of("0123456789", begin) == dot) return name.substr(0, dot);
    return name;
  }

  /// Of codes in mapped files, memory keeps as many as there is room for, and of the others what is used together.
  void choose_codes_that_stay() {
    int64_t all = 0, largest = 0, moving = 0, largest_unit = 0;
    std::string most;
    std::map<std::string, int64_t> together;
    for (const auto& weight : weights_) {
      if (!weight.may_have_packed_codes()) continue;
      const auto name = used_together(weight.name());
      all += weight.code_bytes;
      if (const int64_t bytes = together[name] += weight.code_bytes; bytes > largest) largest = bytes, most = name;
    }
    if (all == 0) return;
    for (const auto& unit : units_) {
      if (!unit.device.is_cpu()) continue;
      moving += unit.bytes;
      largest_unit = std::max(largest_unit, unit.bytes);
    }
    int64_t& budget = budgets_.at(at::Device(at::kCPU).str());
    // Codes first, which are needed as often and are smaller.
    const int64_t for_units = std::min(moving, std::max(budget - all, largest_unit));
    int64_t left = budget - for_units;
    if (largest > left)
      raise<ConfigError>(
          "{}: there are {} on the host for weights in few bits that come and go, which is less than '{}' needs to "
          "compute, {}. Nothing was loaded. Give {} more ({}).",
          settings_.caller, megabytes(std::max<int64_t>(left, 0)), most, megabytes(largest), megabytes(largest - left),
          limit_name());
    if (moving > 0) budget = for_units;
    if (all > left) left -= largest;
    for (auto& weight : weights_) {
      if (!weight.may_have_packed_codes()) continue;
      weight.codes_stay = weight.code_bytes <= left;
      if (weight.codes_stay) left -= weight.code_bytes;
    }
  }

  int64_t host_memory_for_mapping() const {
    if (settings_.offload.budget_bytes) return *settings_.offload.budget_bytes;
    if (settings_.max_memory)
      if (const auto given = memory_of(*settings_.max_memory, at::kCPU)) return *given - in_host_memory_bytes();
    return memory_of(get_max_memory(), at::kCPU).value_or(0);
  }
  int64_t in_host_memory_bytes() const {
    int64_t bytes = 0;
    for (const auto& weight : weights_)
      if (weight.encode ? codes_device(weight).is_cpu() : !weight.file && weight.computes.is_cpu())
        bytes += weight.memory_bytes();
    return bytes;
  }

  /// Where the codes of a weight lie: where it computes, but in host memory if the map has it there or on disk.
  static at::Device codes_device(const Weight& weight) {
    const bool offloaded = weight.target.place && (weight.target.place->is_cpu() || weight.target.place->is_disk());
    return offloaded || weight.computes.is_meta() ? at::Device(at::kCPU) : weight.computes;
  }

  int64_t budget(const at::Device& device, int64_t resident) const {
    if (settings_.offload.budget_bytes) return *settings_.offload.budget_bytes;
    if (settings_.max_memory)
      if (const auto given = memory_of(*settings_.max_memory, device)) return *given - resident;
    if (device.is_meta()) return std::numeric_limits<int64_t>::max() / 4;
    return memory_of(get_max_memory(), device).value_or(std::numeric_limits<int64_t>::max() / 4) / 2;
  }

  residency::Residency& engine(const at::Device& device) {
    auto& engine = impl_->engines[device.str()];
    if (!engine) {
      const int64_t bytes = budgets_.at(device.str());
      int64_t largest = 1;
      for (const auto& unit : units_)
        if (unit.device == device) largest = std::max(largest, unit.bytes);
      const int64_t ahead = settings_.offload.prefetch.value_or(std::clamp<int64_t>(bytes / 4 / largest, 1, 8));
      engine = std::make_unique<residency::Residency>(residency::Policy{.prefetch = ahead,
                                                                        .outstanding = std::max<int64_t>(ahead, 1),
                                                                        .budget_bytes = bytes,
                                                                        .across_devices = spread_});
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
        .prefetch = 0, .outstanding = 1, .budget_bytes = most, .across_devices = spread_, .encoded = true});
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
          residency::EncodedWeight{.codes = codes::to(codes, codes_device(weight)),
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

  ModelRef model_;
  Settings settings_;
  std::vector<Weight> weights_;
  std::shared_ptr<DispatchedModel::Impl> impl_;
  bool spread_ = false;
  std::map<std::string, int64_t> budgets_;  ///< by device: for what comes and goes
  std::vector<UnitPlan> units_;
};

std::vector<Weight> weights_of(std::vector<LoadTarget> targets) {
  std::vector<Weight> weights;
  for (auto& target : targets) weights.push_back({.target = std::move(target)});
  return weights;
}

/// What codes take at most: in the order of products there are groups of 16 rows and of 32 columns, and scales in fp32.
/// @param like  its data need not be there, but of GGUF's blocks
void count_codes(Weight& weight, const codes::Codes& like) {
  const auto up = [](int64_t count, int64_t group) { return (count + group - 1) / group * group; };
  const int64_t rows = up(like.rows(), 16), numel = rows * up(like.columns(), 32);
  int64_t data = 0;
  if (codes::is_gguf(like.encoding)) data = rows * like.data.size(1);
  else if (codes::is_four_bit(like.encoding)) data = numel / 2, weight.scale_bytes = numel / like.block_size * 4;
  else data = numel, weight.scale_bytes = rows * 4;
  weight.code_bytes = data + weight.scale_bytes;
}
codes::Codes form_of(const LoadTarget& target, const codes::EncodeOptions& how) {
  codes::Codes form{.encoding = how.encoding, .shape = target.tensor.sizes().vec(), .block_size = how.block_size};
  if (target.transposed) std::swap(form.shape[0], form.shape[1]);
  return form;
}

/// Values in fp32 that have been rounded as the weight's dtype asks, and to fp16 before int8, as bitsandbytes does it.
/// A part after the other, and in memory that goes back at once: beside the codes a model has room for little more.
/// @param mapped  the value is in a mapped file, whose pages are given back as soon as they have been read
at::Tensor rounded(const at::Tensor& value, at::ScalarType dtype, bool to_half, bool mapped) {
  constexpr int64_t kPart = 1 << 20;
  const at::Tensor from = value.reshape({-1}), floats = empty_in_huge_pages(value.sizes(), at::kFloat);
  const at::Tensor kept = empty_in_huge_pages({std::min(kPart, from.numel())}, dtype),
                   half = to_half ? empty_in_huge_pages(kept.sizes(), at::kHalf) : kept;
  for (int64_t first = 0; first < from.numel(); first += kPart) {
    const int64_t count = std::min(kPart, from.numel() - first);
    const at::Tensor part = from.narrow(0, first, count);
    kept.narrow(0, 0, count).copy_(part);
    if (to_half) half.narrow(0, 0, count).copy_(kept.narrow(0, 0, count));
    floats.view({-1}).narrow(0, first, count).copy_(half.narrow(0, 0, count));
    if (mapped) give_pages_back(part.mutable_data_ptr(), static_cast<int64_t>(part.nbytes()));
  }
  return floats;
}

/// @throws ConfigError for values without codes: with what encoding said about them, unless rounding has made them so
void refuse_values(const std::string& name, const at::Tensor& value, at::ScalarType dtype, bool to_half,
                   const std::string& problem) {
  const auto most = at::abs(value).max().item<double>();
  if (!std::isfinite(most)) raise<ConfigError>("load_and_quantize_model: '{}': {}", name, problem);
  raise<ConfigError>(
      "load_and_quantize_model: '{}': found a value of magnitude {}, expected what {} holds, to which weights are "
      "rounded before they are encoded{}. {}, or leave the module out (skip_modules)",
      name, most, formats::python_name(to_half ? at::kHalf : dtype),
      to_half ? " (LLM.int8() begins with fp16, whatever torch_dtype is)" : "",
      to_half ? "Use load_in_4bit with another torch_dtype than float16" : "Set torch_dtype to bfloat16 or float32");
}

bool rounds_to_half(const codes::EncodeOptions& how) { return how.encoding == codes::Encoding::int8_rowwise; }

codes::Codes encode_value(const std::string& name, const at::Tensor& value, at::ScalarType dtype,
                          const codes::EncodeOptions& how, bool mapped) {
  const c10::NoGradGuard no_grad;
  try {
    codes::Codes codes = codes::encode(rounded(value, dtype, rounds_to_half(how), mapped), how);
    codes.dtype = dtype;
    return codes;
  } catch (const ConfigError& error) {
    refuse_values(name, value, dtype, rounds_to_half(how), error.what());
    throw;
  }
}

/// What encoding would refuse, before it takes a model's own values away. A part after the other.
void check_values(const std::string& name, const at::Tensor& value, at::ScalarType dtype,
                  const codes::EncodeOptions& how) {
  if (value.is_meta()) return;  // said later
  if (residency::encoded_weight(value))
    raise<ConfigError>(
        "load_and_quantize_model: '{}' is in few bits already, expected a weight of numbers: errors would add up. Load "
        "the model's files, or build it again",
        name);
  constexpr int64_t kPart = 1 << 20;
  const at::Tensor flat = value.detach().reshape({-1});
  for (int64_t first = 0; first < flat.numel(); first += kPart) {
    at::Tensor part = flat.narrow(0, first, std::min(kPart, flat.numel() - first)).to(dtype);
    if (rounds_to_half(how)) part = part.to(at::kHalf);
    if (!at::isfinite(part).all().item<bool>())
      refuse_values(name, value.detach(), dtype, rounds_to_half(how),
                    fmt::format("found NaN or infinity among elements {} and following, expected finite values: no "
                                "code stands for them. A weight that was trained into it, or a damaged file, is likely",
                                first));
  }
}

/// Codes that are to be on disk: written in bitsandbytes' form, and mapped.
codes::Codes on_disk(const std::string& name, const codes::Codes& codes, const fs::path& folder) {
  if (folder.empty())
    raise<ConfigError>(
        "load_and_quantize_model: the device map puts '{}' on disk, and there is no offload_folder, expected a folder "
        "with room for its codes",
        name);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) raise<CheckpointError>("can't create the folder '{}': {}.", folder.string(), error.message());
  const fs::path file = folder / (name + ".safetensors");
  save_safetensors(file, codes::bitsandbytes_tensors(name, codes));
  const SafetensorsFile mapped(file);
  const auto weights = codes::find_bitsandbytes_weights(mapped.names());
  return codes::read_bitsandbytes(
      weights.at(0), [&](const std::string& part) { return mapped.tensor(part); }, codes.dtype);
}

/// Decides which weights are in few bits. @param checkpoint  null: the model has its values
void choose_codes(std::vector<Weight>& weights, const Quantizer& quantizer, const bigmodel::Checkpoint* checkpoint) {
  std::optional<FileMappings> files;
  for (auto& weight : weights) {
    const LoadTarget& target = weight.target;
    if (target.is_buffer || target.tensor.numel() == 0 || !c10::isFloatingType(target.dtype)) continue;
    if (checkpoint && quantizer.keep_codes && target.stored) {
      if (const auto kept = checkpoint->codes.find(target.stored->first);
          kept != checkpoint->codes.end() && kept->second.transposed == target.transposed) {
        codes::Codes codes = kept->second.read(target.dtype);
        codes.dtype = target.dtype;
        if (codes.data.defined()) {
          if (!files) files.emplace();
          count_codes(weight, codes);
          weight.codes_in_file = files->hold(codes.data.const_data_ptr());
          // Asked for once: there may be a copy, whose memory is not to be held twice.
          weight.encode = [codes = std::move(codes)](const Weight&) mutable { return std::move(codes); };
          continue;
        }
      }
    }
    const auto how = quantizer.how ? quantizer.how(target) : std::nullopt;
    if (!how || (checkpoint && !target.stored)) continue;
    count_codes(weight, form_of(target, *how));
    weight.is_encoded_here = true;
    if (!checkpoint) check_values(weight.name(), target.tensor, target.dtype, *how);
    weight.encode = [name = weight.name(), tensor = target.tensor, mapped = checkpoint && checkpoint->mapped,
                     stored = checkpoint ? target.stored : nullptr, transposed = target.transposed,
                     dtype = target.dtype, how = *how, folder = quantizer.offload_folder](const Weight& self) {
      at::Tensor value = stored ? stored->second.read_whole() : tensor;
      if (transposed) value = value.t();
      const codes::Codes codes = encode_value(name, value, dtype, how, mapped && value.is_contiguous());
      return self.codes_in_file ? on_disk(name, codes, folder) : codes;
    };
  }
}

/// Once places are known: codes that are made here and are to be on disk go to files.
void send_codes_to_disk(std::vector<Weight>& weights) {
  for (auto& weight : weights)
    if (weight.is_encoded_here) weight.codes_in_file = weight.target.place && weight.target.place->is_disk();
}

bool goes_to_disk(const LoadTarget& target, bool offload_buffers) {
  return target.place && target.place->is_disk() && (!target.is_buffer || offload_buffers);
}

/// Of codes, under all names of their weights.
std::map<std::string, int64_t> bytes_by_name(const std::vector<Weight>& weights) {
  std::map<std::string, int64_t> bytes;
  for (const auto& weight : weights)
    for (const auto& name : weight.target.names)
      if (weight.code_bytes > 0) bytes[name] = weight.code_bytes;
  return bytes;
}

/// Values that were given instead of the model's.
void take_over(const std::string& caller, std::vector<Weight>& weights,
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
      if (const auto given = state_dict.find(name); given != state_dict.end() && weight.target.place &&
                                                    (weight.target.place->is_cpu() || weight.target.place->is_disk())) {
        bigmodel::replace_values(weight.target.tensor, given->second.detach().to(weight.target.dtype));
        break;
      }
}

/// What an offload folder from before has of a weight, beside a model that has it too. @throws CheckpointError where
/// the two are not the same, to the bit
void check_same_values(const std::string& caller, const Weight& weight, const fs::path& folder) {
  if (weight.target.tensor.is_meta()) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor mapped = weight.file->map(), mine = weight.target.tensor.detach().to(at::kCPU).contiguous(),
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

}  // namespace

std::map<std::string, int64_t> bigmodel::bytes_in_few_bits(const ModelRef& model, const Quantizer& quantizer) {
  auto weights = weights_of(bigmodel::targets_of(model));
  for (auto& weight : weights)
    if (const auto how = quantizer.how(weight.target)) count_codes(weight, form_of(weight.target, *how));
  return bytes_by_name(weights);
}

void bigmodel::count_bytes(ModuleTree& tree, const std::map<std::string, int64_t>& bytes) {
  const auto walk = [&](const auto& self, ModuleTree& module, const std::string& prefix) -> void {
    for (auto& tensor : module.parameters)
      if (const auto found = bytes.find(joined(prefix, tensor.name)); found != bytes.end())
        tensor.shape = {found->second}, tensor.dtype = "uint8";
    for (auto& child : module.children) self(self, child, joined(prefix, child.name));
  };
  walk(walk, tree, "");
}

std::string bigmodel::dtype_of_size(at::ScalarType dtype) {
  const auto size = c10::elementSize(dtype);
  return size == 2 ? "float16" : size == 1 ? "int8" : "float32";
}

DispatchedModel bigmodel::dispatch(const std::string& caller, const ModelRef& model, const DeviceMap& device_map,
                                   const DispatchOptions& options, const Quantizer* quantizer) {
  const auto map = by_own_names(model, device_map);
  check_devices(caller, map, options.main_device);
  auto targets = bigmodel::targets_of(model);
  bigmodel::place(caller.c_str(), model, targets, map);
  auto weights = weights_of(std::move(targets));
  take_over(caller, weights, options.state_dict);
  if (quantizer) {
    for (auto& weight : weights)
      if (weight.target.tensor.is_floating_point()) weight.target.dtype = quantizer->dtype(weight.target);
    choose_codes(weights, *quantizer, nullptr);
    send_codes_to_disk(weights);
  }
  std::optional<OffloadIndex> index = options.offload_index;
  if (!index && !options.offload_dir.empty() && fs::exists(options.offload_dir / "index.json"))
    index = load_offload_index(options.offload_dir);
  std::map<std::string, OffloadedWeight> saved;
  if (index) saved.insert(index->begin(), index->end());
  NamedTensors to_write;
  std::string missing;  // the first of them
  constexpr int64_t kNamed = 5;
  int64_t num_missing = 0;
  const auto note_missing = [&](const auto& weight) {
    if (num_missing++ < kNamed) missing += "\n  " + weight.name();
  };
  for (auto& weight : weights) {
    const auto& target = weight.target;
    if (target.tensor.is_meta() && (weight.encode || !goes_to_disk(target, options.offload_buffers)))
      note_missing(weight);
    if (weight.encode || !goes_to_disk(target, options.offload_buffers)) continue;
    if (options.offload_dir.empty() && !index)
      raise<ConfigError>(
          "{}: the device map has parts on disk ('{}' is the first), and offload_dir is empty. Give a folder for them, "
          "or one that has them already.",
          caller, weight.name());
    const auto found = std::find_if(target.names.begin(), target.names.end(),
                                    [&](const std::string& name) { return saved.contains(name); });
    if (found != target.names.end()) {
      weight.file = bigmodel::tensor_in_folder(options.offload_dir, *found, saved.at(*found));
      if (!at::IntArrayRef(weight.file->shape).equals(target.tensor.sizes()))
        raise<CheckpointError>(
            "{}: '{}' is of shape {} in the offload folder '{}', {} in the model. The folder is of another model: use "
            "another, or remove it.",
            caller, *found, c10::str(at::IntArrayRef(weight.file->shape)), options.offload_dir.string(),
            c10::str(target.tensor.sizes()));
      if (!options.offload_index) check_same_values(caller, weight, options.offload_dir);
    } else if (target.tensor.is_meta()) {
      note_missing(weight);
    } else {
      to_write.emplace_back(weight.name(), target.tensor);
    }
  }
  if (num_missing > 0)
    raise<ConfigError>(
        "{}: these weights have no values (they are on the meta device), neither in the model nor in state_dict nor in "
        "the offload folder:{}{}\nLoad a checkpoint with load_checkpoint_and_dispatch, or materialize() the model.",
        caller, missing, num_missing > kNamed ? fmt::format("\n  … ({} in all)", num_missing) : "");
  // Where they will be, so that everything can be checked before anything is written.
  for (auto& weight : weights) {
    if (weight.file || weight.encode || !goes_to_disk(weight.target, options.offload_buffers)) continue;
    const auto& tensor = weight.target.tensor;
    const auto file = options.offload_dir / (weight.name() + ".dat");
    weight.file = TensorInFile{
        .file = file,
        .begin = 0,
        .bytes = static_cast<int64_t>(tensor.nbytes()),
        .dtype = tensor.scalar_type(),
        .shape = tensor.sizes().vec(),
        .map = [file, form = bigmodel::offloaded_weight_of(tensor)] { return load_offloaded_weight(file, form); },
        .decode = nullptr};
  }
  Settings settings{.caller = caller,
                    .map = map,
                    .main = main_of(map, options.main_device),
                    .offload_buffers = options.offload_buffers,
                    .skip_keys = options.skip_keys,
                    .whole_classes = options.preload_module_classes,
                    .force_hooks = options.force_hooks,
                    .max_memory = quantizer ? quantizer->max_memory : std::nullopt,
                    .offload = options.offload,
                    .quantizer = quantizer};
  if (quantizer) {
    const c10::NoGradGuard no_grad;
    for (const auto& weight : weights)
      if (!weight.encode && weight.target.tensor.scalar_type() != weight.target.dtype)
        bigmodel::replace_values(weight.target.tensor, weight.target.tensor.to(weight.target.dtype));
  }
  Dispatcher dispatcher(model, std::move(settings), std::move(weights));
  if (!to_write.empty()) offload_state_dict(options.offload_dir, to_write);
  return dispatcher.finish();
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

DispatchedModel cpu_offload(const ModelRef& model, const CpuOffloadOptions& options) {
  return bigmodel::dispatch("cpu_offload", model, {{"", "cpu"}}, whole_model(options, {}), nullptr);
}

DispatchedModel disk_offload(const ModelRef& model, const fs::path& offload_dir, const DiskOffloadOptions& options) {
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

DispatchedModel bigmodel::load_and_dispatch(const char* caller, const ModelRef& model, const fs::path& checkpoint,
                                            const LoadAndDispatchOptions& options, const Quantizer* quantizer) {
  if (!options.full_state_dict)
    throw ConfigError(
        "load_checkpoint_and_dispatch: found full_state_dict = false, expected a checkpoint of whole tensors; sharded "
        "ones are read by Accelerator::load_state()");
  if (options.broadcast_from_rank0)
    throw ConfigError(
        "load_checkpoint_and_dispatch: found broadcast_from_rank0 = true, which is not needed: every process reads the "
        "checkpoint by itself, and those of one machine share its pages. Put the files where all can read them.");
  auto tree = bigmodel::describe_for(caller, model, options.no_split_module_classes);
  LoadCheckpointOptions loading{.device_map = std::nullopt,
                                .dtype = options.dtype,
                                .keep_in_fp32_modules = options.keep_in_fp32_modules,
                                .offload_folder = options.offload_folder,
                                .offload_buffers = options.offload_buffers,
                                .strict = options.strict};
  DeviceMap map;
  const auto* const strategy = options.device_map ? std::get_if<std::string>(&*options.device_map) : nullptr;
  if (options.device_map && !strategy) {
    map = by_own_names(model, std::get<DeviceMap>(*options.device_map));
    check_devices(caller, map, std::nullopt);
    loading.device_map = map;
  }
  auto plan = bigmodel::plan_loading(caller, model, checkpoint, loading);
  auto weights = weights_of(plan.targets);
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
    if (options.dtype) map_options.dtype = bigmodel::dtype_of_size(*options.dtype);
    if (quantizer) map_options.special_dtypes = quantizer->special_dtypes;
    bigmodel::count_bytes(tree, bytes_by_name(weights));
    map = make_device_map(tree, *strategy, std::move(map_options));
    check_devices(caller, map, std::nullopt);
    plan.options.device_map = map;
    bigmodel::place(caller, model, plan.targets, map);
    for (size_t i = 0; i < weights.size(); ++i) weights[i].target.place = plan.targets[i].place;
  }
  send_codes_to_disk(weights);
  // Vectors beside codes stay: they are little, and rows of numbers go directly from one to the other
  // (direct_rows.hpp), with the same bits however much of the codes comes and goes.
  for (size_t i = 0; quantizer && i < weights.size(); ++i)
    if (auto& place = weights[i].target.place; place && place->is_disk() && weights[i].target.tensor.dim() <= 1)
      place = plan.targets[i].place = Place("cpu");
  Settings settings{.caller = caller,
                    .map = map,
                    .main = main_of(map, std::nullopt),
                    .offload_buffers = options.offload_buffers,
                    .skip_keys = options.skip_keys,
                    .whole_classes = options.preload_module_classes,
                    .force_hooks = options.force_hooks,
                    .max_memory = options.max_memory,
                    .offload = options.offload,
                    .quantizer = quantizer};
  settings.whole_classes.insert(settings.whole_classes.end(), options.no_split_module_classes.begin(),
                                options.no_split_module_classes.end());
  std::set<const at::TensorImpl*> where_they_lie;  // and those that are read by themselves
  for (auto& weight : weights) {
    const auto* stored = weight.target.stored;
    if (weight.encode) where_they_lie.insert(weight.target.tensor.unsafeGetTensorImpl());
    if (weight.encode || !stored || !plan.on_disk(weight.target)) continue;
    const auto& [name, tensor] = *stored;
    const bool converted = tensor.dtype != weight.target.dtype || (tensor.bytes && tensor.bytes->decode);
    if (!tensor.bytes || (converted && !options.offload_folder.empty())) {
      if (options.offload_folder.empty())
        raise<CheckpointError>(
            "{}: '{}' is to be on disk, and can't be used where it lies in '{}', because its elements are not in one "
            "piece. Give offload_folder, a folder with room for such weights.",
            caller, name, checkpoint.string());
      const auto form = bigmodel::offloaded_weight_of(
          at::empty(tensor.sizes, at::TensorOptions().dtype(weight.target.dtype).device(at::kMeta)));
      const auto file = options.offload_folder / (weight.name() + ".dat");
      weight.file = TensorInFile{.file = file,
                                 .begin = 0,
                                 .bytes = weight.bytes(),
                                 .dtype = weight.target.dtype,
                                 .shape = tensor.sizes,
                                 .map = [file, form] { return load_offloaded_weight(file, form); },
                                 .decode = nullptr};
      continue;
    }
    weight.file = TensorInFile{.file = tensor.bytes->file,
                               .begin = tensor.bytes->begin,
                               .bytes = tensor.bytes->bytes,
                               .dtype = tensor.dtype,
                               .shape = tensor.sizes,
                               .map = nullptr,
                               .decode = tensor.bytes->decode};
    if (plan.checkpoint.mapped && !converted) weight.file->map = tensor.read_whole;
    where_they_lie.insert(weight.target.tensor.unsafeGetTensorImpl());
  }
  Dispatcher dispatcher(model, std::move(settings), std::move(weights));
  bigmodel::load(
      plan, [&](const LoadTarget& target) { return where_they_lie.contains(target.tensor.unsafeGetTensorImpl()); });
  return dispatcher.finish();
}

}  // namespace accelerate
