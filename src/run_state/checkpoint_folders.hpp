#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

/// Folders of checkpoints: they appear whole or not at all, and some name themselves checkpoint_0, checkpoint_1, …
namespace accelerate::run_state {

std::filesystem::path checkpoint_folder(const std::filesystem::path& all, int64_t number);
/// Nothing for a folder of another name.
std::optional<int64_t> checkpoint_number(const std::filesystem::path& folder);
/// The highest number that is there, complete or not; -1 without any.
int64_t last_checkpoint(const std::filesystem::path& all);

/// Whether save_state() gives files or folders this name.
bool is_state_name(const std::string& name);

/// The files that a checkpoint lacks and this run needs; nothing: it is complete.
using Lacks = std::function<std::vector<std::string>(const std::filesystem::path& folder)>;

/// The one with the highest number that is complete on all ranks. Says on the main process which it passed over.
/// Collective. @throws CheckpointError, on all ranks, if there is none.
std::filesystem::path newest_checkpoint(const std::filesystem::path& all, const Lacks& lacks);
/// Removes the oldest complete ones above the limit, but never `newest`. Each goes as a whole. Not collective.
void prune_checkpoints(const std::filesystem::path& all, int64_t limit, const std::filesystem::path& newest,
                       const Lacks& lacks);

enum class CheckpointKind {
  run,          ///< what save_state() writes
  distributed,  ///< a distributed checkpoint, in the folder itself
  tag,          ///< one of DeepSpeed's, likewise
};

/// A checkpoint that is being written: into a folder beside the one whose name it gets, by a single rename, when all of
/// it is on the disk. Where that folder has something in it already, it is written within it, and what is complete is
/// marked so (again by a rename) before its files take the places of older ones: whoever comes after a crash finishes
/// that, see finish_checkpoint(). Files of the folder that belong to no checkpoint of this kind stay.
class UnfinishedCheckpoint {
 public:
  /// Makes the folder to write into, on each machine that has a disk of its own. What an interrupted save left there is
  /// removed. Collective. @param first_here  one rank of each machine, rank 0 among them
  /// @throws CheckpointError on all ranks.
  UnfinishedCheckpoint(const std::filesystem::path& folder, bool first_here, CheckpointKind kind = CheckpointKind::run);
  /// Removes what was written, unless it was published.
  ~UnfinishedCheckpoint();
  UnfinishedCheckpoint(const UnfinishedCheckpoint&) = delete;
  UnfinishedCheckpoint& operator=(const UnfinishedCheckpoint&) = delete;

  const std::filesystem::path& where() const { return where_; }
  /// Whether this rank has made the folder: rank 0, and one rank of each machine that does not see rank 0's disk.
  bool is_first_on_its_disk() const { return is_first_on_its_disk_; }
  /// The ranks that have made it, rank 0 among them: as many as there are disks.
  const std::vector<int64_t>& firsts() const { return firsts_; }
  /// The ranks that see rank 0's, itself the first.
  const std::vector<int64_t>& beside_first() const { return beside_first_; }
  /// Flushes what was written to the disk and gives it its name. Collective. @throws CheckpointError, ResourceError on
  /// all ranks. @param write_last  what is written when all else is on the disk, by the first rank on each; flushes
  /// itself
  void publish(const std::function<void()>& write_last = nullptr);
  /// The same of the disk on which this rank is first, for ranks that tell each other in another way. Not collective.
  void publish_here(const std::function<void()>& write_last);
  /// Others have done it: nothing is removed.
  void set_published() { published_ = true; }

 private:
  std::filesystem::path folder_, where_;
  bool first_here_, is_first_on_its_disk_ = false, published_ = false;
  std::vector<int64_t> firsts_, beside_first_;
  CheckpointKind kind_;
};

/// If a crash came when files of a complete checkpoint were about to replace older ones, replaces the rest. Collective.
/// @throws CheckpointError on all ranks.
void finish_checkpoint(const std::filesystem::path& folder, bool first_here);

}  // namespace accelerate::run_state
