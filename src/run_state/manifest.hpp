#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "formats/checkpoint_manifest.hpp"
#include "formats/expected_files.hpp"
#include "run_state/run_state.hpp"
#include "utils/atomic_file.hpp"

/// The list of its files that a checkpoint carries: how it comes to be, and what is looked at by it.
namespace accelerate::run_state {

/// The files of a checkpoint that is being written. Each rank computes the checksums of what it writes while it does;
/// only what somebody else wrote there, a hook, is read for them.
class CheckpointFiles {
 public:
  /// @param folder  where it is written. Begin after hooks have written: they may change what they wrote.
  explicit CheckpointFiles(const std::filesystem::path& folder);

  /// Ends the recording, and tells all ranks what each wrote. Collective.
  void gather();
  /// The two halves of that, for ranks that tell each other in another way: ends the recording, and says what this one
  /// wrote; takes what one has said.
  std::string written_here();
  void add(const std::string& written_there);
  /// Lists what lies in the folder on this rank's disk: `facts` has all but the files. Not collective.
  /// @throws ConfigError if a hook has written a file of the manifest's name; CheckpointError, ResourceError
  void write_manifest(formats::CheckpointManifest facts) const;

 private:
  std::filesystem::path folder_;
  std::optional<RecordedFiles> recorded_;
  std::map<std::string, std::optional<FileChecksums>> written_;  ///< nothing where ranks wrote a name differently
};

/// Refuses a folder that has another's file of the manifest's name, which it would take the place of. Not collective.
/// @throws ConfigError
void keep_file_of_another(const std::filesystem::path& folder);

/// What the manifest of this run's next checkpoint says beside its files.
formats::CheckpointManifest manifest_facts(const RunState& run, StateForm form, int64_t iteration);

/// Files that the folder's manifest lists and that are not there whole, in words; nothing without a manifest. Not
/// collective.
std::vector<std::string> lacks_by_manifest(const std::filesystem::path& folder);

/// A checkpoint that is about to be read: its files have the sizes that its manifest says. While this lives, readers
/// check what they read. Without a manifest nothing is known but what archives of torch.save say of their own records.
class CheckedCheckpoint {
 public:
  struct Options {
    bool checksums = true;    ///< false: sizes only
    bool first_here = false;  ///< this rank looks at the sizes, and at hooks' files, which nobody else checks
  };
  /// Collective. @throws CheckpointError on all ranks, naming all files that are missing or of another size
  CheckedCheckpoint(const std::filesystem::path& folder, const Options& options);

  /// Null: it has none.
  const formats::CheckpointManifest* manifest() const { return manifest_ ? &*manifest_ : nullptr; }
  /// That this rank has read and found to be what was written.
  int64_t parts_checked() const { return expected_ ? expected_->parts_checked() : 0; }
  /// The same, of records.
  int64_t records_checked() const { return records_ ? records_->checked() : 0; }

 private:
  std::optional<formats::CheckpointManifest> manifest_;
  std::optional<formats::ExpectedFiles> expected_;
  std::optional<formats::CheckedRecords> records_;
};

/// The most steps that an optimizer of this run has taken, those before the checkpoint included that it goes on from.
int64_t steps_taken(const RunState& run);

}  // namespace accelerate::run_state
