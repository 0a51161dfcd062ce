#pragma once

/// DeepSpeed's checkpoints of one prepared model: `m.save_checkpoint(dir, tag, client_state)` and
/// `m.load_checkpoint(dir)`. Files, names and meaning are DeepSpeed's (its engine's functions of these names), and
/// those that it wrote are read, by any number of ranks and any stage. Accelerator::save_state() writes the same for
/// all that was prepared.

#include <ATen/core/ivalue.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Values that a program keeps with a checkpoint: numbers, texts, lists, dicts, tensors by name. Names that DeepSpeed
/// has for its own ("module", "optimizer", "global_steps", …) are refused.
using ClientState = std::map<std::string, c10::IValue>;

struct SaveTagOptions {
  bool save_latest = true;                 ///< the file `latest` names this tag
  bool exclude_frozen_parameters = false;  ///< weights that are not trained are left out
};

struct LoadTagOptions {
  bool load_module_strict = true;        ///< weights must be those of the model; false: what both have is taken
  bool load_optimizer_states = true;     ///< false: states stay as they are, and masters begin as the weights
  bool load_lr_scheduler_states = true;  ///< of the schedule that is DeepSpeed's
  bool load_module_only = false;         ///< weights, nothing else: a warm start
};

struct LoadedTag {
  std::filesystem::path load_path;  ///< of the tag; empty: the folder has no file `latest`, and nothing was loaded
  ClientState client_state;
};

namespace detail {

struct PreparedModel;

/// @param tag  unset: global_step<optimizer steps>. All ranks give the same. @throws ConfigError where the model is not
/// trained by DeepSpeed's settings; CheckpointError, ResourceError on all ranks, and an older checkpoint of the tag is
/// whole then
ACCELERATE_API std::filesystem::path save_tag(const PreparedModel& model, const std::filesystem::path& save_dir,
                                              std::optional<std::string> tag, const ClientState& client_state,
                                              const SaveTagOptions& options);
/// @param tag  unset: that of the file `latest`. @throws CheckpointError on all ranks, and leaves all as it was.
ACCELERATE_API LoadedTag load_tag(const PreparedModel& model, const std::filesystem::path& load_dir,
                                  std::optional<std::string> tag, const LoadTagOptions& options);

}  // namespace detail
}  // namespace accelerate
