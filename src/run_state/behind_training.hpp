#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "formats/checkpoint_manifest.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/manifest.hpp"
#include "run_state/run_state.hpp"

namespace accelerate::run_state {

/// A checkpoint that is written while training goes on, by a thread of each rank. Ranks tell each other through notes
/// (comm/notes.hpp), since collectives are the training thread's; rank 0 gives the folder its name.
class BehindTraining {
 public:
  struct Parts {
    std::unique_ptr<UnfinishedCheckpoint> folder;
    std::unique_ptr<CheckpointFiles> files;
    formats::CheckpointManifest facts;
  };
  /// Sets the mark: what the run's state is now is what is saved. Returns when that is agreed on by all ranks, in one
  /// collective behind those in which a save compares what ranks have. Collective.
  /// @throws ConfigError for what can't be read later; CheckpointError, ResourceError; on all ranks
  BehindTraining(const RunState& run, const SaveOptions& options, Parts parts);
  /// Waits for the files, half a minute at most, and says in a warning if they are not complete then; at once where an
  /// exception ends the program.
  ~BehindTraining();
  BehindTraining(const BehindTraining&) = delete;
  BehindTraining& operator=(const BehindTraining&) = delete;

  /// Returns when the checkpoint has its name, on all ranks. Collective. @throws CheckpointError on all ranks: it could
  /// not be written, there is none; CommError
  void wait();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  int exceptions_;
};

}  // namespace accelerate::run_state
