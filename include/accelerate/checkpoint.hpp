#pragma once

/// Checkpoint files. Their names and contents are the reference's (features table, section 6), so that Python reads
/// them: safetensors for weights, ordinary torch archives for the rest. We never execute a pickle: reading one with
/// unknown globals is an error. Every file appears complete or not at all.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "accelerate/checkpoint/custom_object.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::checkpointing {

/// The file's bytes are what Python's torch.save(object) writes; torch.load(weights_only=True) reads it. @throws
/// CheckpointError, ResourceError.
ACCELERATE_API void save_object(const c10::IValue& object, const std::filesystem::path& file);
/// @throws CheckpointError when the file is missing, damaged, or holds more than plain data.
ACCELERATE_API c10::IValue load_object(const std::filesystem::path& file);

/// A dict of named tensors, for save_object.
ACCELERATE_API c10::IValue to_dict(const std::map<std::string, at::Tensor>& tensors);

/// Parameters and buffers by name, on the CPU; tied weights once.
ACCELERATE_API std::map<std::string, at::Tensor> state_dict(const ModelRef& model);
/// Copies `tensors` into the model. Names that share memory with a present one may be missing.
/// @throws CheckpointError listing every missing, unexpected and misshapen tensor; the model is unchanged then.
ACCELERATE_API void load_state_dict(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors);
/// The same errors, without copying.
ACCELERATE_API void check_state_dict(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors);

/// "10GB", "500MB", "1KB": decimal units; "GiB", "MiB", "KiB": binary. @throws ConfigError
ACCELERATE_API int64_t parse_size(const std::string& text);
/// model.safetensors (pytorch_model.bin without `safe_serialization`), or shards as huggingface_hub makes them, none
/// above `max_shard_bytes` unless one tensor is, with their index. Files of an earlier save that this one does not
/// replace are removed. Not collective.
ACCELERATE_API void save_model(const ModelRef& model, const std::filesystem::path& folder, int64_t max_shard_bytes,
                               bool safe_serialization);

/// The generators of this process (default CPU generator and, where there is one, the device's), with the number of
/// steps done, as random_states_<rank>.pkl.
ACCELERATE_API c10::IValue random_states(int64_t step, const at::Device& device);
/// @return the number of steps. @throws CheckpointError
ACCELERATE_API int64_t load_random_states(const c10::IValue& states, const at::Device& device);

}  // namespace accelerate::checkpointing

namespace accelerate {

struct MergeFsdpWeightsOptions {
  /// model.safetensors; without it pytorch_model.bin, which can also hold the nested state of an optimizer.
  bool safe_serialization = true;
  bool remove_checkpoint_dir = false;         ///< when all is written
  std::optional<std::string> max_shard_size;  ///< "5GB": several files of at most this size with an index. Unset: one
                                              ///< file, as the reference writes.
};

/// Joins the shards of a distributed checkpoint (SHARDED_STATE_DICT; written here or by Python's
/// torch.distributed.checkpoint, by any number of ranks) into weights in the Hugging Face layout.
///
/// Of a state with one top-level key, such as {"model": ...}, that key is left off; of one with several, `model` is
/// taken. Tensors are read and written one by one, so that memory holds about the largest of them, and a progress bar
/// is drawn. In a group every rank calls it: the main process works, the others wait. Alone it needs no group.
/// @param checkpoint_dir  The folder with the file .metadata, or one that holds exactly one folder
/// pytorch_model_fsdp_<i> with it.
/// @param output_path     The folder for the weights; created if it is missing. Weights of an earlier save in it are
/// replaced.
/// @throws CheckpointError if there is no distributed checkpoint or it is damaged; ConfigError if the options
/// contradict the contents. The checkpoint is never removed then. Source: merge_fsdp_weights of the reference, which
/// has no shards.
ACCELERATE_API void merge_fsdp_weights(const std::filesystem::path& checkpoint_dir,
                                       const std::filesystem::path& output_path,
                                       const MergeFsdpWeightsOptions& options = {});

}  // namespace accelerate
