#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/codes/codes.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/quantizer.hpp"
#include "residency/homes/file.hpp"

/// The starting point of dispatching: the weights of a model with their places, and where their values come from.
namespace accelerate::bigmodel {

/// One tensor of the model, and what becomes of it.
struct PlacedWeight {
  LoadTarget target;
  at::Device computes = at::kCPU;
  std::optional<residency::TensorInFile> file;  ///< on disk: its bytes
  bool offloaded = false;                       ///< comes and goes
  bool in_memory_whole = false;                 ///< on disk, and used where it is mapped
  /// In few bits: makes the codes, or maps them. Called once.
  std::function<codes::Codes(const PlacedWeight&)> encode;
  int64_t code_bytes = 0;        ///< that they take in memory, in the order of products
  bool codes_in_file = false;    ///< they are mapped, so that memory need not hold them
  int64_t scale_bytes = 0;       ///< of code_bytes: scales that lie beside the codes, and stay
  bool codes_stay = true;        ///< once in the order of products they stay so, though they are in a file
  bool is_encoded_here = false;  ///< the checkpoint has numbers

  const std::string& name() const { return target.names.front(); }
  int64_t bytes() const { return target.tensor.numel() * static_cast<int64_t>(c10::elementSize(target.dtype)); }
  /// The bytes that can't leave memory.
  int64_t memory_bytes() const { return !encode ? bytes() : codes_in_file ? scale_bytes : code_bytes; }
  /// Whether memory may hold a packed copy of codes in a file.
  bool may_have_packed_codes() const { return encode && codes_in_file && computes.is_cpu(); }
  /// The map has it in host memory or on disk.
  bool is_placed_outside() const { return target.place && (target.place->is_cpu() || target.place->is_disk()); }
  /// Where its codes lie: where it computes, but in host memory if the map has it there or on disk.
  at::Device codes_device() const {
    return is_placed_outside() || computes.is_meta() ? at::Device(at::kCPU) : computes;
  }
  /// On disk, as numbers.
  bool is_on_disk(bool offload_buffers) const {
    return !encode && target.place && target.place->is_disk() && (!target.is_buffer || offload_buffers);
  }
};

/// Where values are before a model is dispatched. The walk (dispatch.cpp) asks file_of() for each weight on disk, then
/// check(); when nothing can go wrong any more but by the disk, fill().
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// The bytes of a weight on disk, there already or written by fill(); none: the source has no values of it.
  virtual std::optional<residency::TensorInFile> file_of(const PlacedWeight& weight) = 0;
  /// @throws ConfigError where a weight has no values
  virtual void check(const std::vector<PlacedWeight>&) const {}
  /// Writes files, and brings all other values into memory.
  virtual void fill(const std::vector<PlacedWeight>& weights) = 0;
};

struct PlacedWeights {
  DeviceMap map;
  std::vector<PlacedWeight> weights;
  std::unique_ptr<WeightSource> source;  ///< refers to the options that it was made with
};

/// The weights of a model that has its values, or to which `options` give them. @throws as dispatch_model()
PlacedWeights place_model(const std::string& caller, const ModelRef& model, const DeviceMap& device_map,
                          const DispatchOptions& options, const Quantizer* quantizer);
/// The weights of a checkpoint. @throws as load_checkpoint_and_dispatch()
PlacedWeights place_checkpoint(const char* caller, const ModelRef& model, const std::filesystem::path& checkpoint,
                               const LoadAndDispatchOptions& options, const Quantizer* quantizer);

std::vector<PlacedWeight> weights_of(std::vector<LoadTarget> targets);

// ---- weights in few bits (few_bits.cpp)

/// Decides which weights are in few bits. @param checkpoint  null: the model has its values
void choose_codes(std::vector<PlacedWeight>& weights, const Quantizer& quantizer, const OpenCheckpoint* checkpoint);
/// Once places are known: codes that are made here and are to be on disk go to files.
void send_codes_to_disk(std::vector<PlacedWeight>& weights);
/// The bytes of codes, under all names of their weights.
std::map<std::string, int64_t> bytes_by_name(const std::vector<PlacedWeight>& weights);

}  // namespace accelerate::bigmodel
