#pragma once

/// Under FSDP save_state() writes models and optimizers, by the plugin's state_dict_type, into
/// - full: pytorch_model_fsdp.bin (_1, …) and optimizer.bin, whole, keyed by names; rank 0 writes, and holds one unit
/// - sharded: folders pytorch_model_fsdp_0, optimizer_0, …: distributed checkpoints, each rank writes its own shards
/// - local: pytorch_model_fsdp_rank<r>.bin and optimizer_0_rank<r>.bin, …: each rank's shards, for the same run only
///
/// Under a DeepSpeed configuration they go into DeepSpeed's own files, see accelerator/tagged_checkpoint.hpp.
namespace accelerate {

/// Of Accelerator::save_state().
struct SaveStateOptions {
  /// In plain training: models as safetensors; else as torch archives.
  bool safe_serialization = true;
  /// Returns when the state of now is marked, and writes it while training goes on, by a thread of each rank. Files are
  /// those of a save that waits, byte for byte. Nothing is copied but buffers, gradients of an unfinished accumulation
  /// group, random generators and registered objects: parameters and optimizers' states are read from where they lie,
  /// 4 MB at a time, and what a step rewrites before that is kept by the step. So memory grows by what was kept, and by
  /// one buffer of 4 MB. wait_for_checkpoint(), load_state(), the next save_state() and end_training() wait
  /// for it, and throw on all ranks what went wrong; total_limit acts then, too.
  ///
  /// Until then parameters and optimizers' states change by steps of prepared optimizers, and by what this library does
  /// with them: where the program writes to them itself (an average of weights that takes their place) the save fails,
  /// and names the tensor. A write through data(), which LibTorch counts nowhere, is not seen.
  ///
  /// save_state() throws ConfigError for a state that can't be read later: on a GPU, offloaded to a disk or fetched for
  /// each operator, under FSDP in the form of whole tensors (full), under DeepSpeed's configurations.
  bool behind_training = false;
};

}  // namespace accelerate
