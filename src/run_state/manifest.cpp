#include "run_state/manifest.hpp"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/utils/version.hpp"
#include "comm/agreement.hpp"
#include "input/read_file.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/state_files.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {

namespace fs = std::filesystem;
namespace {

/// A file as one rank wrote it.
struct WrittenFile {
  std::string name;
  int64_t bytes = 0;
  std::vector<uint32_t> parts;
  ACCELERATE_FIELDS(name, bytes, parts)
};

/// Of any file: a hook's may be what no reader of checkpoints takes.
std::string part_of_file(const fs::path& path, int64_t begin, int64_t bytes) {
  const auto opened = open_regular(path);
  std::string read(static_cast<size_t>(bytes), '\0');
  int64_t got = 0;
  for (ssize_t now = 1; opened.file >= 0 && now > 0 && got < bytes; got += now)
    now = std::max<ssize_t>(::pread(opened.file, read.data() + got, static_cast<size_t>(bytes - got), begin + got), 0);
  if (opened.file >= 0) ::close(opened.file);
  if (got < bytes)
    raise<CheckpointError>("checkpoint: can't read bytes {} to {} of '{}', which a hook has written: {}", begin,
                           begin + bytes - 1, path.string(),
                           opened.file < 0 ? opened.problem : fmt::format("{} are there", got));
  return read;
}

/// Of a file that this process has not written.
FileChecksums read_checksums(const fs::path& path, int64_t bytes) {
  ChecksumsInTurn sums;
  for (int64_t at = 0; at < bytes; at += kChecksumPartBytes)
    sums.add(part_of_file(path, at, std::min(kChecksumPartBytes, bytes - at)));
  return sums.take();
}

const char* layout_of(StateForm form) {
  switch (form) {
    case StateForm::safetensors:
      return "safetensors";
    case StateForm::archive:
      return "archive";
    case StateForm::full:
      return "full";
    case StateForm::sharded:
      return "sharded";
    case StateForm::local:
      return "local";
    case StateForm::deepspeed:
      return "deepspeed";
  }
  return "";
}

/// Whether load_state() reads such a file through the readers that check what they read. The two that come with
/// DeepSpeed's are for others.
bool is_checked_when_read(const std::string& name) {
  const auto first = name.substr(0, name.find('/'));
  return is_state_name(first) && first != "latest" && first != "zero_to_fp32.py";
}

std::vector<std::string> not_whole(const fs::path& folder, const formats::CheckpointManifest& manifest) {
  std::vector<std::string> found;
  for (const auto& [name, sums] : manifest.files) {
    std::error_code missing;
    const auto bytes = fs::file_size(folder / name, missing);
    if (missing) found.push_back(name);
    else if (static_cast<int64_t>(bytes) != sums.bytes)
      found.push_back(fmt::format("{} of {} bytes, as it was written (it has {})", name, sums.bytes, bytes));
  }
  return found;
}

}  // namespace

CheckpointFiles::CheckpointFiles(const fs::path& folder) : folder_(folder), recorded_(folder) {}

void CheckpointFiles::gather() {
  for (const auto& written : comm::all_gather_bytes(written_here())) add(written);
}

std::string CheckpointFiles::written_here() {
  std::map<std::string, FileChecksums> mine;
  for (const auto& [name, sums] : recorded_->files()) mine.insert_or_assign(name, sums);
  recorded_.reset();
  std::vector<WrittenFile> written;
  for (auto& [name, sums] : mine) written.push_back({name, sums.bytes, std::move(sums.parts)});
  return to_bytes(written);
}

void CheckpointFiles::add(const std::string& written_there) {
  for (auto& file : from_bytes<std::vector<WrittenFile>>(written_there)) {
    FileChecksums sums{.bytes = file.bytes, .parts = std::move(file.parts)};
    const auto [known, fresh] = written_.try_emplace(file.name, sums);
    if (!fresh && known->second != sums) known->second.reset();
  }
}

void CheckpointFiles::write_manifest(formats::CheckpointManifest facts) const {
  if (fs::exists(folder_ / formats::kManifestFile))
    raise<ConfigError>(
        "save_state: a hook has written a file '{0}' into the checkpoint, expected another name: {0} is the list of "
        "the checkpoint's files",
        formats::kManifestFile);
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    if (!entry.is_regular_file() || entry.is_symlink()) continue;
    auto name = entry.path().lexically_relative(folder_).generic_string();
    const auto known = written_.find(name);
    const auto bytes = static_cast<int64_t>(entry.file_size());
    const bool as_written = known != written_.end() && known->second && known->second->bytes == bytes;
    facts.files.emplace(std::move(name), as_written ? *known->second : read_checksums(entry.path(), bytes));
  }
  AtomicFile file("save_state", folder_ / formats::kManifestFile);
  file.write(format_manifest(facts));
  file.finish();
}

void keep_file_of_another(const fs::path& folder) {
  const auto file = folder / formats::kManifestFile;
  try {
    if (!fs::exists(file) || formats::read_manifest(folder)) return;
  } catch (const CheckpointError&) {  // ours, and damaged
    return;
  }
  raise<ConfigError>(
      "save_state: found a file '{}' of another kind, expected the list of an older checkpoint's files, or none: the "
      "new one has this name. Move it, or save into another folder",
      file.string());
}

formats::CheckpointManifest manifest_facts(const RunState& run, StateForm form, int64_t iteration) {
  return {.world_size = comm::world_size(),
          .layout = layout_of(form),
          .step = steps_taken(run),
          .iteration = iteration,
          .accelerate = ACCELERATE_VERSION,
          .libtorch = TORCH_VERSION};
}

std::vector<std::string> lacks_by_manifest(const fs::path& folder) {
  try {
    const auto manifest = formats::read_manifest(folder);
    return manifest ? not_whole(folder, *manifest) : std::vector<std::string>();
  } catch (const CheckpointError& error) {
    return {fmt::format("{} that can be read ({})", formats::kManifestFile, error.what())};
  }
}

CheckedCheckpoint::CheckedCheckpoint(const fs::path& folder, const Options& options) {
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    manifest_ = formats::read_manifest(folder);
    if (options.checksums) records_.emplace();
    if (!manifest_) return;
    if (options.first_here)
      if (const auto lacking = not_whole(folder, *manifest_); !lacking.empty())
        raise<CheckpointError>(
            "load_state: the checkpoint '{}' is not complete: it has no {}. Copy all of it again, or load an older "
            "one. If you have changed it yourself, or another program has saved over it, remove its {}: then nothing "
            "is checked",
            folder.string(), fmt::join(lacking, ", no "), formats::kManifestFile);
    if (!options.checksums) return;
    expected_.emplace(folder, manifest_->files, manifest_->part_bytes);
    if (!options.first_here) return;
    for (const auto& file : manifest_->files)
      if (const auto path = folder / file.first; !is_checked_when_read(file.first))
        formats::ExpectedFiles::find(path)->check(0, file.second.bytes, [&](int64_t begin, int64_t bytes) {
          return crc32c::of(part_of_file(path, begin, bytes));
        });
  });
}

int64_t steps_taken(const RunState& run) {
  int64_t most = 0;
  for (const auto& optimizer : run.optimizers) most = std::max(most, optimizer.step_counts().taken);
  return run.steps_before + most;
}

}  // namespace accelerate::run_state
