#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <set>
#include <utility>

#include "bigmodel/loading_plan.hpp"
#include "bigmodel/quantize_parts.hpp"
#include "codes/encodings.hpp"
#include "formats/gguf_config.hpp"
#include "formats/gguf_header.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "formats/gguf_writer.hpp"
#include "formats/mapped_file.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::quantizing_files {
namespace {

namespace fs = std::filesystem;
using codes::Encoding;
using formats::GgufEncoding;

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

/// What a file is made for: an encoding of its matrices, or numbers as they are or in a dtype.
struct Wanted {
  std::optional<Encoding> encoding;
  std::optional<at::ScalarType> dtype = std::nullopt;
};

/// The same for a file of numbers, by what its matrices are.
uint32_t file_type_of_numbers(const std::vector<formats::GgufOutline::Tensor>& tensors) {
  constexpr uint32_t kF16 = 1, kBf16 = 30;
  std::map<uint32_t, int64_t> bytes;
  for (const auto& tensor : tensors)
    if (tensor.shape.size() > 1) bytes[tensor.encoding->id] += tensor.bytes();
  const auto most = std::ranges::max_element(bytes, {}, [](const auto& entry) { return entry.second; });
  const auto id = most == bytes.end() ? 0 : most->first;
  return id == kF16 ? 1 : id == kBf16 ? 32 : 0;
}

/// Whether llama.cpp adds the tensor to numbers or compares it with them, and never multiplies by it.
bool is_read_as_numbers(const std::string& name) {
  return std::ranges::any_of(std::array{"ffn_gate_inp.weight", "position_embd.weight", "token_types.weight"},
                             [&](const char* end) { return name.ends_with(end); });
}

/// Places in a table, for instance, which are not to be rounded.
bool is_of_whole_numbers(const GgufEncoding& encoding) {
  constexpr uint32_t kI8 = 24, kI64 = 27;  // with I16 and I32 between them
  return encoding.id >= kI8 && encoding.id <= kI64;
}

/// A tensor on its way into a file.
struct Tensor {
  std::string name;
  std::vector<int64_t> shape;  ///< PyTorch's order of dimensions
  std::string from;            ///< as in QuantizedTensor
  int64_t bytes_before = 0;
  const GgufEncoding* stays = nullptr;  ///< what it is stored in where it is not encoded
  std::string kept;                     ///< why it is not
  /// Gives all rows in their order, some at a time: fp32 [rows, row], contiguous.
  std::function<void(const std::function<void(const at::Tensor& rows)>& take)> read;
  std::function<void(formats::GgufWriter& writer)> copy;  ///< writes it as it stays

  int64_t row() const { return shape.empty() ? 1 : shape.back(); }
};

/// How many rows of so many elements are looked at together.
int64_t rows_at_once(int64_t row) { return std::max<int64_t>(kPart / std::max<int64_t>(row, 1), 1); }

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.nbytes())};
}

/// The encoding of a row of so many elements. If it is no whole number of blocks of 256, it is the one whose blocks of
/// 32 have the next more bits, as in llama.cpp.
Encoding encoding_for(Encoding wanted, int64_t row) {
  if (row % codes::gguf_encoding(wanted).block == 0) return wanted;
  if (row % codes::gguf_encoding(Encoding::q8_0).block != 0) return wanted;  // nor are these
  return wanted == Encoding::q4_k   ? Encoding::q5_0
         : wanted == Encoding::q5_k ? Encoding::q5_1
         : wanted == Encoding::q6_k ? Encoding::q8_0
                                    : wanted;
}

constexpr const char* kNoWholeBlocks = " no whole blocks of 32";

/// The reason that keeps a tensor of any file as it is, if there is one.
std::string why_kept(const Tensor& tensor, bool is_skipped) {
  if (tensor.shape.size() < 2 || tensor.bytes_before == 0) return "not a matrix";
  if (is_skipped) return "to be left alone";
  if (!tensor.name.ends_with("weight")) return "not a weight";
  if (is_read_as_numbers(tensor.name)) return "read as numbers";
  if (tensor.row() % codes::gguf_encoding(Encoding::q8_0).block != 0)
    return fmt::format("rows of {} are{}", tensor.row(), kNoWholeBlocks);
  return "";
}

/// By the name of the tensor itself, or of the module whose weight it is.
bool is_skipped(const std::string& name, const std::vector<std::string>& modules) {
  return is_among(module_of(name), modules) || std::ranges::find(modules, name) != modules.end();
}

/// @param names  besides those of the tensors: names that skip_modules may have
QuantizedFiles write(const fs::path& to, const Wanted& wanted, formats::GgufOutline outline,
                     const std::vector<Tensor>& tensors, std::set<std::string> names,
                     const QuantizeFilesOptions& options, bool only_check) {
  auto skipped = options.skip_modules;
  for (const auto& tensor : tensors) names.insert(module_of(tensor.name)), std::erase(skipped, tensor.name);
  check_skipped(skipped, names);
  if (only_check) return {};
  QuantizedFiles result;
  int64_t others = 0, narrow = 0;
  std::string name_of_others;
  for (const auto& tensor : tensors) {
    const auto* stored = tensor.stays;
    if (tensor.kept.empty()) {
      const auto own = encoding_for(*wanted.encoding, tensor.row());
      if (own != *wanted.encoding) ++others, name_of_others = codes::name(own);
      stored = &codes::gguf_encoding(own);
    }
    narrow += tensor.kept.ends_with(kNoWholeBlocks);
    outline.tensors.push_back({tensor.name, tensor.shape, stored});
    const auto& made = outline.tensors.back();
    result.tensors.push_back({.name = tensor.name,
                              .from = tensor.from,
                              .to = made.encoding->name,
                              .kept = tensor.kept,
                              .bytes_before = tensor.bytes_before,
                              .bytes_after = made.bytes(),
                              .error = {}});
    result.bytes_before += tensor.bytes_before;
    result.bytes_after += made.bytes();
  }
  std::vector<std::string> other_rows;
  if (others > 0)
    other_rows.push_back(fmt::format("{} matrices are in {}, because their rows are no whole blocks of {}", others,
                                     name_of_others, codes::gguf_encoding(*wanted.encoding).block));
  if (narrow > 0)
    other_rows.push_back(fmt::format(
        "{} matrices of {} stay as they are, because their rows are{}", narrow,
        std::ranges::count_if(tensors, [](const Tensor& tensor) { return tensor.shape.size() > 1; }), kNoWholeBlocks));
  if (!other_rows.empty()) result.notes.push_back(fmt::format("{}.", fmt::join(other_rows, "; ")));
  outline.entries.push_back(formats::gguf_entry(
      "general.file_type", wanted.encoding ? file_type(*wanted.encoding) : file_type_of_numbers(outline.tensors)));
  if (wanted.encoding) outline.entries.push_back(formats::gguf_entry("general.quantization_version", 2U));
  formats::GgufWriter writer(kOperation, to, outline);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (options.on_progress) options.on_progress(static_cast<int64_t>(i), static_cast<int64_t>(tensors.size()));
    if (!tensors[i].kept.empty()) {
      tensors[i].copy(writer);
      continue;
    }
    RelativeError error;
    tensors[i].read([&](const at::Tensor& rows) {
      const auto codes =
          encode_named(tensors[i].name, rows, {.encoding = encoding_for(*wanted.encoding, tensors[i].row())});
      writer.write(bytes_of(codes.data));
      if (options.measure_errors) error.add(codes::decode(codes), rows);
    });
    if (options.measure_errors) result.tensors[i].error = error.value();
  }
  writer.finish();
  return result;
}

// ---- of a .gguf file
// --------------------------------------------------------------------------------------------------------------------

QuantizedFiles from_gguf(const fs::path& from, const fs::path& to, Encoding encoding,
                         const QuantizeFilesOptions& options, bool only_check) {
  const formats::MappedFile map(from);
  const auto header = formats::parse_gguf_header({map.data(), static_cast<size_t>(map.size())}, from.string());
  check_gguf_data(header, map.size(), from.string());
  formats::GgufOutline outline{.alignment = header.alignment};
  for (const auto& entry : header.entries)
    if (entry.key != "general.file_type" && entry.key != "general.quantization_version")
      outline.entries.emplace_back(map.data() + entry.begin, static_cast<size_t>(entry.bytes));
  std::vector<Tensor> tensors;
  for (const auto& stored : header.tensors) {
    const std::string_view bytes(map.data() + stored.begin, static_cast<size_t>(stored.bytes));
    Tensor tensor{.name = stored.name,
                  .shape = stored.shape,
                  .from = stored.encoding->name,
                  .bytes_before = stored.bytes,
                  .stays = stored.encoding};
    const auto& block = codes::gguf_encoding(encoding_for(encoding, tensor.row()));
    tensor.kept = why_kept(tensor, is_skipped(tensor.name, options.skip_modules));
    if (tensor.kept.empty() && is_of_whole_numbers(*stored.encoding)) tensor.kept = "whole numbers";
    if (tensor.kept.empty() && !stored.encoding->decode)
      tensor.kept = fmt::format("{} can't be decoded", stored.encoding->name);
    if (tensor.kept.empty() && stored.encoding->id == block.id) tensor.kept = "in this encoding already";
    tensor.read = [&stored, bytes](const auto& take) {
      const int64_t row = stored.row(), rows = stored.bytes / stored.row_bytes(), step = rows_at_once(row);
      for (int64_t first = 0; first < rows; first += step) {
        const int64_t count = std::min(step, rows - first);
        const auto values = at::empty({count, row}, at::TensorOptions().dtype(at::kFloat));
        stored.encoding->decode(reinterpret_cast<const unsigned char*>(bytes.data() + first * stored.row_bytes()),
                                count * row / stored.encoding->block, values.mutable_data_ptr<float>());
        take(values);
      }
    };
    tensor.copy = [bytes](formats::GgufWriter& writer) { writer.write(bytes); };
    tensors.push_back(std::move(tensor));
  }
  return write(to, {.encoding = encoding}, std::move(outline), tensors, {}, options, only_check);
}

// ---- of a Hugging Face folder
// --------------------------------------------------------------------------------------------------------------------

/// Numbers as a GGUF file has them: `dtype` as it is, and fp32 what it has no other place for.
const GgufEncoding* numbers_of(at::ScalarType dtype) {
  constexpr uint32_t kF32 = 0, kF16 = 1, kBf16 = 30;
  return formats::find_gguf_encoding(dtype == at::kHalf ? kF16 : dtype == at::kBFloat16 ? kBf16 : kF32);
}
at::ScalarType dtype_of(const GgufEncoding& numbers) {
  return &numbers == numbers_of(at::kHalf)       ? at::kHalf
         : &numbers == numbers_of(at::kBFloat16) ? at::kBFloat16
                                                 : at::kFloat;
}

/// Rows in the order of the file.
at::Tensor in_order(const at::Tensor& values, const formats::GgufTarget& target) {
  if (target.transposed) return values.t();
  if (target.rotary_heads == 0) return values;
  return values.reshape({target.rotary_heads, 2, values.size(0) / target.rotary_heads / 2, -1})
      .transpose(1, 2)
      .reshape(values.sizes());
}

/// @param dtype  of matrices; unset: as they are
Tensor tensor_of(const formats::GgufTarget& target, const checkpointing::StoredTensors& stored,
                 std::optional<at::ScalarType> dtype) {
  const auto& first = stored.at(target.parts.front());
  Tensor tensor{.name = target.name, .shape = target.shape, .from = dtype_name(first.dtype)};
  for (const auto& part : target.parts) {
    int64_t elements = 1;
    for (const int64_t size : stored.at(part).sizes) elements *= size;
    tensor.bytes_before += elements * static_cast<int64_t>(c10::elementSize(stored.at(part).dtype));
  }
  // Vectors are fp32 whatever the matrices are: llama.cpp adds them and multiplies by them as such.
  const bool is_matrix = target.shape.size() > 1 && !is_read_as_numbers(target.name);
  tensor.stays = numbers_of(is_matrix ? dtype.value_or(first.dtype) : at::kFloat);
  const auto all_rows = [target, &stored](at::ScalarType dtype, const auto& take) {
    for (const auto& part : target.parts) {
      const auto values = in_order(stored.at(part).read_whole(), target);
      const int64_t row = values.dim() == 0 ? 1 : values.size(-1);
      const auto rows = values.dim() == 2 ? values : values.reshape({-1, row});
      for (int64_t begin = 0, step = rows_at_once(row); begin < rows.size(0); begin += step)
        take(in_dtype(part, rows.narrow(0, begin, std::min(step, rows.size(0) - begin)), dtype).contiguous());
    }
  };
  tensor.read = [all_rows](const auto& take) { all_rows(at::kFloat, take); };
  tensor.copy = [all_rows, dtype = dtype_of(*tensor.stays)](formats::GgufWriter& writer) {
    all_rows(dtype, [&](const at::Tensor& rows) { writer.write(bytes_of(rows)); });
  };
  return tensor;
}

Tensor rope_factors(std::vector<float> factors) {
  const auto size = static_cast<int64_t>(factors.size());
  Tensor tensor{.name = "rope_freqs.weight",
                .shape = {size},
                .from = dtype_name(at::kFloat),
                .stays = numbers_of(at::kFloat),
                .kept = "part of the configuration"};
  tensor.copy = [factors = std::move(factors)](formats::GgufWriter& writer) {
    writer.write({reinterpret_cast<const char*>(factors.data()), factors.size() * sizeof(float)});
  };
  return tensor;
}

QuantizedFiles from_folder(const fs::path& from, const fs::path& to, const Wanted& wanted,
                           const QuantizeFilesOptions& options, bool only_check) {
  const auto config = config_of(from);
  auto model = formats::gguf_model(config.json, config.source);
  auto checkpoint = bigmodel::open_checkpoint(from);
  refuse_codes(from, checkpoint.codes);
  const Outline expected(config, checkpoint);
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const auto& [name, stored] : checkpoint.tensors) shapes.emplace(name, stored.sizes);
  const auto targets = formats::gguf_tensors(model.form, shapes, from.string());

  formats::GgufOutline outline;
  const auto name = (from.has_filename() ? from : from.parent_path()).filename().string();
  for (const auto& [key, value] :
       {std::pair("architecture", model.form.architecture), {"type", "model"}, {"name", name}})
    outline.entries.push_back(formats::gguf_entry(std::string("general.") + key, value));
  std::ranges::move(model.entries, std::back_inserter(outline.entries));
  std::ranges::move(formats::gguf_vocabulary(from, config.json, model.vocabulary, model.notes),
                    std::back_inserter(outline.entries));

  std::vector<Tensor> tensors;
  std::set<std::string> modules;
  for (const auto& target : targets) {
    auto tensor = tensor_of(target, checkpoint.tensors, wanted.dtype);
    for (const auto& part : target.parts) modules.insert(module_of(part));
    const auto skipped = [&](const std::string& one) { return is_among(module_of(one), options.skip_modules); };
    tensor.kept = !wanted.encoding ? "to stay numbers"
                                   : why_kept(tensor, is_skipped(tensor.name, options.skip_modules) ||
                                                          std::ranges::any_of(target.parts, skipped));
    tensors.push_back(std::move(tensor));
    if (target.name == "token_embd.weight" && target.shape.front() != model.vocabulary)
      raise<CheckpointError>("'{}': the embeddings have {} rows, and config.json says vocab_size {}", from.string(),
                             target.shape.front(), model.vocabulary);
  }
  if (!model.rope_factors.empty()) tensors.push_back(rope_factors(std::move(model.rope_factors)));
  expected.check(from, checkpoint.tensors, model.notes);
  if (!expected.head.empty()) modules.insert(expected.head);
  auto result = write(to, wanted, std::move(outline), tensors, std::move(modules), options, only_check);
  std::ranges::move(model.notes, std::back_inserter(result.notes));
  return result;
}

}  // namespace

QuantizedFiles make_gguf(const fs::path& from, const fs::path& to, Encoding encoding,
                         const QuantizeFilesOptions& options, bool only_check) {
  if (is_folder(from)) return from_folder(from, to, {.encoding = encoding}, options, only_check);
  return from_gguf(from, to, encoding, options, only_check);
}

QuantizedFiles make_gguf_of_numbers(const fs::path& from, const fs::path& to, std::optional<at::ScalarType> dtype,
                                    const QuantizeFilesOptions& options) {
  return from_folder(from, to, {.encoding = std::nullopt, .dtype = dtype}, options, /*only_check=*/false);
}

}  // namespace accelerate::quantizing_files
