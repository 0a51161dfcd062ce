#include "accelerate/bigmodel/quantize_files.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/codes/codes.hpp"
#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/loading_plan.hpp"
#include "codes/bitsandbytes.hpp"
#include "codes/encodings.hpp"
#include "formats/gguf_header.hpp"
#include "formats/gguf_writer.hpp"
#include "formats/mapped_file.hpp"
#include "formats/tensor_source.hpp"
#include "formats/torch_dtypes.hpp"
#include "utils/atomic_file.hpp"
#include "utils/json.hpp"
#include "utils/raise.hpp"
#include "utils/read_file.hpp"

namespace accelerate {
namespace quantizing_files {
namespace {

namespace fs = std::filesystem;
using codes::Encoding;

constexpr const char* kOperation = "quantize_files";
constexpr int64_t kPart = 1 << 20;  ///< elements that are looked at together
constexpr int64_t kLargestExtra = int64_t{64} << 20;

std::string dtype_name(at::ScalarType dtype) {
  const auto* known = formats::find_torch_dtype(dtype);
  return known ? std::string(known->name.substr(known->name.find('.') + 1)) : c10::toString(dtype);
}

/// Sums of squares, part by part.
class RelativeError {
 public:
  void add(const at::Tensor& decoded, const at::Tensor& original) {
    difference_ += square(decoded - original);
    original_ += square(original);
  }
  double value() const { return original_ == 0 ? 0 : std::sqrt(difference_ / original_); }

 private:
  static double square(const at::Tensor& values) {
    const double norm = at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble).item<double>();
    return norm * norm;
  }
  double difference_ = 0, original_ = 0;
};

codes::Codes encode_named(const std::string& name, const at::Tensor& values, const codes::EncodeOptions& how) {
  try {
    return codes::encode(values, how);
  } catch (const ConfigError& error) {
    raise<ConfigError>("{}: '{}': {}", kOperation, name, error.what());
  } catch (const ShapeError& error) {
    raise<ShapeError>("{}: '{}': {}", kOperation, name, error.what());
  }
}

/// What the result will have for a name.
std::optional<Encoding> encoding_of(const std::string& to) {
  if (to == "int8") return Encoding::int8_rowwise;
  const auto encoding = codes::encoding_named(to);
  if (!encoding || *encoding == Encoding::int8_rowwise || *encoding == Encoding::q2_k || *encoding == Encoding::q3_k)
    return std::nullopt;
  return encoding;
}

/// `name` is one of `modules`, or in one of them: by its own name, its path, or the path of a module above it.
bool is_among(const std::string& path, const std::vector<std::string>& modules) {
  const std::string own = path.substr(path.rfind('.') + 1);
  return std::ranges::any_of(
      modules, [&](const std::string& key) { return own == key || path == key || path.starts_with(key + "."); });
}

// ---- where the result goes
// --------------------------------------------------------------------------------------------------------------------

std::string text_of_config(const fs::path& folder) {
  return read_text<CheckpointError>(kOperation, folder / "config.json", kMostSettingsBytes,
                                    "A Hugging Face folder has one, which says of which layers the model is.");
}

bool is_quantized_folder(const fs::path& folder) {
  std::string text;
  return read_file(folder / "config.json", kMostSettingsBytes, text).empty() &&
         text.find("\"quantization_config\"") != std::string::npos;
}

void check_place(const fs::path& from, const fs::path& to, bool folder, bool overwrite) {
  if (!is_there(to)) return;
  std::error_code ignored;
  if (fs::equivalent(from, to, ignored))
    raise<ConfigError>("{}: found '{}' as what is read and what is written, expected two places", kOperation,
                       to.string());
  if (!overwrite)
    raise<ConfigError>("{}: '{}' exists. Choose another place, or allow to overwrite it (--overwrite)", kOperation,
                       to.string());
  if (is_folder(to) != folder || (folder && !is_quantized_folder(to)))
    raise<ConfigError>(
        "{}: '{}' is {}, expected {}: nothing else is overwritten. Remove it yourself, or choose another "
        "place",
        kOperation, to.string(), is_folder(to) ? "a folder without a quantization_config" : "a file",
        folder ? "the folder of a quantized model" : "a file");
}

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

// ---- Hugging Face folders
// --------------------------------------------------------------------------------------------------------------------

/// Paths of modules in the architecture: of linear layers, and all that have a weight.
struct Layers {
  std::set<std::string> linear, with_weight;
};

void collect(const ModuleTree& module, const std::string& path, Layers& layers) {
  if (module.class_name == "Linear") layers.linear.insert(path);
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
    raise<ConfigError>(
        "{}: {} has no linear layers whose weights are stored as torch.nn.Linear's (GPT-2's are transposed), expected "
        "some",
        kOperation, model.tree.class_name);
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
    if (!is_gguf_ && !checkpoint.codes.empty())
      raise<CheckpointError>(
          "{}: '{}' has weights in few bits already, such as '{}'. Start from the model they were made of: errors add "
          "up.",
          kOperation, from_.string(), checkpoint.codes.begin()->first);
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
    if (is_gguf_)
      result_.notes.push_back(
          "A .gguf file's vocabulary is not written: copy tokenizer.json and what belongs to it from the model's own "
          "folder.");
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
      encode(made, stored, sources);
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

  void encode(QuantizedTensor& made, const checkpointing::StoredTensor& stored,
              std::vector<formats::TensorSource>& sources) {
    const bool int8 = encoding_ == Encoding::int8_rowwise;
    const at::Tensor original = stored.read_whole();
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
        if (name.is_string() && name.get<std::string>().ends_with("ForCausalLM") &&
            std::ranges::find(skipped_, "lm_head") == skipped_.end())
          skipped_.emplace_back("lm_head");
    config.skip_modules = skipped_;
    json["quantization_config"] = parse_json<nlohmann::ordered_json>(config.to_json());
    AtomicFile file(kOperation, folder / "config.json");
    file.write(json.dump(2) + "\n");
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

// ---- GGUF files
// --------------------------------------------------------------------------------------------------------------------

/// general.file_type: which encoding most tensors have, by llama.cpp's numbers.
uint32_t file_type(Encoding encoding) {
  switch (encoding) {
    case Encoding::q4_0:
      return 2;
    case Encoding::q4_1:
      return 3;
    case Encoding::q8_0:
      return 7;
    case Encoding::q5_0:
      return 8;
    case Encoding::q5_1:
      return 9;
    case Encoding::q4_k:
      return 14;  // "small": all matrices alike
    case Encoding::q5_k:
      return 16;
    case Encoding::q6_k:
      return 18;
    default:
      raise<InternalError>("{}: there is no file_type of {}", kOperation, codes::name(encoding));
  }
}

/// What llama.cpp adds to or compares with numbers, and never multiplies by.
constexpr const char* kNumbers[] = {"ffn_gate_inp.weight", "position_embd.weight", "token_types.weight"};

std::string why_kept(const formats::GgufTensor& tensor, const formats::GgufEncoding& encoding,
                     const std::vector<std::string>& skip) {
  if (tensor.shape.size() < 2 || tensor.bytes == 0) return "not a matrix";
  if (is_among(tensor.name, skip)) return "to be left alone";
  if (!tensor.name.ends_with("weight")) return "not a weight";
  for (const char* end : kNumbers)
    if (tensor.name.ends_with(end)) return "read as numbers";
  if (tensor.row() % encoding.block != 0)
    return fmt::format("rows of {} are no whole blocks of {}", tensor.row(), encoding.block);
  if (!tensor.encoding->decode) return fmt::format("{} can't be decoded", tensor.encoding->name);
  if (tensor.encoding->id == encoding.id) return "in this encoding already";
  return "";
}

QuantizedFiles make_gguf(const fs::path& from, const fs::path& to, Encoding encoding,
                         const QuantizeFilesOptions& options) {
  const formats::MappedFile map(from);
  const auto header = formats::parse_gguf_header({map.data(), static_cast<size_t>(map.size())}, from.string());
  check_gguf_data(header, map.size(), from.string());
  const auto& block = codes::gguf_encoding(encoding);
  formats::GgufOutline outline{.alignment = header.alignment};
  for (const auto& entry : header.entries)
    if (entry.key != "general.file_type" && entry.key != "general.quantization_version")
      outline.entries.emplace_back(map.data() + entry.begin, static_cast<size_t>(entry.bytes));
  outline.entries.push_back(formats::gguf_entry("general.file_type", file_type(encoding)));
  outline.entries.push_back(formats::gguf_entry("general.quantization_version", 2));
  QuantizedFiles result;
  for (const auto& tensor : header.tensors) {
    const std::string kept = why_kept(tensor, block, options.skip_modules);
    outline.tensors.push_back({tensor.name, tensor.shape, kept.empty() ? &block : tensor.encoding});
    result.tensors.push_back({.name = tensor.name,
                              .from = tensor.encoding->name,
                              .to = outline.tensors.back().encoding->name,
                              .kept = kept,
                              .bytes_before = tensor.bytes,
                              .bytes_after = outline.tensors.back().bytes(),
                              .error = {}});
    result.bytes_before += tensor.bytes;
    result.bytes_after += result.tensors.back().bytes_after;
  }
  formats::GgufWriter writer(kOperation, to, outline);
  for (size_t i = 0; i < header.tensors.size(); ++i) {
    const auto& tensor = header.tensors[i];
    if (options.on_progress) options.on_progress(static_cast<int64_t>(i), static_cast<int64_t>(header.tensors.size()));
    const char* bytes = map.data() + tensor.begin;
    if (!result.tensors[i].kept.empty()) {
      writer.write({bytes, static_cast<size_t>(tensor.bytes)});
      continue;
    }
    RelativeError error;
    const int64_t row = tensor.row(), rows = tensor.bytes / tensor.row_bytes(),
                  step = std::max<int64_t>(kPart / row, 1);
    for (int64_t first = 0; first < rows; first += step) {
      const int64_t count = std::min(step, rows - first);
      const auto values = at::empty({count, row}, at::TensorOptions().dtype(at::kFloat));
      tensor.encoding->decode(reinterpret_cast<const unsigned char*>(bytes + first * tensor.row_bytes()),
                              count * row / tensor.encoding->block, values.mutable_data_ptr<float>());
      const auto codes = encode_named(tensor.name, values, {.encoding = encoding});
      writer.write({static_cast<const char*>(codes.data.const_data_ptr()), static_cast<size_t>(codes.data.nbytes())});
      if (options.measure_errors) error.add(codes::decode(codes), values);
    }
    if (options.measure_errors) result.tensors[i].error = error.value();
  }
  writer.finish();
  return result;
}

}  // namespace
}  // namespace quantizing_files

QuantizedFiles quantize_files(const std::filesystem::path& from, const std::filesystem::path& to,
                              const QuantizeFilesOptions& options) {
  using namespace quantizing_files;
  const c10::NoGradGuard no_gradients;
  const auto encoding = encoding_of(options.to);
  if (!encoding)
    raise<ConfigError>(
        "{}: found the encoding '{}', expected nf4, fp4 or int8 (a Hugging Face folder), or q4_0, q4_1, q5_0, q5_1, "
        "q8_0, q4_k, q5_k or q6_k (a .gguf file)",
        kOperation, options.to);
  if (!is_there(from))
    raise<CheckpointError>(
        "{}: '{}' does not exist, expected a folder with a model or a .gguf file. Nothing is "
        "downloaded: fetch the model first.",
        kOperation, from.string());
  const bool blocks = codes::is_gguf(*encoding), is_gguf_file = !is_folder(from) && from.extension() == ".gguf";
  if (!is_folder(from) && !is_gguf_file)
    raise<ConfigError>("{}: '{}' is a file of another kind, expected a folder with a model or a .gguf file", kOperation,
                       from.string());
  if (blocks && !is_gguf_file)
    raise<ConfigError>(
        "{}: '{}' is a folder, and '{}' is an encoding of .gguf files, which are made from .gguf files only: the "
        "vocabulary of a folder is not converted. Convert it to a .gguf file of F32 or F16 with llama.cpp's "
        "convert_hf_to_gguf.py first, or choose nf4, fp4 or int8",
        kOperation, from.string(), options.to);
  if (blocks && to.extension() != ".gguf")
    raise<ConfigError>("{}: '{}' will be a file, expected a name that ends in .gguf", kOperation, to.string());
  if (!blocks && to.extension() == ".gguf")
    raise<ConfigError>("{}: '{}' will be a folder, expected a name that does not end in .gguf", kOperation,
                       to.string());
  check_place(from, to, !blocks, options.overwrite);
  return blocks ? make_gguf(from, to, *encoding, options) : FolderMaker(from, to, *encoding, options).make();
}

}  // namespace accelerate
