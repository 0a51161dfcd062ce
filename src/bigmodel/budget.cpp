#include "bigmodel/budget.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <unordered_map>

#include "accelerate/model/submodule.hpp"
#include "utils/raise.hpp"

namespace accelerate::bigmodel {
namespace {

constexpr int64_t kUnitBytes = 64 << 20;  ///< large for a disk or a bus, small beside a model: the smaller the units,
                                          ///< the more of the budget is left for those that stay

/// Whole modules while they are small or of a class that is kept together; else each module's own tensors.
std::vector<UnitPlan> plan_units(const ModelRef& model, std::vector<PlacedWeight>& weights, int64_t unit_bytes,
                                 const std::vector<std::string>& whole_classes) {
  std::unordered_map<const at::TensorImpl*, PlacedWeight*> moving;
  for (auto& weight : weights)
    if (weight.offloaded) moving.emplace(weight.target.tensor.unsafeGetTensorImpl(), &weight);
  const auto modules = model.submodules();
  std::unordered_map<std::string, size_t> index;
  for (size_t i = 0; i < modules.size(); ++i) index.emplace(modules[i].path, i);
  // Each tensor is owned by the first module that has it.
  std::vector<std::vector<PlacedWeight*>> own(modules.size());
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

/// The memory of `device` that may be used.
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

class BudgetPlanner {
 public:
  BudgetPlanner(const ModelRef& model, const DispatchSettings& settings, std::vector<PlacedWeight>& weights)
      : model_(model), settings_(settings), weights_(weights) {}

  Budget plan() && {
    // Files on the host are mapped when all of them fit into memory, and into the budget.
    std::set<at::Device, bool (*)(const at::Device&, const at::Device&)> devices(
        [](const at::Device& a, const at::Device& b) { return a.str() < b.str(); });
    int64_t on_disk = 0;
    for (auto& weight : weights_) {
      const auto& place = weight.target.place;
      if (place) weight.computes = place->is_gpu() || place->is_mps() ? device_of(*place) : settings_.main;
      else
        weight.computes =
            weight.target.tensor.is_meta() ? settings_.main : weight.target.tensor.device();  // where it is
      devices.insert(weight.computes);
      if (weight.file && weight.computes.is_cpu()) on_disk += weight.bytes();
      if (weight.may_have_packed_codes()) on_disk += weight.code_bytes;
    }
    budget_.spread = devices.size() > 1 || settings_.force_hooks;
    const auto stays_out = [&](const PlacedWeight& weight) {
      return weight.is_placed_outside() && (!weight.target.is_buffer || settings_.offload_buffers);
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
      if (const auto there = resident.find(weight.codes_device().str()); weight.encode && there != resident.end())
        there->second.second += weight.memory_bytes();
    for (const auto& [name, of] : resident) {
      check_limit(of.first, of.second);
      budget_.bytes[name] = bytes_for(of.first, of.second);
    }
    int64_t unit_bytes = kUnitBytes;
    for (const auto& [name, bytes] : budget_.bytes) unit_bytes = std::min(unit_bytes, bytes / 4);
    budget_.units = plan_units(model_, weights_, unit_bytes, settings_.whole_classes);
    for (const auto& unit : budget_.units) {
      const auto& [device, held] = resident.at(unit.device.str());
      if (unit.bytes > budget_.bytes.at(unit.device.str())) {
        int64_t largest = 0;
        for (const auto& other : budget_.units)
          if (other.device == unit.device) largest = std::max(largest, other.bytes);
        raise<ConfigError>(
            "{}: there are {} on {} for weights that come and go, which is less than '{}' needs to compute, {}. "
            "Nothing was loaded. At least {} are needed for them{}; give more ({}){}.",
            settings_.caller, megabytes(std::max<int64_t>(budget_.bytes.at(unit.device.str()), 0)), unit.device.str(),
            unit.name, megabytes(unit.bytes), megabytes(largest),
            held > 0 ? fmt::format(", besides {} for what stays there", megabytes(held)) : "", limit_name(),
            unit.weights.size() > 1 && !settings_.whole_classes.empty()
                ? fmt::format(", or take the class of '{}' out of those that are kept whole", unit.name)
                : "");
      }
    }
    if (!all_fit) choose_codes_that_stay();
    return std::move(budget_);
  }

 private:
  /// The name of the limit that decides how much room units that come and go have, for messages.
  const char* limit_name() const { return settings_.offload.budget_bytes ? "budget_bytes" : "max_memory"; }

  /// Checks that the bytes which never leave a device fit into its limit.
  void check_limit(const at::Device& device, int64_t resident) const {
    if (!settings_.max_memory) return;
    const auto limit = memory_of(*settings_.max_memory, device);
    if (!limit || resident <= *limit) return;
    if (std::ranges::any_of(
            weights_, [&](const PlacedWeight& weight) { return weight.encode && weight.codes_device() == device; }))
      raise<ConfigError>(
          "{}: found a limit of {} for {} (max_memory), expected at least {}, which stay there: weights in few bits, "
          "and whole ones that the device map has there. Nothing was loaded. Give more, or a device map with more of "
          "the model on disk.",
          settings_.caller, megabytes(*limit), device.str(), megabytes(resident));
  }

  /// The name of the weights that are computed with at a time: "model.layers.3" of a weight in a list of modules, whose
  /// blocks may hold all of theirs (packed_for_rows()); else the weight alone.
  static std::string used_together(const std::string& name) {
    for (size_t begin = 0, dot = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1)
      if (name.find_first_not_of("0123456789", begin) == dot) return name.substr(0, dot);
    return name;
  }

  /// Memory keeps as many codes of mapped files as there is room for, and room for the others that are used together.
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
    for (const auto& unit : budget_.units) {
      if (!unit.device.is_cpu()) continue;
      moving += unit.bytes;
      largest_unit = std::max(largest_unit, unit.bytes);
    }
    int64_t& budget = budget_.bytes.at(at::Device(at::kCPU).str());
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
      if (weight.encode ? weight.codes_device().is_cpu() : !weight.file && weight.computes.is_cpu())
        bytes += weight.memory_bytes();
    return bytes;
  }

  int64_t bytes_for(const at::Device& device, int64_t resident) const {
    if (settings_.offload.budget_bytes) return *settings_.offload.budget_bytes;
    if (settings_.max_memory)
      if (const auto given = memory_of(*settings_.max_memory, device)) return *given - resident;
    if (device.is_meta()) return std::numeric_limits<int64_t>::max() / 4;
    return memory_of(get_max_memory(), device).value_or(std::numeric_limits<int64_t>::max() / 4) / 2;
  }

  const ModelRef& model_;
  const DispatchSettings& settings_;
  std::vector<PlacedWeight>& weights_;
  Budget budget_;
};

}  // namespace

Budget plan_budget(const ModelRef& model, const DispatchSettings& settings, std::vector<PlacedWeight>& weights) {
  return BudgetPlanner(model, settings, weights).plan();
}

}  // namespace accelerate::bigmodel
