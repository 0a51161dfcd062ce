#pragma once

/// DeepSpeed's universal checkpoints: each trained parameter whole, in a folder of its name with its states, so that a
/// run of any layout finds its part. Names and files are those of DeepSpeed's ds_to_universal (0.19.8). load_state()
/// and load_checkpoint() read them, the functions of zero_to_fp32.hpp, too. Not collective: one process makes one.

#include <filesystem>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

struct UniversalOptions {
  /// Where `checkpoint_dir` has several: its tag. Empty: that of `latest`.
  std::string tag;
  /// The checkpoint's patterns (`universal_checkpoint_info`, which Megatron-DeepSpeed writes) must each match a
  /// parameter.
  bool strict = true;
};

/// Makes a universal checkpoint of what DeepSpeed's save_checkpoint, or save_state() under a DeepSpeed configuration,
/// wrote at stages 1 to 3, on any number of ranks. Tensors are read and written one by one, so that memory holds about
/// the largest of them. Draws a progress bar. `accelerate ds-to-universal` calls it.
/// @param checkpoint_dir  the folder of a tag, or one of tags with the file `latest`
/// @param output_dir  becomes the folder of a tag: whole, or not at all. It must be new or empty. Beside it the file
/// `latest_universal` names it afterwards.
/// @throws CheckpointError naming files that are missing, damaged or of different saves; for stage 0, whose files do
/// not say which parameter a state belongs to; for tensor, pipeline or expert parallelism; for an `output_dir` that
/// has something in it
ACCELERATE_API void convert_zero_checkpoint_to_universal(const std::filesystem::path& checkpoint_dir,
                                                         const std::filesystem::path& output_dir,
                                                         const UniversalOptions& options = {});

}  // namespace accelerate
