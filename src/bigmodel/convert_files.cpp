#include "accelerate/bigmodel/convert_files.hpp"

#include <c10/core/GradMode.h>
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "accelerate/checkpoint.hpp"
#include "accelerate/checkpoint/zero_to_fp32.hpp"
#include "accelerate/utils/version.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/quantize_parts.hpp"
#include "checkpoint/weight_files.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "formats/dcp.hpp"
#include "formats/inspect/inspect.hpp"
#include "formats/tensor_source.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/atomic_file.hpp"
#include "utils/fd.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace converting_files {
namespace {

namespace fs = std::filesystem;
using checkpointing::StoredTensor;
using checkpointing::StoredTensors;

constexpr const char* kConvert = "convert_files";
constexpr const char* kPlan = "plan.json";

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

// ---- what is read

bool holds_distributed(const fs::path& folder) {
  if (formats::is_dcp_folder(folder)) return true;
  for (const auto& entry : read_folder<CheckpointError>("folder", folder))
    if (entry.path().filename().string().starts_with("pytorch_model_fsdp_") && formats::is_dcp_folder(entry.path()))
      return true;
  return false;
}

StoredTensors open_weights(const fs::path& from, const std::string& tag) {
  if (!is_there(from))
    raise<CheckpointError>("{}: '{}' does not exist, expected a checkpoint. Nothing is downloaded.", kConvert,
                           from.string());
  const bool of_deepspeed = is_folder(from) && is_zero_checkpoint(from);
  if (!tag.empty() && !is_folder(from))
    raise<ConfigError>("{}: the tag '{}' was given for '{}', expected DeepSpeed's folder of several checkpoints",
                       kConvert, tag, from.string());
  if (of_deepspeed || !tag.empty())
    return checkpointing::ZeroCheckpoint(checkpointing::ZeroCheckpoint::find(from, tag)).weights();
  if (is_folder(from) && holds_distributed(from)) return checkpointing::open_merged(from);
  if (from.extension() == ".pt2") return checkpointing::open_pt2(from);
  return bigmodel::open_checkpoint(from).tensors;
}

int64_t bytes_of(const formats::TensorSource& tensor) {
  return c10::multiply_integers(tensor.sizes) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

class WeightConversion {
 public:
  WeightConversion(const fs::path& from, const fs::path& to, const ConvertFilesOptions& options)
      : from_(without_slash(from)), to_(without_slash(to)), options_(options), format_(format()) {
    check_options();
    check_place();
  }

  ConvertedFiles run() {
    const c10::NoGradGuard no_gradients;
    if (format_ == "gguf") return to_gguf();
    stored_ = open_weights(from_, options_.tag);
    if (stored_.empty()) raise<CheckpointError>("{}: '{}' holds no tensors.", kConvert, from_.string());
    std::vector<checkpointing::WeightSize> sizes;
    for (const auto& [name, stored] : stored_) {
      sizes.push_back({name, bytes_of(source_of(name))});
      result_.bytes += sizes.back().bytes;
    }
    result_.tensors = static_cast<int64_t>(stored_.size());
    if (!is_folder_made()) {
      to_file();
    } else {
      const auto most = checkpointing::parse_size(options_.max_shard_size.value_or("50GB"));
      to_folder(checkpointing::split_weights(sizes, most));
    }
    return std::move(result_);
  }

 private:
  std::string format() const {
    const auto ending = to_.extension().string();
    const bool torch = ending == ".bin" || ending == ".pt" || ending == ".pth";
    const std::string by_name = ending == ".gguf" ? "gguf"
                                : torch           ? "torch"
                                                  : "safetensors";  // which folders have, too
    static constexpr std::array kFormats{"safetensors", "torch", "gguf", "dcp"};
    const auto wanted = options_.to.value_or(by_name);
    if (std::ranges::find(kFormats, wanted) == kFormats.end())
      raise<ConfigError>("{}: found the format '{}', expected safetensors, torch, gguf or dcp", kConvert, wanted);
    const bool is_file = ending == ".safetensors" || ending == ".gguf" || torch;
    if ((is_file && wanted != by_name) || (!is_file && wanted == "gguf"))
      raise<ConfigError>(
          "{}: '{}' will be of the format '{}', expected a name that ends so ({}). Choose another name or format",
          kConvert, to_.string(), wanted,
          wanted == "gguf"          ? ".gguf"
          : wanted == "torch"       ? ".bin, .pt or .pth, or a folder's"
          : wanted == "safetensors" ? ".safetensors, or a folder's"
                                    : "a folder's");
    return wanted;
  }
  bool is_folder_made() const {
    static const std::set<std::string> kFiles{".safetensors", ".bin", ".pt", ".pth", ".gguf"};
    return !kFiles.contains(to_.extension().string());
  }

  void check_options() const {
    if (options_.max_shard_size && !is_folder_made())
      raise<ConfigError>(
          "{}: max_shard_size was given, and '{}' will be one file, expected a folder. Leave it out, or give a "
          "folder's "
          "name",
          kConvert, to_.string());
    if (options_.dtype && !formats::find_torch_dtype(*options_.dtype))
      raise<ConfigError>("{}: found the dtype {}, expected one that files have", kConvert,
                         c10::toString(*options_.dtype));
    if (options_.dtype && *options_.dtype != at::kFloat && *options_.dtype != at::kDouble &&
        *options_.dtype != at::kHalf && *options_.dtype != at::kBFloat16)
      raise<ConfigError>("{}: found the dtype {}, expected float32, float64, float16 or bfloat16", kConvert,
                         quantizing_files::dtype_name(*options_.dtype));
    if (format_ == "gguf" && options_.dtype == at::kDouble)
      raise<ConfigError>("{}: found the dtype float64 for a .gguf file, expected float32, float16 or bfloat16",
                         kConvert);
    if (format_ == "gguf" && !options_.tag.empty())
      raise<ConfigError>("{}: a tag was given for a .gguf file, which is made of a Hugging Face folder, expected none",
                         kConvert);
  }

  /// Files that a conversion makes.
  static bool is_of_a_result(const fs::path& file) {
    const auto name = file.filename().string();
    return name.ends_with(".safetensors") || name.ends_with(".index.json") || name.ends_with(".distcp") ||
           name == formats::kDcpMetadataFile || name == formats::kDcpLayoutFile ||
           (name.starts_with("pytorch_model") && name.ends_with(".bin"));
  }

  void check_place() const {
    if (to_.empty()) raise<ConfigError>("{}: found '' as what is written, expected a name", kConvert);
    if (!is_there(to_)) return;
    std::error_code error;
    const auto within = fs::weakly_canonical(from_, error).lexically_relative(fs::weakly_canonical(to_, error));
    if (!within.empty() && *within.begin() != "..")
      raise<ConfigError>("{}: '{}' is read, and is or lies in '{}', which is written, expected two places", kConvert,
                         from_.string(), to_.string());
    if (is_folder(to_) && fs::is_empty(to_, error)) return;
    if (!options_.overwrite)
      raise<ConfigError>("{}: '{}' exists. Choose another place, or allow to overwrite it (--overwrite)", kConvert,
                         to_.string());
    if (is_folder(to_) != is_folder_made())
      raise<ConfigError>("{}: '{}' is {}, and {} would take its place. Choose another place", kConvert, to_.string(),
                         is_folder(to_) ? "a folder" : "a file", is_folder_made() ? "a folder" : "a file");
    if (!is_folder_made()) return;
    for (const auto& entry : read_folder<CheckpointError>(kConvert, to_))
      if (!is_of_a_result(entry.path()))
        raise<ConfigError>(
            "{}: '{}' would be replaced as a whole, and has '{}', which is no file of weights. Move it away, or choose "
            "another place",
            kConvert, to_.string(), entry.path().filename().string());
  }

  formats::TensorSource source_of(const std::string& name) {
    const auto& stored = stored_.at(name);
    const auto dtype = options_.dtype && at::isFloatingType(stored.dtype) ? *options_.dtype : stored.dtype;
    return {name, dtype, stored.sizes, [this, name, &stored, dtype] {
              progress();
              return quantizing_files::in_dtype(name, stored.read_whole(), dtype);
            }};
  }
  void progress() {
    if (options_.on_progress) options_.on_progress(done_, result_.tensors);
    ++done_;
  }

  ConvertedFiles to_gguf() {
    if (!is_folder(from_))
      raise<ConfigError>(
          "{}: a .gguf file is made of a Hugging Face folder with config.json and a tokenizer, found the file '{}'. "
          "`accelerate quantize` makes one of another .gguf file",
          kConvert, from_.string());
    QuantizeFilesOptions options;
    options.on_progress = options_.on_progress;
    const auto made = quantizing_files::make_gguf_of_numbers(from_, to_, options_.dtype, options);
    result_.tensors = static_cast<int64_t>(made.tensors.size());
    result_.bytes = made.bytes_after;
    result_.notes = made.notes;
    result_.files = {to_};
    return std::move(result_);
  }

  void to_file() {
    std::error_code error;
    if (to_.has_parent_path()) fs::create_directories(to_.parent_path(), error);
    std::vector<formats::TensorSource> sources;
    for (const auto& [name, stored] : stored_) sources.push_back(source_of(name));
    checkpointing::write_tensors(kConvert, to_, std::move(sources), format_ == "safetensors");
    result_.files = {to_};
  }

  // ---- a folder

  /// What says that files of an earlier run are those of this one.
  std::string plan() const {
    auto inputs = nlohmann::ordered_json::array();
    const auto add = [&](const fs::path& file) {
      std::error_code error;
      const auto bytes = fs::file_size(file, error);
      const auto time = fs::last_write_time(file, error).time_since_epoch().count();
      inputs.push_back(
          {fs::absolute(file).string(), error ? 0 : static_cast<int64_t>(bytes), static_cast<int64_t>(time)});
    };
    if (is_folder(from_)) {
      std::set<fs::path> files;
      std::error_code error;
      const auto work = fs::absolute(unfinished_conversion(to_)).lexically_normal();  // which may lie in there
      for (fs::recursive_directory_iterator next(from_, error), end; !error && next != end; next.increment(error)) {
        std::error_code ignored;
        if (fs::absolute(next->path()).lexically_normal() == work) next.disable_recursion_pending();
        else if (next->is_regular_file(ignored)) files.insert(next->path());
      }
      for (const auto& file : files) add(file);
    } else {
      add(from_);
      if (from_.extension() == ".json")  // an index, whose files lie beside it
        for (const auto& [name, stored] : stored_)
          if (stored.bytes && !stored.bytes->file.empty()) add(stored.bytes->file);
    }
    return nlohmann::ordered_json{{"version", 1},
                                  {"by", ACCELERATE_VERSION},
                                  {"inputs", std::move(inputs)},
                                  {"format", format_},
                                  {"dtype", options_.dtype ? quantizing_files::dtype_name(*options_.dtype) : ""},
                                  {"max_shard_size", options_.max_shard_size.value_or("")},
                                  {"tag", options_.tag}}
               .dump(1) +
           "\n";
  }

  /// Whether a file lists exactly these tensors, and has their bytes.
  bool is_whole(const fs::path& file, const std::vector<std::string>& names) {
    if (!is_there(file)) return false;
    try {
      const auto found = formats::inspect(file);
      if (!found.damage.empty() || found.parts.size() != 1 || found.parts[0].tensors.size() != names.size())
        return false;
      const std::set<std::string> wanted(names.begin(), names.end());
      return std::ranges::all_of(found.parts[0].tensors, [&](const formats::InspectedTensor& tensor) {
        if (!wanted.contains(tensor.name)) return false;
        const auto source = source_of(tensor.name);
        return tensor.bytes == bytes_of(source) && tensor.dtype == quantizing_files::dtype_name(source.dtype);
      });
    } catch (const CheckpointError&) {
      return false;
    }
  }

  void to_folder(const std::vector<std::vector<std::string>>& parts) {
    const auto work = unfinished_conversion(to_);
    std::error_code error;
    fs::create_directories(work, error);
    const Fd lock(::open(work.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!lock)
      raise<CheckpointError>("{}: can't create the folder '{}': {}. Check the path and the rights.", kConvert,
                             work.string(), error.message());
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)  // some file systems have no locks
      raise<ConfigError>("{}: another process is writing into '{}', expected one at a time. Wait for it.", kConvert,
                         work.string());
    const auto wanted = plan();
    std::string there;
    const bool goes_on = format_ != "dcp" && read_file(work / kPlan, kMostListBytes, there).empty() && there == wanted;
    const bool safe = format_ == "safetensors";
    const std::string stem = safe ? "model" : "pytorch_model", ending = safe ? ".safetensors" : ".bin";
    std::vector<std::string> names;
    std::set<std::string> kept;
    for (size_t i = 0; i < parts.size(); ++i) {
      names.push_back(checkpointing::shard_name(stem, ending, i, parts.size()));
      if (goes_on && is_whole(work / names.back(), parts[i])) kept.insert(names.back());
    }
    for (const auto& entry : read_folder<CheckpointError>(kConvert, work))
      if (!kept.contains(entry.path().filename().string())) fs::remove_all(entry.path());
    write_text(work / kPlan, wanted);
    try {
      if (format_ == "dcp") write_distributed(work, parts);
      else write_parts(work, parts, names, kept);
    } catch (...) {
      // Without a file that is whole there is nothing to go on from.
      const bool any = format_ != "dcp" &&
                       std::ranges::any_of(names, [&](const std::string& name) { return is_there(work / name); });
      if (!any) fs::remove_all(work, error);
      throw;
    }
    fs::remove(work / kPlan);
    publish(work);
    for (const auto& entry : read_folder<CheckpointError>(kConvert, to_)) result_.files.push_back(entry.path());
    std::ranges::sort(result_.files);
    result_.kept = static_cast<int64_t>(kept.size());
  }

  void write_parts(const fs::path& work, const std::vector<std::vector<std::string>>& parts,
                   const std::vector<std::string>& names, const std::set<std::string>& kept) {
    std::map<std::string, std::string> file_of;
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const auto& name : parts[i]) file_of[name] = names[i];
      if (kept.contains(names[i])) {
        done_ += static_cast<int64_t>(parts[i].size());
        continue;
      }
      std::vector<formats::TensorSource> sources;
      for (const auto& name : parts[i]) sources.push_back(source_of(name));
      checkpointing::write_tensors(kConvert, work / names[i], std::move(sources), format_ == "safetensors");
    }
    if (parts.size() > 1)
      write_text(
          work / ((format_ == "safetensors" ? "model.safetensors" : "pytorch_model.bin") + std::string(".index.json")),
          checkpointing::weight_index(file_of, result_.bytes));
  }

  /// As if each part were a rank's.
  void write_distributed(const fs::path& work, const std::vector<std::vector<std::string>>& parts) {
    std::vector<formats::DcpRecord> records;
    std::map<std::string, formats::DcpPath> paths;
    for (size_t i = 0; i < parts.size(); ++i) {
      std::vector<formats::DcpTensorItem> items;
      for (const auto& name : parts[i]) {
        const auto values = source_of(name).read();
        const formats::DcpPath path{"model", name};
        paths[formats::dcp_name(path)] = path;
        items.push_back({formats::dcp_name(path), values.sizes().vec(), formats::whole(values.sizes().vec()), values});
      }
      std::ranges::move(formats::write_dcp_items(work, static_cast<int64_t>(i), {}, items),
                        std::back_inserter(records));
    }
    formats::write_dcp_metadata(work, records, paths);
  }

  static void write_text(const fs::path& path, const std::string& text) {
    AtomicFile file(kConvert, path);
    file.write(text);
    file.finish();
  }

  void publish(const fs::path& work) const {
    const auto old = work.parent_path() / fmt::format(".{}.stale", to_.filename().string());
    std::error_code error, ignored;
    fs::remove_all(old, ignored);
    const bool replaces = is_there(to_);
    if (replaces) fs::rename(to_, old, error);
    if (!error) fs::rename(work, to_, error);
    if (error) {
      if (replaces && !is_there(to_)) fs::rename(old, to_, ignored);
      raise<CheckpointError>("{}: can't rename the finished folder '{}' to '{}': {}.", kConvert, work.string(),
                             to_.string(), error.message());
    }
    fs::remove_all(old, ignored);
    flush_to_disk(kConvert, to_.has_parent_path() ? to_.parent_path() : fs::path("."));
  }

  fs::path from_, to_;
  const ConvertFilesOptions& options_;
  std::string format_;
  StoredTensors stored_;
  ConvertedFiles result_;
  int64_t done_ = 0;
};

}  // namespace
}  // namespace converting_files

std::filesystem::path unfinished_conversion(const std::filesystem::path& to) {
  const auto place = to.has_filename() ? to : to.parent_path();
  return place.parent_path() / fmt::format(".{}.unfinished", place.filename().string());
}

ConvertedFiles convert_files(const std::filesystem::path& from, const std::filesystem::path& to,
                             const ConvertFilesOptions& options) {
  return converting_files::WeightConversion(from, to, options).run();
}

}  // namespace accelerate
