#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "run_state/run_state.hpp"

/// What a resumed run needs, a part for each kind of state: by this one list checkpoints are written, looked through,
/// loaded and replaced. What a model's engine or another helper (LocalSGD) remembers needs no part of its own: see
/// OwnState.
namespace accelerate::run_state {

/// Who writes.
enum class WriteScope {
  together,   ///< all ranks, in step; what goes wrong is thrown on all of them
  once,       ///< it is the same on all ranks, so those that write for all
  each_rank,  ///< every rank, files of its own
};

/// What gives back what was there before, in the order in which it was replaced.
using Undo = std::vector<std::function<void()>>;

/// What was read of one part, and found to fit. Members may be missing.
struct StagedPart {
  /// Before anything changes: whether all ranks have read the same. Collective; throws on all ranks.
  std::function<void()> agree = nullptr;
  /// What may refuse what it is given, on any rank: then all give back what they have taken. Not collective.
  std::vector<std::function<void(Undo&)>> take = {};
  /// What can't refuse, after all that can. Collective.
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
  /// Reads and compares; nothing changes yet. Not collective. @throws CheckpointError
  StagedPart (*stage)(RunState& run, const std::filesystem::path& folder, const RunLoadOptions& options);
};

/// In the order in which they are written, read and taken up.
std::span<const StatePart> state_parts();

}  // namespace accelerate::run_state
