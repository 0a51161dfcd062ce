#include <ATen/ops/isfinite.h>
#include <c10/util/accumulate.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/quantize_parts.hpp"
#include "checkpoint/weight_files.hpp"
#include "codes/bitsandbytes.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "formats/tensor_source.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::quantizing_files {
namespace {

namespace fs = std::filesystem;
using codes::Encoding;

constexpr int64_t kLargestExtra = int64_t{64} << 20;
constexpr const char* kOfExperts = "of experts, which are no linear layers";

/// A folder that appears under its name when it is whole, and is gone when it is not.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& final_name)
      : final_name_(final_name.has_filename() ? final_name : final_name.parent_path()),
        replaces_(is_there(final_name_)) {
    std::error_code error;
    if (final_name_.has_parent_path()) fs::create_directories(final_name_.parent_path(), error);
    // One that is there is passed by: it may be another user's, who could change or take what is written into it.
    bool is_new = false;
    for (int64_t i = 0; !error && !is_new; ++i) {
      temporary_ = final_name_.parent_path() / fmt::format(".{}.tmp-{}{}", final_name_.filename().string(), ::getpid(),
                                                           i == 0 ? "" : fmt::format("-{}", i));
      is_new = fs::create_directory(temporary_, error);
    }
    if (error)
      raise<CheckpointError>("{}: can't create the folder '{}': {}. Check the path and the rights.", kOperation,
                             temporary_.string(), error.message());
  }
  ~NewFolder() {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);  // after finish(): what was there before
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& path() const { return temporary_; }
  void finish() {
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, final_name_.c_str(),
                    replaces_ ? RENAME_EXCHANGE : RENAME_NOREPLACE) == 0)
      return;
    std::error_code error(errno, std::generic_category());
    if (error == std::errc::invalid_argument || error == std::errc::function_not_supported ||
        error == std::errc::operation_not_supported)
      error = rename_plainly();  // file systems such as NFS know no flags
    if (!error) return;
    fs::path kept = beside("finished");
    std::error_code problem;
    if (fs::rename(temporary_, kept, problem); problem) kept = temporary_;
    temporary_.clear();
    raise<CheckpointError>("{}: can't rename the finished folder to '{}': {}. It is kept as '{}'.", kOperation,
                           final_name_.string(), error.message(), kept.string());
  }

 private:
  fs::path beside(const char* what) const {
    return final_name_.parent_path() / fmt::format("{}.{}-{}", final_name_.filename().string(), what, ::getpid());
  }
  /// In two steps, between which there is nothing under the name.
  std::error_code rename_plainly() const {
    std::error_code error, ignored;
    const fs::path old = beside("old");
    if (replaces_) fs::rename(final_name_, old, error);
    if (error) return error;
    fs::rename(temporary_, final_name_, error);
    if (!replaces_) return error;
    if (error) fs::rename(old, final_name_, ignored);
    else fs::remove_all(old, ignored);
    return error;
  }

  fs::path final_name_, temporary_;
  bool replaces_;
};

bool is_weights_file(const fs::path& file) {
  const std::string name = file.filename().string();
  for (const char* end : {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json"})
    if (name.ends_with(end)) return true;
  return false;
}

/// Whether any result has this name at its top.
bool is_of_a_result(const std::string& name) {
  constexpr std::array kNames{
      "config.json",         "generation_config.json",  "tokenizer.json", "tokenizer_config.json",
      "chat_template.jinja", "special_tokens_map.json", "vocab.json",     "merges.txt",
      "added_tokens.json",   "tokenizer.model"};
  return std::ranges::find(kNames, std::string_view(name)) != kNames.end() ||
         (name.starts_with("model") && name.ends_with(".safetensors")) || name.ends_with(".safetensors.index.json");
}

/// Tokenizers, settings of generation, read-mes: all that is neither weights nor large. Paths within `from`, folders
/// before what is in them. @param to  is none of them, should it be in there
void find_extras(const fs::path& from, const fs::path& folder, const fs::path& to, std::set<fs::path>& found,
                 std::vector<std::string>& notes) {
  for (const auto& entry : read_folder<CheckpointError>("folder", from / folder)) {
    const fs::path& file = entry.path();
    const auto name = folder / file.filename();
    if (file.filename().string().starts_with(".") || name == "config.json" || is_weights_file(file)) continue;
    std::error_code error;
    if (fs::equivalent(file, to, error)) continue;
    // The new folder may be published, so nothing gets into it that is not of the model; and links to folders may lead
    // to themselves.
    if (entry.is_symlink(error) && fs::is_directory(file, error)) {
      notes.push_back(fmt::format("'{}' is a link to a folder and was not copied.", file.string()));
      continue;
    }
    check_inside(kOperation, from, file);
    if (fs::is_directory(file, error)) {
      found.insert(name);
      find_extras(from, name, to, found, notes);
    } else if (fs::is_regular_file(file, error)) {
      constexpr int64_t kLargestPointer = 1024;
      std::string text;
      if (static_cast<int64_t>(fs::file_size(file, error)) <= kLargestPointer)
        if (const auto problem = read_file(file, kLargestPointer, text); !git_lfs_problem(text).empty()) {
          if (folder.empty() && is_of_a_result(name.string()))
            raise<CheckpointError>("{}: '{}': {}.", kOperation, file.string(), problem);
          notes.push_back(fmt::format("'{}' was not copied: {}.", file.string(), problem));
          continue;
        }
      if (static_cast<int64_t>(fs::file_size(file, error)) <= kLargestExtra) found.insert(name);
      else notes.push_back(fmt::format("'{}' has more than 64 MiB and was not copied.", file.string()));
    }
  }
}

void copy_extras(const fs::path& from, const fs::path& to, const std::set<fs::path>& extras) {
  for (const auto& name : extras) {
    std::error_code error;
    if (fs::is_directory(from / name, error)) fs::create_directory(to / name, error);
    else fs::copy_file(from / name, to / name, error);
    if (error) raise<CheckpointError>("{}: can't copy '{}': {}.", kOperation, (from / name).string(), error.message());
  }
}

/// @throws ConfigError if something in a folder that is to be replaced is no part of such a folder
void refuse_foreign(const fs::path& to, const std::set<fs::path>& extras) {
  std::vector<std::string> foreign;
  const auto look = [&](const auto& self, const fs::path& folder) -> void {
    for (const auto& entry : read_folder<CheckpointError>("folder", to / folder)) {
      const auto name = folder / entry.path().filename();
      if (folder.empty() && is_of_a_result(name.string())) continue;
      std::error_code ignored;
      if (!extras.contains(name)) foreign.push_back(name.string());
      else if (entry.is_directory(ignored)) self(self, name);
    }
  };
  look(look, {});
  if (foreign.empty()) return;
  std::ranges::sort(foreign);
  constexpr size_t kMost = 5;
  const size_t more = foreign.size() - std::min(foreign.size(), kMost);
  foreign.resize(foreign.size() - more);
  raise<ConfigError>(
      "{}: '{}' would be replaced as a whole, and has what the new folder will not have: {}{}. Move it away, or choose "
      "another place",
      kOperation, to.string(), fmt::join(foreign, ", "), more == 0 ? "" : fmt::format(" and {} more", more));
}

class FolderMaker {
 public:
  FolderMaker(const fs::path& from, const fs::path& to, Encoding encoding, const QuantizeFilesOptions& options)
      : from_(from), to_(to), encoding_(encoding), options_(options), is_gguf_(!is_folder(from)) {}

  QuantizedFiles make(bool only_check) {
    BnbQuantizationConfig config{.load_in_8bit = encoding_ == Encoding::int8_rowwise,
                                 .load_in_4bit = encoding_ != Encoding::int8_rowwise,
                                 .bnb_4bit_use_double_quant = options_.double_quantize,
                                 .bnb_4bit_compute_dtype = options_.compute_dtype.value_or(at::kFloat),
                                 .bnb_4bit_blocksize = block_size()};
    if (config.load_in_4bit) config.bnb_4bit_quant_type = options_.to;
    else config.llm_int8_threshold = options_.threshold.value_or(6.0);
    config.validate();
    const int64_t max_shard_bytes = checkpointing::parse_size(options_.max_shard_size.value_or("50GB"));
    const auto model = config_of(from_);
    auto checkpoint = bigmodel::open_checkpoint(from_);
    if (!is_gguf_) refuse_codes(from_, checkpoint.codes);
    const Outline outline(model, checkpoint);
    outline.check(from_, checkpoint.tensors, result_.notes);
    std::set<std::string> modules;
    if (!outline.head.empty()) modules.insert(outline.head);
    for (const auto& [name, stored] : checkpoint.tensors) modules.insert(module_of(name));
    check_skipped(options_.skip_modules, modules);
    std::set<fs::path> extras;
    if (!is_gguf_) find_extras(from_, {}, to_, extras, result_.notes);
    if (is_there(to_)) refuse_foreign(to_, extras);
    if (only_check) return {};
    NewFolder folder(to_);
    spill_ = folder.path() / ".codes";
    fs::create_directory(spill_);
    all_ = 2 * static_cast<int64_t>(checkpoint.tensors.size());
    for (const auto& [name, stored] : checkpoint.tensors) {
      progress();
      add(name, stored, outline);
    }
    say_what_stays();
    write_weights(folder.path(), max_shard_bytes);
    fs::remove_all(spill_);
    write_config(folder.path(), model.text, outline.head, config);
    if (is_gguf_) write_vocabulary(folder.path());
    copy_extras(from_, folder.path(), extras);
    folder.finish();
    return std::move(result_);
  }

 private:
  void progress() {
    if (options_.on_progress) options_.on_progress(done_, all_);
    ++done_;
  }

  /// Why a tensor stays, or nothing.
  std::string kept(const std::string& name, const checkpointing::StoredTensor& stored, const Outline& layers) {
    if (name.find(".experts.") != std::string::npos) {
      skipped_.push_back(module_of(name));
      return kOfExperts;
    }
    if (!name.ends_with(".weight") || stored.sizes.size() != 2 || !c10::isFloatingType(stored.dtype))
      return "not a matrix of a layer";
    const std::string module = module_of(name);
    if (layers.linear.contains(module)) {
      const bool never = is_among(module, layers.keep_in_fp32_modules);
      if (!never && !is_among(module, options_.skip_modules)) return "";
      skipped_.push_back(module);
      return never ? "of a module that transformers keeps in fp32" : "to be left alone";
    }
    if (layers.with_weight.contains(module)) return "not of a linear layer";
    skipped_.push_back(module);
    return "of the model's head";
  }

  void say_what_stays() {
    const auto stays = std::ranges::count(result_.tensors, kOfExperts, &QuantizedTensor::kept);
    if (stays > 0)
      result_.notes.push_back(
          fmt::format("{} tensors of {} stay: they are of experts, which transformers has as one tensor and not as "
                      "linear layers.",
                      stays, result_.tensors.size()));
  }

  void add(const std::string& name, const checkpointing::StoredTensor& stored, const Outline& layers) {
    int64_t elements = 1;
    for (const int64_t size : stored.sizes) elements *= size;
    QuantizedTensor made{.name = name,
                         .from = dtype_name(stored.dtype),
                         .to = options_.to,
                         .kept = kept(name, stored, layers),
                         .bytes_before = elements * static_cast<int64_t>(c10::elementSize(stored.dtype)),
                         .error = {}};
    auto dtype = stored.dtype;
    if (is_gguf_) {
      const auto& info = gguf().info(name);
      made.from = info.encoding;
      made.bytes_before = info.stored_bytes;
      if (codes::encoding_named(info.encoding)) dtype = options_.compute_dtype.value_or(at::kFloat);
    }
    if (made.kept.empty()) {
      encode(made, stored, layers.transposed.contains(module_of(name)));
    } else {
      made.to = dtype_name(dtype);
      made.bytes_after = elements * static_cast<int64_t>(c10::elementSize(dtype));
      sources_[name].push_back({name, dtype, stored.sizes, [this, read = stored.read_whole, dtype] {
                                  progress();
                                  return read().to(dtype);
                                }});
    }
    result_.bytes_before += made.bytes_before;
    result_.bytes_after += made.bytes_after;
    result_.tensors.push_back(std::move(made));
  }

  /// @param transposed  the codes are those of [outputs, inputs], as transformers has them for such layers, too
  void encode(QuantizedTensor& made, const checkpointing::StoredTensor& stored, bool transposed) {
    const bool int8 = encoding_ == Encoding::int8_rowwise;
    at::Tensor original = stored.read_whole();
    if (transposed) original = original.t().contiguous();
    auto values = original;
    if (int8) values = values.to(at::kHalf);
    else if (values.scalar_type() == at::kDouble) values = values.to(at::kFloat);
    if (int8 && !at::isfinite(values).all().item<bool>() && at::isfinite(original).all().item<bool>())
      raise<ConfigError>(
          "{}: '{}' has numbers beyond fp16, which int8 is encoded from as in bitsandbytes. Choose "
          "another encoding, or leave the module alone",
          kOperation, made.name);
    const auto codes =
        encode_named(made.name, values,
                     {.encoding = encoding_, .block_size = block_size(), .double_quantize = options_.double_quantize});
    if (options_.measure_errors) {
      RelativeError error;
      const int64_t rows = codes.rows(), step = std::max<int64_t>(kPart / std::max<int64_t>(codes.columns(), 1), 1);
      const auto flat = original.reshape({rows, codes.columns()});
      for (int64_t row = 0; row < rows; row += step) {
        const int64_t count = std::min(step, rows - row);
        error.add(codes::decode_rows(codes, row, count, at::kFloat), flat.narrow(0, row, count).to(at::kFloat));
      }
      made.error = error.value();
    }
    // Beside each other in the result are tensors of one dtype: codes wait in a file of their own until their turn.
    const fs::path file = spill_ / fmt::format("{}.safetensors", result_.tensors.size());
    const auto parts = codes::bitsandbytes_tensors(made.name, codes);
    save_safetensors(file, parts);
    bool first = true;
    for (const auto& [name, part] : parts) {
      made.bytes_after += static_cast<int64_t>(part.nbytes());
      sources_[made.name].push_back({name, part.scalar_type(), part.sizes().vec(), [this, file, name = name, first] {
                                       if (first) progress();
                                       return SafetensorsFile(file).tensor(name);
                                     }});
      first = false;
    }
  }

  void write_weights(const fs::path& folder, int64_t max_shard_bytes) {
    std::vector<checkpointing::WeightSize> weights;
    for (const auto& [name, parts] : sources_) {
      checkpointing::WeightSize weight{.name = name};
      for (const auto& part : parts) {
        weight.parts.push_back(part.name);
        weight.bytes += c10::multiply_integers(part.sizes) * static_cast<int64_t>(c10::elementSize(part.dtype));
      }
      weights.push_back(std::move(weight));
    }
    checkpointing::write_weight_files(folder, weights, max_shard_bytes, /*safe_serialization=*/true,
                                      [&](const fs::path& file, const std::vector<std::string>& names) {
                                        std::vector<formats::TensorSource> together;
                                        for (const auto& name : names)
                                          std::ranges::move(sources_.at(name), std::back_inserter(together));
                                        formats::write_safetensors(file, std::move(together), {{"format", "pt"}});
                                      });
  }

  /// @param head  one that shares the embeddings' weight is in no file
  void write_config(const fs::path& folder, const std::string& text, const std::string& head,
                    BnbQuantizationConfig& config) {
    auto json = parse_json<nlohmann::ordered_json>(text);
    if (!head.empty() && std::ranges::find(skipped_, head) == skipped_.end()) skipped_.push_back(head);
    config.skip_modules = skipped_;
    json["quantization_config"] = parse_json<nlohmann::ordered_json>(config.to_json());
    write_file(folder / "config.json", json.dump(2) + "\n");
  }

  void write_vocabulary(const fs::path& folder) {
    const auto files = formats::tokenizer_files(gguf().metadata(), from_.string());
    for (const auto& [name, text] : files) write_file(folder / name, text);
    if (files.empty())
      result_.notes.emplace_back(
          "The file's vocabulary is not written, because it is not byte-level BPE of a known form: copy tokenizer.json "
          "and what belongs to it from the model's own folder.");
  }

  static void write_file(const fs::path& path, const std::string& text) {
    AtomicFile file(kOperation, path);
    file.write(text);
    file.finish();
  }

  int64_t block_size() const { return options_.block_size.value_or(64); }

  const GgufFile& gguf() {
    if (!gguf_) gguf_.emplace(from_);
    return *gguf_;
  }

  fs::path from_, to_, spill_;
  Encoding encoding_;
  const QuantizeFilesOptions& options_;
  bool is_gguf_;
  std::optional<GgufFile> gguf_;
  std::vector<std::string> skipped_;
  std::map<std::string, std::vector<formats::TensorSource>> sources_;  ///< parts of each weight
  QuantizedFiles result_;
  int64_t done_ = 0, all_ = 0;
};

}  // namespace

QuantizedFiles make_folder(const fs::path& from, const fs::path& to, Encoding encoding,
                           const QuantizeFilesOptions& options, bool only_check) {
  return FolderMaker(from, to, encoding, options).make(only_check);
}

}  // namespace accelerate::quantizing_files
