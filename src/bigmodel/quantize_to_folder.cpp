#include <ATen/ops/isfinite.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/loading_plan.hpp"
#include "bigmodel/quantize_parts.hpp"
#include "codes/bitsandbytes.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "formats/tensor_source.hpp"
#include "utils/atomic_file.hpp"
#include "utils/json.hpp"
#include "utils/raise.hpp"
#include "utils/read_file.hpp"

namespace accelerate::quantizing_files {
namespace {

namespace fs = std::filesystem;
using codes::Encoding;

constexpr int64_t kLargestExtra = int64_t{64} << 20;

/// A folder that appears under its name when it is whole, and is gone when it is not.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& final_name)
      : final_name_(final_name.has_filename() ? final_name : final_name.parent_path()),
        temporary_(final_name_.parent_path() / fmt::format(".{}.tmp-{}", final_name_.filename().string(), ::getpid())) {
    std::error_code error;
    if (final_name_.has_parent_path()) fs::create_directories(final_name_.parent_path(), error);
    if (!error) fs::create_directory(temporary_, error);
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
    const bool replaces = is_there(final_name_);
    if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, final_name_.c_str(),
                    replaces ? RENAME_EXCHANGE : RENAME_NOREPLACE) != 0)
      raise<CheckpointError>("{}: can't rename the finished folder to '{}': {}.", kOperation, final_name_.string(),
                             std::strerror(errno));
  }

 private:
  fs::path final_name_, temporary_;
};

/// Paths of modules in the architecture: of linear layers, of those whose weight is stored as [inputs, outputs], and
/// all that have a weight.
struct Layers {
  std::set<std::string> linear, transposed, with_weight;
};

void collect(const ModuleTree& module, const std::string& path, Layers& layers) {
  if (module.class_name == "Linear" || module.class_name == "Conv1D") layers.linear.insert(path);
  if (module.class_name == "Conv1D") layers.transposed.insert(path);
  for (const auto& parameter : module.parameters)
    if (parameter.name == "weight") layers.with_weight.insert(path);
  for (const auto& child : module.children) collect(child, path.empty() ? child.name : path + "." + child.name, layers);
}

/// A checkpoint of a model with a head has the body's names behind the name of the body ("model.", "bert.").
bool has(const std::set<std::string>& paths, const std::string& module) {
  if (paths.contains(module)) return true;
  const size_t dot = module.find('.');
  return dot != std::string::npos && paths.contains(module.substr(dot + 1));
}

Layers layers_of(const std::string& config) {
  ModelDescription model;
  try {
    model = describe_architecture(config);
  } catch (const ConfigError& error) {
    raise<ConfigError>(
        "{}: {} Which of its matrices are linear layers is not known then; load_and_quantize_model() quantizes any "
        "model that you build.",
        kOperation, error.what());
  }
  Layers layers;
  collect(model.tree, "", layers);
  if (layers.linear.empty())
    raise<ConfigError>("{}: {} has no linear layers, expected some", kOperation, model.tree.class_name);
  return layers;
}

bool is_weights_file(const fs::path& file) {
  const std::string name = file.filename().string();
  for (const char* end : {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json"})
    if (name.ends_with(end)) return true;
  return false;
}

/// Tokenizers, settings of generation, read-mes: all that is neither weights nor large.
void copy_extras(const fs::path& from, const fs::path& to, std::vector<std::string>& notes, bool is_top = true) {
  for (const auto& entry : read_folder<CheckpointError>("folder", from)) {
    const fs::path& file = entry.path();
    const auto name = file.filename();
    if (name.string().starts_with(".") || (is_top && name == "config.json") || is_weights_file(file)) continue;
    std::error_code error;
    if (fs::is_directory(file, error)) {
      fs::create_directory(to / name, error);
      copy_extras(file, to / name, notes, /*is_top=*/false);
    } else if (fs::is_regular_file(file, error)) {
      if (static_cast<int64_t>(fs::file_size(file, error)) > kLargestExtra) {
        notes.push_back(fmt::format("'{}' has more than 64 MiB and was not copied.", file.string()));
        continue;
      }
      if (!fs::copy_file(file, to / name, error))
        raise<CheckpointError>("{}: can't copy '{}': {}.", kOperation, file.string(), error.message());
    }
  }
}

bool is_language_model(const std::string& class_name) {
  return class_name.ends_with("ForCausalLM") || class_name.ends_with("LMHeadModel");
}

class FolderMaker {
 public:
  FolderMaker(const fs::path& from, const fs::path& to, Encoding encoding, const QuantizeFilesOptions& options)
      : from_(from), to_(to), encoding_(encoding), options_(options), is_gguf_(!is_folder(from)) {}

  QuantizedFiles make() {
    BnbQuantizationConfig config{.load_in_8bit = encoding_ == Encoding::int8_rowwise,
                                 .load_in_4bit = encoding_ != Encoding::int8_rowwise,
                                 .bnb_4bit_use_double_quant = options_.double_quantize,
                                 .bnb_4bit_compute_dtype = options_.compute_dtype,
                                 .bnb_4bit_blocksize = options_.block_size};
    if (config.load_in_4bit) config.bnb_4bit_quant_type = options_.to;
    else config.llm_int8_threshold = options_.threshold;
    config.validate();
    const std::string text = is_gguf_ ? GgufFile(from_).config_json() : text_of_config(from_);
    const auto layers = layers_of(text);
    const auto checkpoint = bigmodel::open_checkpoint(from_);
    if (!is_gguf_) refuse_codes(from_, checkpoint.codes);
    NewFolder folder(to_);
    spill_ = folder.path() / ".codes";
    fs::create_directory(spill_);
    all_ = 2 * static_cast<int64_t>(checkpoint.tensors.size());
    std::vector<formats::TensorSource> sources;
    for (const auto& [name, stored] : checkpoint.tensors) {
      progress();
      add(name, stored, layers, sources);
    }
    formats::write_safetensors(folder.path() / "model.safetensors", std::move(sources), {{"format", "pt"}});
    fs::remove_all(spill_);
    write_config(folder.path(), text, config);
    if (is_gguf_) write_vocabulary(folder.path());
    else copy_extras(from_, folder.path(), result_.notes);
    folder.finish();
    return std::move(result_);
  }

 private:
  void progress() {
    if (options_.on_progress) options_.on_progress(done_, all_);
    ++done_;
  }

  /// Why a tensor stays, or nothing.
  std::string kept(const std::string& name, const checkpointing::StoredTensor& stored, const Layers& layers) {
    if (!name.ends_with(".weight") || stored.sizes.size() != 2 || !c10::isFloatingType(stored.dtype))
      return "not a matrix of a layer";
    const std::string module = name.substr(0, name.size() - std::strlen(".weight"));
    if (has(layers.linear, module)) {
      if (!is_among(module, options_.skip_modules)) return "";
      skipped_.push_back(module);
      return "to be left alone";
    }
    if (has(layers.with_weight, module)) return "not of a linear layer";
    skipped_.push_back(module);
    return "of the model's head";
  }

  void add(const std::string& name, const checkpointing::StoredTensor& stored, const Layers& layers,
           std::vector<formats::TensorSource>& sources) {
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
      if (codes::encoding_named(info.encoding)) dtype = options_.compute_dtype;
    }
    if (made.kept.empty()) {
      encode(made, stored, has(layers.transposed, name.substr(0, name.rfind('.'))), sources);
    } else {
      made.to = dtype_name(dtype);
      made.bytes_after = elements * static_cast<int64_t>(c10::elementSize(dtype));
      sources.push_back({name, dtype, stored.sizes, [this, read = stored.read_whole, dtype] {
                           progress();
                           return read().to(dtype);
                         }});
    }
    result_.bytes_before += made.bytes_before;
    result_.bytes_after += made.bytes_after;
    result_.tensors.push_back(std::move(made));
  }

  /// @param transposed  the codes are those of [outputs, inputs], as transformers has them for such layers, too
  void encode(QuantizedTensor& made, const checkpointing::StoredTensor& stored, bool transposed,
              std::vector<formats::TensorSource>& sources) {
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
    const auto codes = encode_named(made.name, values,
                                    {.encoding = encoding_,
                                     .block_size = options_.block_size,
                                     .double_quantize = options_.double_quantize && !int8});
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
      sources.push_back({name, part.scalar_type(), part.sizes().vec(), [this, file, name = name, first] {
                           if (first) progress();
                           return SafetensorsFile(file).tensor(name);
                         }});
      first = false;
    }
  }

  void write_config(const fs::path& folder, const std::string& text, BnbQuantizationConfig& config) {
    auto json = parse_json<nlohmann::ordered_json>(text);
    // A head that shares the embedding's weight is in no file.
    if (const auto names = json.find("architectures"); names != json.end() && names->is_array())
      for (const auto& name : *names)
        if (name.is_string() && is_language_model(name.get<std::string>()) &&
            std::ranges::find(skipped_, "lm_head") == skipped_.end())
          skipped_.emplace_back("lm_head");
    config.skip_modules = skipped_;
    json["quantization_config"] = parse_json<nlohmann::ordered_json>(config.to_json());
    write_file(folder / "config.json", json.dump(2) + "\n");
  }

  void write_vocabulary(const fs::path& folder) {
    const auto files = formats::tokenizer_files(gguf().metadata(), from_.string());
    for (const auto& [name, text] : files) write_file(folder / name, text);
    if (files.empty())
      result_.notes.push_back(
          "The file's vocabulary is not written, because it is not byte-level BPE of a known form: copy tokenizer.json "
          "and what belongs to it from the model's own folder.");
  }

  static void write_file(const fs::path& path, const std::string& text) {
    AtomicFile file(kOperation, path);
    file.write(text);
    file.finish();
  }

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
  QuantizedFiles result_;
  int64_t done_ = 0, all_ = 0;
};

}  // namespace

QuantizedFiles make_folder(const fs::path& from, const fs::path& to, Encoding encoding,
                           const QuantizeFilesOptions& options) {
  return FolderMaker(from, to, encoding, options).make();
}

}  // namespace accelerate::quantizing_files
