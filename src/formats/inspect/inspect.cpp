#include "formats/inspect/inspect.hpp"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "formats/checkpoint_manifest.hpp"
#include "formats/dcp/metadata.hpp"
#include "formats/index_file.hpp"
#include "formats/inspect/readers.hpp"
#include "input/read_file.hpp"

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;
using namespace inspecting;

/// Endings of files that hold tensors. Pickles may hold anything, and so may a .bin of another program.
bool may_hold_tensors(const fs::path& file) {
  static const std::set<std::string> kEndings{".safetensors", ".gguf", ".bin", ".pt", ".pt2", ".pth", ".ckpt", ".pkl"};
  return kEndings.contains(file.extension().string());
}
bool says_its_format(const fs::path& file) { return file.extension() != ".pkl" && file.extension() != ".bin"; }

/// Folders of one save among others: "checkpoint_3", "checkpoint-300", "global_step7".
bool is_name_of_a_save(const std::string& name) {
  for (const std::string_view begin : {"checkpoint_", "checkpoint-", "global_step"}) {
    if (!name.starts_with(begin)) continue;
    int64_t number = 0;
    const auto [end, error] = std::from_chars(name.data() + begin.size(), name.data() + name.size(), number);
    if (error == std::errc() && end == name.data() + name.size()) return true;
  }
  return false;
}

class Inspector {
 public:
  Inspector(const fs::path& root, bool verify) : root_(root), verify_(verify) {}

  Inspection run() {
    if (!is_there(root_))
      raise<CheckpointError>("'{}' does not exist, expected a file or a folder with tensors. Check the path.",
                             root_.string());
    if (!is_folder(root_)) file();
    else folder(root_, 0);
    if (result_.parts.empty() && result_.damage.empty()) refuse();
    for (const auto& part : result_.parts) {
      result_.files += part.files, result_.bytes += part.bytes;
      result_.checked_bytes += part.checked_bytes;
      const bool listed = is_listed(part.path);
      if (verify_ && !listed && part.checked_bytes == 0) result_.unchecked_bytes += part.bytes;
      if (manifest_ && !listed)
        result_.notes.push_back(fmt::format("'{}' is not in {}: it was not of the checkpoint when that was written.",
                                            part.path, kManifestFile));
    }
    if (result_.format.empty()) result_.format = result_.parts.size() == 1 ? result_.parts[0].format : "folder";
    return std::move(result_);
  }

 private:
  std::string name_of(const fs::path& path) const {
    const auto name = path == root_ ? fs::path() : path.lexically_relative(root_);
    return name.generic_string();
  }
  /// For what is in a part; messages of readers name their files.
  Complain complain_of(const std::string& part) {
    return [this, part](const std::string& what) {
      result_.damage.push_back(part.empty() ? what : fmt::format("{}: {}", part, what));
    };
  }
  /// Runs `read` on a new part, whose damage becomes the result's.
  template <class Read> void add(const fs::path& path, const Read& read) {
    InspectedPart part{.path = name_of(path), .format = {}};
    const auto complain = complain_of(part.path);
    try {
      if (!read(part, complain)) return;
    } catch (const CheckpointError& error) {
      complain(error.what());
    }
    result_.parts.push_back(std::move(part));
  }

  void add_file(const fs::path& path) {
    add(path, [&](InspectedPart& part, const Complain&) {
      part.format = path.extension().string();  // until it has been opened
      const auto format = format_of(path);
      part.bytes = InputFile(path).size();
      if (format.empty()) {
        if (!says_its_format(path) && part.bytes > 0) return false;
        raise<CheckpointError>("'{}' of {} bytes is of none of the formats that its name may mean. {}", path.string(),
                               part.bytes, part.bytes == 0 ? "It is empty: copy it again." : "It is probably damaged.");
      }
      read_file_part(path, format, verify_ && !has_checksums(path), part);
      return true;
    });
  }

  void add_index(const fs::path& path, std::set<std::string>& shards) {
    add(path, [&](InspectedPart& part, const Complain& complain) {
      if (!read_offload_folder(path, part, complain))
        read_index_part(path, verify_ && !has_checksums(path), part, shards, complain);
      return true;
    });
  }

  void file() {
    if (is_index_name(root_) || root_.extension() == ".json") {
      std::set<std::string> shards;
      return add_index(root_, shards);
    }
    if (root_.filename() == kDcpMetadataFile || root_.filename() == kDcpLayoutFile)
      raise<CheckpointError>("'{}' is the metadata of a distributed checkpoint, expected its folder. Give '{}'.",
                             root_.string(), root_.parent_path().string());
    if (format_of(root_).empty() && !may_hold_tensors(root_))
      raise<CheckpointError>(
          "'{}' is of no format that is known, expected safetensors, an archive of torch.save, TorchScript or "
          "torch.export, GGUF, an index of several files, or the folder of a checkpoint.",
          root_.string());
    add_file(root_);
  }

  void folder(const fs::path& path, int depth) {
    constexpr int kDeepest = 8;
    if (depth == 0) read_manifest_of(path);
    std::set<fs::path> files, folders;
    for (const auto& entry : read_folder<CheckpointError>("folder", path)) {
      const auto name = entry.path().filename().string();
      std::error_code ignored;
      if (entry.is_directory(ignored) ? name.starts_with(".") || entry.is_symlink(ignored) : false) continue;
      (entry.is_directory(ignored) ? folders : files).insert(entry.path());
    }
    if (is_dcp_folder(path)) {
      add(path, [&](InspectedPart& part, const Complain& complain) {
        read_distributed(path, verify_ && !has_checksums(path), part, complain);
        return true;
      });
    } else if (std::ranges::any_of(files, [](const fs::path& file) { return file.extension() == ".distcp"; })) {
      add(path, [&](InspectedPart& part, const Complain&) {
        part.format = "distributed checkpoint";
        read_dcp_metadata(path);  // which says why it is not there
        return true;
      });
    }
    std::set<std::string> shards;
    for (const auto& file : files)
      if (is_index_name(file)) add_index(file, shards);
    deepspeed(path, folders);
    for (const auto& file : files)
      if (may_hold_tensors(file) && !shards.contains(file.filename().string())) add_file(file);
    if (depth == kDeepest) return;
    if (depth == 0 && result_.parts.empty() && !names_a_tag_) refuse_several(folders);
    for (const auto& below : folders) folder(below, depth + 1);
  }

  /// A folder that holds saves, and nothing else.
  void refuse_several(const std::set<fs::path>& folders) const {
    std::vector<std::string> saves;
    for (const auto& folder : folders)
      if (is_name_of_a_save(folder.filename().string()) || is_there(folder / kManifestFile))
        saves.push_back(fmt::format("'{}'", folder.filename().string()));
    if (saves.size() > 1)
      raise<CheckpointError>("'{}' holds several checkpoints, {}, expected one. Give the folder of one of them.",
                             root_.string(), fmt::join(saves, ", "));
  }

  void deepspeed(const fs::path& path, std::set<fs::path>& folders) {
    if (const auto facts = deepspeed_facts(path, complain_of(name_of(path)))) {
      if (!result_.has_manifest || !result_.step) result_.step = facts->step, result_.ranks = facts->ranks;
      const auto layout = facts->stage ? fmt::format("ZeRO stage {}", *facts->stage) : std::string("ZeRO stage 0");
      const bool universal = folders.contains(path / "zero");
      result_.layout += (result_.layout.empty() ? "" : ", ") + (universal ? std::string("universal") : layout);
      if (result_.format.empty()) result_.format = "DeepSpeed checkpoint";
      if (universal) {
        folders.erase(path / "zero");
        add(path / "zero", [&](InspectedPart& part, const Complain& complain) {
          read_universal(path / "zero", verify_ && !has_checksums(path / "zero"), part, complain);
          return true;
        });
      }
    }
    for (const char* file : {"latest", "latest_universal"}) {
      std::string tag;
      if (!is_there(path / file) || !read_file(path / file, kMostSettingsBytes, tag).empty()) continue;
      while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r' || tag.back() == ' ')) tag.pop_back();
      names_a_tag_ = true;
      if (!folders.contains(path / tag)) {
        complain_of(name_of(path))(fmt::format("'{}' names the folder '{}', which is not there", file, tag));
        continue;
      }
      std::vector<std::string> others;
      for (const auto& folder : folders)
        if (folder.filename() != tag && deepspeed_facts(folder, [](const std::string&) {}))
          others.push_back(fmt::format("'{}'", folder.filename().string()));
      for (const auto& other : others) folders.erase(path / other.substr(1, other.size() - 2));
      if (!others.empty())
        result_.notes.push_back(fmt::format("This is '{}', which the file '{}' names; there are also {}.", tag, file,
                                            fmt::join(others, ", ")));
      return;
    }
  }

  /// Of a file, or of what is in a folder, in the manifest.
  bool has_checksums(const fs::path& path) const { return is_listed(name_of(path)); }
  bool is_listed(const std::string& name) const {
    if (!manifest_) return false;
    const auto below = manifest_->files.lower_bound(name + "/");
    return name.empty() || manifest_->files.contains(name) ||
           (below != manifest_->files.end() && below->first.starts_with(name + "/"));
  }

  void read_manifest_of(const fs::path& path) {
    try {
      manifest_ = read_manifest(path);
    } catch (const CheckpointError& error) {
      result_.damage.emplace_back(error.what());
      result_.format = "checkpoint of save_state";
    }
    if (!manifest_) return step_of_python(path);
    result_.has_manifest = true;
    result_.format = "checkpoint of save_state";
    result_.layout = manifest_->layout;
    result_.written_by = fmt::format("accelerate {}, LibTorch {}", manifest_->accelerate, manifest_->libtorch);
    result_.step = manifest_->step, result_.iteration = manifest_->iteration, result_.ranks = manifest_->world_size;
    for (const auto& [name, sums] : manifest_->files) {
      try {
        check_inside("checkpoint '" + root_.string() + "'", path, path / name);
        check_listed(path / name, sums, manifest_->part_bytes);
      } catch (const CheckpointError& error) {
        complain_of(name)(error.what());
      }
    }
  }

  void check_listed(const fs::path& file, const FileChecksums& sums, int64_t part_bytes) {
    const InputFile opened(file);
    const ExpectedFile expected(file.string(), sums, part_bytes);
    expected.check_size(opened.size());
    if (!verify_) return;
    std::string part;
    expected.check(0, opened.size(), [&](int64_t begin, int64_t bytes) {
      part.resize(static_cast<size_t>(bytes));
      opened.read(begin, part.data(), bytes);
      return crc32c::of(part);
    });
    result_.checked_bytes += opened.size();
  }

  /// Python's Accelerate has no list, and the number of the save beside the random generators.
  void step_of_python(const fs::path& path) {
    const auto file = path / "random_states_0.pkl";
    if (!is_there(file)) return;
    result_.format = "checkpoint of save_state";
    try {
      result_.step = number_in(file, {"step"});
    } catch (const CheckpointError&) {
      // Which the part says.
    }
  }

  [[noreturn]] void refuse() const {
    raise<CheckpointError>(
        "'{}' holds no tensors of a format that is known, expected files of safetensors, torch.save, torch.export or "
        "GGUF, a distributed checkpoint (.metadata), or a checkpoint of save_state or of DeepSpeed.",
        root_.string());
  }

  fs::path root_;
  bool verify_;
  bool names_a_tag_ = false;  ///< a file of DeepSpeed's, which says which of several folders is meant
  std::optional<CheckpointManifest> manifest_;
  Inspection result_;
};

}  // namespace

Inspection inspect(const fs::path& path, const InspectOptions& options) {
  return Inspector(path.has_filename() ? path : path.parent_path(), options.verify).run();
}

}  // namespace accelerate::formats
