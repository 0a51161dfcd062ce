#pragma once

/// Models larger than memory: weights stay in the checkpoint and are read ahead of the computation.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/export.hpp"
#include "accelerate/model_ref.hpp"

namespace accelerate {

struct DispatchOptions {
  /// Where each part goes; default: worked out by `strategy` from `max_memory`.
  std::optional<DeviceMap> device_map;
  std::string strategy = "auto";  ///< as make_device_map()
  std::optional<MaxMemory> max_memory;
  /// Classes of modules that are one unit: placed together, and read together when on disk. Other weights are read module by module.
  std::vector<std::string> no_split_module_classes;
  /// Bytes that weights from disk may take at a time. More only where one operator needs more. Default: none, the files are mapped, if they fit into free memory; else half of that.
  std::optional<int64_t> disk_memory_bytes;
  /// Units read ahead of their use.
  int64_t prefetch = 1;
  LoadCheckpointOptions loading;  ///< its device_map is not used
};

/// Holds what reads a model's weights while it computes. Keep it as long as the model is used; without it the weights on disk can't be reached any more, and touching one is an error.
class ACCELERATE_API DispatchedModel {
 public:
  const DeviceMap& device_map() const;
  /// Bytes of weights that are read into a part of the memory when they are used; 0 when all are in memory or mapped.
  int64_t streamed_bytes() const;

 private:
  struct Impl;
  explicit DispatchedModel(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
  friend ACCELERATE_API DispatchedModel load_checkpoint_and_dispatch(const ModelRef& model, const std::filesystem::path& checkpoint, const DispatchOptions& options);
};

/// Loads a checkpoint into a model that may have no memory yet, and lets the parts on "disk" stay in their files: mapped where they fit into memory, else read into recycled buffers in the order in which
/// the model uses them, one unit ahead. Results are those of the model in memory, bit for bit. The model computes where its first GPU is, or on the host; "cpu" parts beside a GPU are not supported yet.
/// @throws as load_checkpoint_in_model() and make_device_map(); ConfigError for a map with more than one place that computes.
ACCELERATE_API DispatchedModel load_checkpoint_and_dispatch(const ModelRef& model, const std::filesystem::path& checkpoint, const DispatchOptions& options = {});

/// Moves the weights of a model in memory to `folder` (as save_model() would, unless there is a checkpoint already), and dispatches it with everything on disk.
ACCELERATE_API DispatchedModel disk_offload(const ModelRef& model, const std::filesystem::path& folder, DispatchOptions options = {});

/// Any torch::nn::ModuleHolder.
template <class Holder>
  requires requires(const Holder& holder) { typename Holder::ContainedType; }
DispatchedModel load_checkpoint_and_dispatch(const Holder& holder, const std::filesystem::path& checkpoint, const DispatchOptions& options = {}) {
  return load_checkpoint_and_dispatch(ModelRef(holder.ptr()), checkpoint, options);
}
template <class Holder>
  requires requires(const Holder& holder) { typename Holder::ContainedType; }
DispatchedModel disk_offload(const Holder& holder, const std::filesystem::path& folder, const DispatchOptions& options = {}) {
  return disk_offload(ModelRef(holder.ptr()), folder, options);
}

}  // namespace accelerate
