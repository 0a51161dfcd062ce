#include "accelerate/bigmodel/quantize_files.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <c10/core/GradMode.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <tuple>

#include "accelerate/formats/gguf.hpp"
#include "bigmodel/quantize_parts.hpp"
#include "codes/encodings.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace quantizing_files {

namespace fs = std::filesystem;
using codes::Encoding;

ModelConfig config_of(const fs::path& from) {
  ModelConfig config{.source = from.string(), .text = {}, .json = {}};
  if (is_folder(from)) {
    config.source = (from / "config.json").string();
    config.text = read_text<CheckpointError>(kOperation, config.source, kMostSettingsBytes,
                                             "A Hugging Face folder has one, which says of which layers the model is.");
  } else {
    config.text = GgufFile(from).config_json();
  }
  std::string problem;
  config.json = parse_json<nlohmann::json>(config.text, &problem);
  if (!config.json.is_object())
    raise<CheckpointError>("{}: '{}' {}", kOperation, config.source, problem.empty() ? "is no JSON object" : problem);
  return config;
}

std::string dtype_name(at::ScalarType dtype) {
  const auto* known = formats::find_torch_dtype(dtype);
  return known ? std::string(known->name.substr(known->name.find('.') + 1)) : c10::toString(dtype);
}

at::Tensor in_dtype(const std::string& name, const at::Tensor& values, at::ScalarType dtype) {
  if (values.scalar_type() == dtype) return values;
  at::Tensor made = values.to(dtype);
  // fp16 ends at 65,504.
  if (dtype == at::kHalf && (at::isinf(made) & at::isfinite(values)).any().item<bool>())
    raise<CheckpointError>(
        "'{}' has numbers beyond fp16, which ends at 65504, expected numbers that fit. Choose bfloat16 or float32.",
        name);
  return made;
}

bool is_among(const std::string& path, const std::vector<std::string>& modules) {
  const std::string own = path.substr(path.rfind('.') + 1);
  return std::ranges::any_of(
      modules, [&](const std::string& key) { return own == key || path == key || path.starts_with(key + "."); });
}

std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

void check_skipped(const std::vector<std::string>& modules, const std::set<std::string>& paths) {
  for (const auto& module : modules)
    if (std::ranges::none_of(paths, [&](const std::string& path) { return is_among(path, {module}); }))
      raise<ConfigError>(
          "{}: skip_modules has '{}', which names nothing in the model, expected names such as '{}'. Give several "
          "names one by one, separated by spaces",
          kOperation, module, paths.empty() ? "k_proj" : *paths.begin());
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

/// The encoding that the result will have for a name.
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

/// An option without effect is a mistake: whoever gave it believes in one.
void check_options(const QuantizeFilesOptions& options, Encoding encoding, bool of_gguf) {
  const bool int8 = encoding == Encoding::int8_rowwise, four = !int8 && !codes::is_gguf(encoding);
  const std::tuple<const char*, bool, bool, const char*> all[] = {
      {"block_size", options.block_size.has_value(), four, "nf4 or fp4"},
      {"double_quantize", options.double_quantize, four, "nf4 or fp4"},
      {"compute_dtype", options.compute_dtype.has_value(), four || (int8 && of_gguf),
       "nf4 or fp4 (or int8 of a .gguf file, of which some weights stay numbers)"},
      {"threshold", options.threshold.has_value(), int8, "int8"},
      {"max_shard_size", options.max_shard_size.has_value(), four || int8, "nf4, fp4 or int8, which make a folder"}};
  for (const auto& [name, given, has_effect, expected] : all)
    if (given && !has_effect)
      raise<ConfigError>("{}: {} was given with the encoding {}, on which it has no effect, expected {}. Leave it out",
                         kOperation, name, options.to, expected);
}

/// `inner` is `outer`, or in it.
bool is_within(const fs::path& inner, const fs::path& outer) {
  std::error_code error;
  const auto within = fs::weakly_canonical(inner, error).lexically_relative(fs::weakly_canonical(outer, error));
  return !error && !within.empty() && *within.begin() != "..";
}

void check_place(const fs::path& from, const fs::path& to, bool folder, bool overwrite) {
  if (to.empty()) raise<ConfigError>("{}: found '' as what is written, expected a name", kOperation);
  if (!is_there(to)) return;
  std::error_code ignored;
  if (fs::equivalent(from, to, ignored))
    raise<ConfigError>("{}: found '{}' as what is read and what is written, expected two places", kOperation,
                       to.string());
  if (is_within(from, to))
    raise<ConfigError>(
        "{}: '{}', which is read, lies in '{}', which would be replaced as a whole, expected two places. Choose "
        "another place",
        kOperation, from.string(), to.string());
  if (!overwrite)
    raise<ConfigError>("{}: '{}' exists. Choose another place, or allow to overwrite it (--overwrite)", kOperation,
                       to.string());
  if (is_folder(to) != folder || (folder && !is_quantized_folder(to)))
    raise<ConfigError>(
        "{}: '{}' is {}, expected {}: nothing else is overwritten. Remove it yourself, or choose another place",
        kOperation, to.string(), is_folder(to) ? "a folder without a quantization_config" : "a file",
        folder ? "the folder of a quantized model" : "a file");
}

/// Removes temporary files and folders of earlier runs that were killed; these have the process in their names.
void remove_left_over(const fs::path& to) {
  const fs::path place = to.has_filename() ? to : to.parent_path();
  const std::string begin = fmt::format(".{}.tmp-", place.filename().string());
  std::error_code error, ignored;
  fs::directory_iterator next(place.has_parent_path() ? place.parent_path() : ".", error);
  for (; !error && next != fs::directory_iterator(); next.increment(error)) {
    const std::string name = next->path().filename().string();
    if (!name.starts_with(begin)) continue;
    const char* const end = name.data() + name.size();
    pid_t process = 0;
    const auto [rest, problem] = std::from_chars(name.data() + begin.size(), end, process);
    if (problem == std::errc() && process > 0 && (rest == end || *rest == '-') && ::kill(process, 0) != 0 &&
        errno == ESRCH)
      fs::remove_all(next->path(), ignored);
  }
}

QuantizedFiles run(const fs::path& from, const fs::path& to, const QuantizeFilesOptions& options, bool only_check) {
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
  check_options(options, *encoding, is_gguf_file);
  check_place(from, to, !blocks, options.overwrite);
  if (!only_check) remove_left_over(to);
  return (blocks ? make_gguf : make_folder)(from, to, *encoding, options, only_check);
}

}  // namespace
}  // namespace quantizing_files

QuantizedFiles quantize_files(const std::filesystem::path& from, const std::filesystem::path& to,
                              const QuantizeFilesOptions& options) {
  return quantizing_files::run(from, to, options, /*only_check=*/false);
}

void check_quantize_files(const std::filesystem::path& from, const std::filesystem::path& to,
                          const QuantizeFilesOptions& options) {
  quantizing_files::run(from, to, options, /*only_check=*/true);
}

}  // namespace accelerate
