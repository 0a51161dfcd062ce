#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/model/submodule.hpp"
#include "checkpoint/saved_state.hpp"
#include "formats/weight_names.hpp"

/// Loading in two steps: everything is checked, then what should be in memory is loaded.
namespace accelerate::bigmodel {

/// A tensor in few bits as it lies in a checkpoint.
struct StoredCodes {
  /// Mapped where the format allows it. @param dtype  that the tensor is said to have had, where the file does not know
  /// it
  std::function<codes::Codes(at::ScalarType dtype)> read;
  bool transposed = false;  ///< they are codes of its transpose
};

/// The contents of a checkpoint, before it is read.
struct OpenCheckpoint {
  checkpointing::StoredTensors tensors;
  bool mapped = false;                       ///< Reading a tensor gives a view of its file.
  std::map<std::string, StoredCodes> codes;  ///< of tensors that are in few bits, by name
};

/// A folder, an index, or a file of safetensors, torch.save or GGUF; headers are read. @throws CheckpointError
OpenCheckpoint open_checkpoint(const std::filesystem::path& path);
/// Gives tensors that a file of such a model has under other names those of `own`, the model's, and leaves out what
/// every program works out by itself.
void use_names(OpenCheckpoint& checkpoint, const formats::WeightNames& names, const std::set<std::string>& own);

/// One tensor of a model under all of its names.
struct LoadTarget {
  std::vector<std::string> names;
  at::Tensor tensor;
  bool is_buffer = false;
  bool transposed = false;            ///< a layer's weight as [inputs, outputs], see is_transposed_linear()
  std::optional<Place> place;         ///< empty: where it is
  at::ScalarType dtype = at::kFloat;  ///< that it gets
  /// Under the name that the checkpoint has; null: not there.
  const checkpointing::StoredTensors::value_type* stored = nullptr;
};

std::vector<LoadTarget> targets_of(const ModelRef& model);
/// transformers' Conv1D, as GPT-2 has it, or a module of that name: a linear layer whose weight is [inputs, outputs].
/// Its codes are those of the transpose, in all files.
inline bool is_transposed_linear(const Submodule& module) { return module.class_name == "Conv1D"; }
/// The map with the model's own names, where it has those of another version of transformers (GPT-NeoX's lm_head).
DeviceMap by_own_names(const ModelRef& model, DeviceMap device_map);
/// Fills in the places. @param caller  begins the messages. @throws ConfigError for keys that name nothing and tensors
/// without a place.
void place(const char* caller, const ModelRef& model, std::vector<LoadTarget>& targets, const DeviceMap& device_map);
/// "cpu" and "disk" are host memory.
at::Device device_of(const Place& place);

struct LoadPlan {
  std::filesystem::path path;
  LoadCheckpointOptions options;
  OpenCheckpoint checkpoint;  ///< `stored` points into it
  std::vector<LoadTarget> targets;

  bool on_disk(const LoadTarget& target) const;
};

/// Reads headers and checks everything. @throws as load_checkpoint_in_model()
LoadPlan plan_loading(const char* caller, const ModelRef& model, const std::filesystem::path& path,
                      const LoadCheckpointOptions& options);
/// Loads all but what `leave_alone` says.
void load(const LoadPlan& plan, const std::function<bool(const LoadTarget&)>& leave_alone);

}  // namespace accelerate::bigmodel
