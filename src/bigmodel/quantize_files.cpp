#include "accelerate/bigmodel/quantize_files.hpp"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "bigmodel/quantize_parts.hpp"
#include "codes/encodings.hpp"
#include "formats/torch_dtypes.hpp"
#include "utils/raise.hpp"
#include "utils/read_file.hpp"

namespace accelerate {
namespace quantizing_files {

namespace fs = std::filesystem;
using codes::Encoding;

std::string text_of_config(const fs::path& folder) {
  return read_text<CheckpointError>(kOperation, folder / "config.json", kMostSettingsBytes,
                                    "A Hugging Face folder has one, which says of which layers the model is.");
}

std::string dtype_name(at::ScalarType dtype) {
  const auto* known = formats::find_torch_dtype(dtype);
  return known ? std::string(known->name.substr(known->name.find('.') + 1)) : c10::toString(dtype);
}

bool is_among(const std::string& path, const std::vector<std::string>& modules) {
  const std::string own = path.substr(path.rfind('.') + 1);
  return std::ranges::any_of(
      modules, [&](const std::string& key) { return own == key || path == key || path.starts_with(key + "."); });
}

codes::Codes encode_named(const std::string& name, const at::Tensor& values, const codes::EncodeOptions& how) {
  try {
    return codes::encode(values, how);
  } catch (const ConfigError& error) {
    raise<ConfigError>("{}: '{}': {}", kOperation, name, error.what());
  } catch (const ShapeError& error) {
    raise<ShapeError>("{}: '{}': {}", kOperation, name, error.what());
  }
}

namespace {

/// What the result will have for a name.
std::optional<Encoding> encoding_of(const std::string& to) {
  if (to == "int8") return Encoding::int8_rowwise;
  const auto encoding = codes::encoding_named(to);
  if (!encoding || *encoding == Encoding::int8_rowwise || *encoding == Encoding::q2_k || *encoding == Encoding::q3_k)
    return std::nullopt;
  return encoding;
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
  if (blocks && to.extension() != ".gguf")
    raise<ConfigError>("{}: '{}' will be a file, expected a name that ends in .gguf", kOperation, to.string());
  if (!blocks && to.extension() == ".gguf")
    raise<ConfigError>("{}: '{}' will be a folder, expected a name that does not end in .gguf", kOperation,
                       to.string());
  check_place(from, to, !blocks, options.overwrite);
  return blocks ? make_gguf(from, to, *encoding, options) : make_folder(from, to, *encoding, options);
}

}  // namespace accelerate
