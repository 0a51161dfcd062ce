#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "accelerate/parallel/fsdp_plugin.hpp"

/// Names of what save_state writes.
namespace accelerate::run_state {

/// model.safetensors, model_1.safetensors, …
std::string numbered(const std::string& stem, size_t index, const std::string& extension);

/// A model or an optimizer can lie in a checkpoint in one of these forms.
enum class StateForm {
  safetensors,
  archive,
  full,
  sharded,
  local,
  deepspeed,  ///< a folder with the model and its optimizers, see zero_files
};

/// Which ranks write files that each would write alike.
struct Writers {
  bool here = true;      ///< this one
  bool several = false;  ///< one on each machine, not only the first of all
  /// The ranks that share such files out, where one copy of them is written: those that see the first rank's disk.
  std::vector<int64_t> sharers = {};

  /// Whether `rank` writes the number-th of those that are shared out; number 0 is the writer's.
  bool writes(size_t number, int64_t rank) const {
    return several || sharers.empty() ? here : sharers[number % sharers.size()] == rank;
  }
};

struct StateFile {
  StateForm form;
  std::filesystem::path path;  ///< a folder if sharded or deepspeed
};
/// Where DeepSpeed's files of the index-th model are: as they were saved, or what has been made of them, a universal
/// checkpoint. @param universal  the latter is wanted; else it is taken where the former is gone
std::filesystem::path deepspeed_folder(const std::filesystem::path& folder, size_t index, bool universal = false);
/// All forms in which the index-th model may lie in the folder; of local ones this rank's.
std::vector<StateFile> model_files(const std::filesystem::path& folder, size_t index, bool universal = false);
/// Whole ones have one name, whether keyed by name (FSDP) or by number.
std::vector<StateFile> optimizer_files(const std::filesystem::path& folder, size_t index);
/// The one that is there; of several the one in the form that is written now. @throws CheckpointError listing the
/// names.
StateFile find_state(const std::vector<StateFile>& files, StateForm preferred, const std::string& what);
/// The one of this form; an optimizer's other than sharded and local is the archive.
StateFile in_form(const std::vector<StateFile>& files, StateForm form);
StateForm form_of(StateDictType type);

}  // namespace accelerate::run_state
