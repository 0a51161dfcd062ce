#pragma once

/// Saved weights into models, each where a device map wants it.

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// How the tensors of a checkpoint differ from those of a model; all differences, not the first.
struct ACCELERATE_API StateDictCheck {
  std::vector<std::string> missing;     ///< In the model only. A tied weight needs one of its names.
  std::vector<std::string> unexpected;  ///< in the checkpoint only
  std::vector<std::string> mismatched;  ///< of another shape, or a whole number on one side only: "h.0.weight: [3, 4]
                                        ///< float32 in the checkpoint, [4, 4] float32 in the model"
  std::vector<std::string> converted;   ///< of another dtype, which loading converts; the same form

  /// Nothing but conversions.
  bool fits() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  /// Everything, under a heading for each kind; empty when there is nothing.
  std::string text() const;
};

/// Compares names, shapes and dtypes; reads no weight. Where the model's root has the name of a class of transformers
/// that the zoo knows ("GPT2LMHeadModel"), all names that files have for its weights count: without the body's, a head
/// under its other name; and what every program works out by itself is passed over.
/// @param checkpoint  A file of tensors (.safetensors, or one that Python's torch.save wrote), an index (*.index.json
/// or index.json, with its weight_map or the map alone), or a folder with model.safetensors, pytorch_model.bin, or one
/// index.
/// @throws CheckpointError when there is none of these, a file is damaged, an index names a file that is not there or a
/// tensor that its file lacks.
ACCELERATE_API StateDictCheck check_state_dict(const ModelRef& model, const std::filesystem::path& checkpoint);

struct LoadCheckpointOptions {
  /// Default: all tensors go where the model has them, those without memory to the host.
  std::optional<DeviceMap> device_map;
  /// Floating-point tensors get this dtype; default: the model's.
  std::optional<at::ScalarType> dtype;
  /// With dtype float16: tensors below modules of these names stay in float32.
  std::vector<std::string> keep_in_fp32_modules;
  /// For weights on disk that can't be used where they lie, because they are converted or come from a file of
  /// torch.save: an offload folder.
  std::filesystem::path offload_folder;
  /// Buffers placed on disk stay there. Otherwise they are in host memory.
  bool offload_buffers = false;
  /// False: load what fits by name, and leave the rest of the model and of the checkpoint alone. Shapes must be right
  /// in any case.
  bool strict = true;
};

/// Loads the tensors of a checkpoint into a model, which may have been built under init_empty_weights(). Everything is
/// checked first; nothing is loaded when something is wrong. Tensors keep their identity: tied weights stay tied, and
/// optimizers stay valid.
///
/// Weights on "disk" are mapped: they lie in the safetensors file (or the offload folder), the system reads pages when
/// they are touched and drops them when memory is short, and writing to them changes private pages. So are those on
/// "cpu" of a model without memory, where the file has their dtype; into memory that is there they are copied. While a
/// weight is mapped, the file may be replaced and removed, but not changed in place. Not collective.
/// @param checkpoint  as check_state_dict()
/// @throws CheckpointError with all differences, as check_state_dict(), and when offload_folder is needed and not
/// given; ConfigError for a device map with keys that name nothing or
///   parameters without a place.
ACCELERATE_API void load_checkpoint_in_model(const ModelRef& model, const std::filesystem::path& checkpoint,
                                             const LoadCheckpointOptions& options = {});

}  // namespace accelerate
