#pragma once

/// Which part of a model goes where: device maps as the reference has them, worked out from a description of the model.

#include <compare>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/bigmodel/sizes.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A place for weights: a GPU by its number, "mps", "cpu" (host memory) or "disk". Ordered as places are filled: GPUs
/// by number, mps, cpu, disk.
class ACCELERATE_API Place {
 public:
  Place(int64_t gpu);  // NOLINT(google-explicit-constructor): {{"encoder", 0}, {"decoder", "cpu"}} reads as in Python
  Place(int gpu) : Place(static_cast<int64_t>(gpu)) {}  // NOLINT(google-explicit-constructor)
  /// Also "cuda", "cuda:1" and "1". @throws ConfigError for another name.
  Place(std::string_view name);                                      // NOLINT(google-explicit-constructor)
  Place(const std::string& name) : Place(std::string_view(name)) {}  // NOLINT(google-explicit-constructor)
  Place(const char* name) : Place(std::string_view(name)) {}         // NOLINT(google-explicit-constructor)

  bool is_gpu() const { return kind_ == Kind::gpu; }
  bool is_mps() const { return kind_ == Kind::mps; }
  bool is_cpu() const { return kind_ == Kind::cpu; }
  bool is_disk() const { return kind_ == Kind::disk; }
  int64_t gpu() const { return gpu_; }  ///< meaningful for is_gpu()
  std::string str() const;              ///< "0", "mps", "cpu", "disk"

  auto operator<=>(const Place&) const = default;  // NOLINT(modernize-use-nullptr): version 14 sees a 0 in it

 private:
  enum class Kind { gpu, mps, cpu, disk };
  Kind kind_;
  int64_t gpu_ = 0;
};

/// Places of modules (and of tensors that lie beside modules) by dotted name; "" is the whole model. A name stands for
/// everything below it.
using DeviceMap = std::map<std::string, Place>;

/// Bytes, as a number or as "10GiB" (see convert_file_size_to_int). Fractions come from bools, which count as one bit.
struct ACCELERATE_API MemorySize {
  MemorySize(double bytes) : bytes(bytes) {}                        // NOLINT(google-explicit-constructor)
  MemorySize(int64_t bytes) : bytes(static_cast<double>(bytes)) {}  // NOLINT(google-explicit-constructor)
  MemorySize(int bytes) : bytes(bytes) {}                           // NOLINT(google-explicit-constructor)
  MemorySize(std::string_view text)
      : MemorySize(convert_file_size_to_int(text)) {}                          // NOLINT(google-explicit-constructor)
  MemorySize(const std::string& text) : MemorySize(std::string_view(text)) {}  // NOLINT(google-explicit-constructor)
  MemorySize(const char* text) : MemorySize(std::string_view(text)) {}         // NOLINT(google-explicit-constructor)
  double bytes;
};
/// How much each place may hold: {{0, "20GiB"}, {"cpu", "60GiB"}}.
using MaxMemory = std::map<Place, MemorySize>;

/// The memory that is free now: of each GPU, and of the system for this process (the limit of its control group
/// counts).
ACCELERATE_API MaxMemory get_max_memory();

/// A report on how a device map was worked out.
struct DeviceMapReport {
  /// Places that got nothing, with the bytes that the first thing tried there would have needed.
  std::map<Place, double> minimum_memory;
  double offloaded_buffer_bytes = 0;  ///< buffers of parts on cpu or disk, which stay on a GPU unless offload_buffers
  bool offloaded_buffers_fit = true;  ///< false: there are GPUs and none has room for these
};

struct DeviceMapOptions {
  /// Default: get_max_memory(). "disk" is always there and without a limit.
  std::optional<MaxMemory> max_memory;
  /// Classes of modules that stay in one place, like blocks with a residual connection.
  std::vector<std::string> no_split_module_classes;
  /// As SizeOptions: what weights are loaded in.
  std::optional<std::string> dtype;
  std::map<std::string, std::string> special_dtypes;
  /// Join the parts of a module that are all in one place.
  bool clean_result = true;
  /// Buffers of parts on cpu or disk go there too. Otherwise a warning says so when no GPU has room for them.
  bool offload_buffers = false;
  /// When the next module doesn't fit an empty place, look further for one that does, instead of leaving the place
  /// empty.
  bool fallback_allocation = false;
  std::ostream* verbose = nullptr;    ///< the stream in which each decision is explained
  DeviceMapReport* report = nullptr;  ///< filled in when given
};

/// Fills the places in their order with the modules in theirs. A module that doesn't fit is split into its children,
/// unless its class forbids it; then the next place is begun. The first GPU and the host keep room for the largest
/// layer still to come, which is brought there to compute. Tied weights go together with what holds them. Buffers
/// directly in a module that was split are not in the map: they stay where the model computes.
///
/// Gives the reference's maps. Where the reference fails (a tied weight beside a fallback, a budget with a fraction)
/// gives the map that its rules mean.
ACCELERATE_API DeviceMap infer_auto_device_map(const ModuleTree& tree, const DeviceMapOptions& options = {});

struct BalancedMemoryOptions {
  std::optional<MaxMemory> max_memory;  ///< default: get_max_memory(), of which a single GPU gives 9/10
  std::vector<std::string> no_split_module_classes;
  std::optional<std::string> dtype;
  std::map<std::string, std::string> special_dtypes;
  bool low_zero = false;  ///< As little as possible on GPU 0, which then has room for what generate() keeps.
};

/// `max_memory` lowered so that infer_auto_device_map() loads all GPUs evenly. The last GPU keeps its limit, in case
/// the estimate is short. With low_zero any numbers of GPUs do; the reference takes those with memory for 0, 1, ...
/// without a gap, and leaves more than needed on GPU 0, or fails, where there is one.
ACCELERATE_API MaxMemory get_balanced_memory(const ModuleTree& tree, const BalancedMemoryOptions& options = {});

/// A device map by the reference's strategies: "auto" and "balanced" (even), "balanced_low_0" (GPU 0 spared),
/// "sequential" (one GPU after the other).
/// @throws ConfigError for another name.
ACCELERATE_API DeviceMap make_device_map(const ModuleTree& tree, const std::string& strategy,
                                         DeviceMapOptions options = {});

/// Joins entries: when all names below a module have the same place, the module stands for them.
ACCELERATE_API DeviceMap clean_device_map(DeviceMap device_map);

/// Checks that every tensor of the state dict has a place.
/// @return the keys that name no module or tensor of the model (the reference warns of them; loading refuses them).
/// @throws ConfigError listing the tensors without a place.
ACCELERATE_API std::vector<std::string> check_device_map(const ModuleTree& tree, const DeviceMap& device_map);

/// The place of a tensor or module: that of the longest key which is the name or leads to it. Empty when there is none.
ACCELERATE_API std::optional<Place> place_of(const DeviceMap& device_map, const std::string& name);

}  // namespace accelerate
