#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "run_state/run_state.hpp"

/// The list of what a resumed run needs, a part for each kind of state: checkpoints are written, looked through, loaded
/// and replaced by this one list. The memory of a model's engine, or of another helper (LocalSGD), needs no part of its
/// own: see OwnState.
namespace accelerate::run_state {

/// The ranks that write.
enum class WriteScope {
  together,   ///< all ranks, in step; what goes wrong is thrown on all of them
  once,       ///< it is the same on all ranks, so those that write for all
  each_rank,  ///< every rank, files of its own
};

/// Functions that give back the values from before, in the order in which they were replaced.
using Undo = std::vector<std::function<void()>>;

/// One part as it was read, and found to fit. Members may be missing.
struct StagedPart {
  /// Before anything changes: whether all ranks have read the same. Collective; throws on all ranks.
  std::function<void()> agree = nullptr;
  /// Steps that may refuse their values, on any rank: then all give back what they have taken. Not collective.
  std::vector<std::function<void(Undo&)>> take = {};
  /// Reads into tensors that are there, when nothing can refuse any more: what fails leaves them undefined. Collective;
  /// throws on all ranks.
  std::function<void()> fill = nullptr;
  /// A step that can't refuse, after all that can. Collective.
  std::function<void()> finish = nullptr;
};

struct StatePart {
  /// A regular expression for the names of its files and folders: those of an older checkpoint go when a new one takes
  /// its place.
  std::string_view names;
  WriteScope scope;
  void (*save)(const RunState& run, const std::filesystem::path& folder, const SaveOptions& options);
  /// Names of files that stage() could not do without and that are not there; null: it needs none. Not collective.
  std::vector<std::string> (*lacks)(const RunState& run, const std::filesystem::path& folder,
                                    const RunLoadOptions& options);
  /// Reads (of models and optimizers what says where all of it is) and compares; nothing changes yet. Not collective.
  /// @throws CheckpointError
  StagedPart (*stage)(RunState& run, const std::filesystem::path& folder, const RunLoadOptions& options);
};

/// In the order in which they are written, read and taken up.
std::span<const StatePart> state_parts();

}  // namespace accelerate::run_state
