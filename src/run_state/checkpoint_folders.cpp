#include "run_state/checkpoint_folders.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <regex>
#include <sstream>
#include <utility>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "formats/dcp/metadata.hpp"
#include "input/read_file.hpp"
#include "run_state/counts.hpp"
#include "run_state/state_parts.hpp"
#include "utils/atomic_file.hpp"
#include "utils/log.hpp"

namespace accelerate::run_state {

namespace fs = std::filesystem;
namespace {

const std::string kPrefix = "checkpoint_";

/// Oldest first.
std::vector<int64_t> numbers_in(const fs::path& all) {
  std::vector<int64_t> found;
  if (!fs::is_directory(all)) return found;
  for (const auto& entry : read_folder<CheckpointError>("checkpoints", all))
    if (const auto number = checkpoint_number(entry.path()); number && entry.is_directory()) found.push_back(*number);
  std::sort(found.begin(), found.end());
  return found;
}

/// A name that no checkpoint has, beside `folder`.
fs::path beside(const fs::path& folder, const char* what) {
  return folder.parent_path() / ("." + folder.filename().string() + "." + what);
}

}  // namespace

fs::path checkpoint_folder(const fs::path& all, int64_t number) { return all / (kPrefix + std::to_string(number)); }

std::optional<int64_t> checkpoint_number(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t number = 0;
  const char* last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), last, number);
  return error == std::errc() && end == last ? std::optional(number) : std::nullopt;
}

int64_t last_checkpoint(const fs::path& all) {
  const auto numbers = numbers_in(all);
  return numbers.empty() ? -1 : numbers.back();
}

fs::path newest_checkpoint(const fs::path& all, const Lacks& lacks) {
  // The main process's list, since every look of one rank at a folder is one of all.
  std::vector<std::vector<int64_t>> numbers{numbers_in(all)};
  broadcast_object_list(numbers);
  std::string passed_over;
  for (auto number = numbers[0].rbegin(); number != numbers[0].rend(); ++number) {
    const fs::path folder = checkpoint_folder(all, *number);
    const auto lacking = gather_object(lacks(folder));
    if (lacking.empty()) {
      if (!passed_over.empty() && comm::rank() == 0)
        logs::warn("accelerate.run_state",
                   "load_state: takes '{}', the newest checkpoint that is complete, and passes over{}", folder.string(),
                   passed_over);
      return folder;
    }
    passed_over += fmt::format("\n  '{}', which has no {}", folder.string(), lacking.front());
  }
  raise<CheckpointError>(
      "load_state: found no checkpoint_<n> in '{}' that is complete, expected at least one; was save_state() called "
      "with this project_dir?{}",
      all.string(), passed_over.empty() ? "" : " Passed over:" + passed_over);
}

void prune_checkpoints(const fs::path& all, int64_t limit, const fs::path& newest, const Lacks& lacks) {
  std::vector<fs::path> complete;
  for (const int64_t number : numbers_in(all))
    if (const auto folder = checkpoint_folder(all, number); folder != newest && lacks(folder).empty())
      complete.push_back(folder);
  for (size_t i = 0; i + static_cast<size_t>(limit) <= complete.size(); ++i) {
    const auto removed = beside(complete[i], "removed");
    fs::remove_all(removed);
    fs::rename(complete[i], removed);  // so that nobody meets half of it
    fs::remove_all(removed);
    counts::add(CheckpointCount::checkpoints_pruned);
  }
}

namespace {

constexpr const char* kUnfinished = ".unfinished";  ///< within a folder that has something in it
constexpr const char* kFinished = ".finished";      ///< complete, and about to take the place of what is there
constexpr const char* kStale = ".stale";            ///< in it: names of an older checkpoint's files, which go first

/// Whether a checkpoint of this kind gives files or folders this name.
bool is_ours(const std::string& name, CheckpointKind kind) {
  static const std::regex of_distributed("__\\d+_\\d+\\.distcp|\\.metadata|\\.accelerate_layout"),
      of_tag("(bf16_)?(zero_pp_rank_\\d+_)?mp_rank_\\d+_(model|optim)_states\\.pt"), of_run([] {
        std::string names;
        for (const auto& part : state_parts()) names.append(part.names).append("|");
        return names + R"(checkpoint\.json)";
      }());
  return std::regex_match(name, kind == CheckpointKind::run   ? of_run
                                : kind == CheckpointKind::tag ? of_tag
                                                              : of_distributed);
}

void sync(const fs::path& path) { flush_to_disk("saving a checkpoint", path); }

[[noreturn]] void fail(const fs::path& folder, const std::string& what, const std::error_code& error) {
  raise<CheckpointError>("saving a checkpoint: the folder '{}' {}: {}", folder.string(), what, error.message());
}

void make_folder(const fs::path& folder, const fs::path& where) {
  std::error_code failure;
  fs::remove_all(where, failure);
  fs::create_directories(where, failure);
  if (!fs::is_directory(where)) fail(folder, "can't be created", failure);
}

/// Puts what is in `.finished` in its place. May be repeated at any point.
void replace_older(const fs::path& folder) {
  const fs::path finished = folder / kFinished;
  // Readers that know nothing of this find no distributed checkpoint, and no list of files, until all are in place.
  const std::array<fs::path, 3> last{formats::kDcpMetadataFile, formats::kDcpLayoutFile, formats::kManifestFile};
  const auto is_last = [&](const fs::path& name) { return std::ranges::find(last, name) != last.end(); };
  if (formats::is_dcp_folder(finished))  // with either, the other one goes as well
    for (const auto* name : {formats::kDcpMetadataFile, formats::kDcpLayoutFile}) fs::remove(folder / name);
  if (fs::exists(finished / formats::kManifestFile)) fs::remove(folder / formats::kManifestFile);
  std::string stale;
  if (fs::exists(finished / kStale))
    stale = read_text<CheckpointError>("list of older files", finished / kStale, kMostSettingsBytes);
  std::istringstream lines(stale);
  for (std::string name; std::getline(lines, name);)  // the list may be a stranger's
    if (is_ours(name, CheckpointKind::run) || is_ours(name, CheckpointKind::distributed) ||
        is_ours(name, CheckpointKind::tag))
      fs::remove_all(folder / name);
  std::vector<fs::path> names;  // first, since renaming changes what is being listed
  for (const auto& entry : fs::directory_iterator(finished))
    if (const auto name = entry.path().filename(); name != kStale && !is_last(name)) names.push_back(name);
  for (const auto& name : last)
    if (fs::exists(finished / name)) names.push_back(name);
  for (const auto& name : names) {
    if (fs::is_directory(folder / name)) fs::remove_all(folder / name);
    fs::rename(finished / name, folder / name);
  }
  sync(folder);
  fs::remove_all(finished);
}

void publish_in(const fs::path& where, const fs::path& folder, CheckpointKind kind,
                const std::function<void()>& write_last) {
  for (const auto& entry : fs::recursive_directory_iterator(where))
    if (entry.is_regular_file() || entry.is_directory()) sync(entry.path());
  sync(where);
  if (write_last) write_last();
  std::error_code error;
  if (where.parent_path() != folder) {
    fs::rename(where, folder, error);  // takes the place of an empty folder, too
    sync(folder.parent_path());
    if (!error) return;
    if (error != std::errc::directory_not_empty && error != std::errc::file_exists)
      fail(folder, "can't get what was written beside it", error);
  }
  std::ofstream stale(where / kStale);
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto name = entry.path().filename().string(); is_ours(name, kind) && !fs::exists(where / name))
      stale << name << '\n';
  stale.close();
  sync(where / kStale), sync(where);
  fs::rename(where, folder / kFinished, error);
  sync(folder);
  if (error) fail(folder, "can't get what was written", error);
  replace_older(folder);
}

}  // namespace

bool is_state_name(const std::string& name) { return is_ours(name, CheckpointKind::run); }

UnfinishedCheckpoint::UnfinishedCheckpoint(const fs::path& folder, bool first_here, CheckpointKind kind)
    : folder_(fs::absolute(folder).lexically_normal()), first_here_(first_here), kind_(kind) {
  if (!folder_.has_filename()) folder_ = folder_.parent_path();  // "checkpoint/"
  finish_checkpoint(folder_, first_here);
  constexpr const char* kMark = ".shared";
  std::vector<bool> within{false};
  const auto choose = [&] { where_ = within[0] ? folder_ / kUnfinished : beside(folder_, "unfinished"); };
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (fs::exists(folder_)) folder_ = fs::canonical(folder_);  // a link stays one
  });
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (comm::rank() != 0) return;
    // An empty folder gives way, if it can: a mount point can't.
    std::error_code stays;
    within[0] = fs::exists(folder_) && !(fs::is_directory(folder_) && fs::remove(folder_, stays));
    choose();
    make_folder(folder_, where_);
    std::ofstream(where_ / kMark).flush();
  });
  broadcast_object_list(within);
  choose();
  std::vector<int64_t> sees_mark{0};
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    // A rank that does not see the mark has a disk of its own.
    sees_mark[0] = fs::exists(where_ / kMark);
    is_first_on_its_disk_ = comm::rank() == 0 || (first_here_ && !sees_mark[0]);
    if (comm::rank() != 0 && is_first_on_its_disk_) make_folder(folder_, where_);
  });
  const auto first = gather_object(std::vector<int64_t>{is_first_on_its_disk_});
  const auto seeing = gather_object(sees_mark);
  for (size_t rank = 0; rank < first.size(); ++rank) {
    if (first[rank]) firsts_.push_back(static_cast<int64_t>(rank));
    if (seeing[rank]) beside_first_.push_back(static_cast<int64_t>(rank));
  }
  if (comm::rank() == 0) fs::remove(where_ / kMark);
}

UnfinishedCheckpoint::~UnfinishedCheckpoint() {
  std::error_code ignored;
  if (!published_ && first_here_) fs::remove_all(where_, ignored);
}

void UnfinishedCheckpoint::publish(const std::function<void()>& write_last) {
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (comm::rank() == 0) publish_in(where_, folder_, kind_, write_last);
  });
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (comm::rank() != 0 && first_here_ && fs::exists(where_)) publish_in(where_, folder_, kind_, write_last);
  });
  published_ = true;
}

void UnfinishedCheckpoint::publish_here(const std::function<void()>& write_last) {
  if (is_first_on_its_disk_) publish_in(where_, folder_, kind_, write_last);
}

void finish_checkpoint(const fs::path& folder, bool first_here) {
  const auto finish = [&] {
    if (fs::exists(folder / kFinished)) replace_older(folder);
  };
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (comm::rank() == 0) finish();
  });
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (comm::rank() != 0 && first_here) finish();
  });
}

}  // namespace accelerate::run_state
