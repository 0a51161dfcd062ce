#pragma once

/// Plain fp32 weights of what DeepSpeed's save_checkpoint, or save_state() under a DeepSpeed configuration, wrote: of
/// any stage and any number of ranks. Names and meaning are those of DeepSpeed's zero_to_fp32. Nothing in the files is
/// executed. Not collective: each process that calls one reads for itself.

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Parameters and buffers by name on the CPU, floating-point ones in fp32, tied ones under each of their names.
/// @param checkpoint_dir  with the file `latest` and the folders of tags, or the folder of a tag
/// @param tag  empty: that of `latest`
/// @throws CheckpointError naming files that are missing, damaged, or of different saves.
ACCELERATE_API std::map<std::string, at::Tensor> get_fp32_state_dict_from_zero_checkpoint(
    const std::filesystem::path& checkpoint_dir, const std::string& tag = {}, bool exclude_frozen_parameters = false);

/// The same into a model, which must have all of them. @throws CheckpointError also for names and sizes that differ;
/// the model is unchanged then.
ACCELERATE_API void load_state_dict_from_zero_checkpoint(const ModelRef& model,
                                                         const std::filesystem::path& checkpoint_dir,
                                                         const std::string& tag = {});

struct ZeroToFp32Options {
  std::string max_shard_size = "5GB";
  bool safe_serialization = false;  ///< model.safetensors; else pytorch_model.bin
  std::string tag;                  ///< empty: that of `latest`
  bool exclude_frozen_parameters = false;
};
/// The same into a folder, in files of the Hugging Face layout. Tensors are read and written one by one, so that memory
/// holds about the largest of them; draws a progress bar. `accelerate merge-weights` calls it.
ACCELERATE_API void convert_zero_checkpoint_to_fp32_state_dict(const std::filesystem::path& checkpoint_dir,
                                                               const std::filesystem::path& output_dir,
                                                               const ZeroToFp32Options& options = {});

/// Whether a folder, or the tag that its `latest` names, is such a checkpoint.
ACCELERATE_API bool is_zero_checkpoint(const std::filesystem::path& folder);

}  // namespace accelerate
