#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/bigmodel/sizes.hpp"
#include "accelerate/codes/codes.hpp"
#include "bigmodel/loading_plan.hpp"
#include "utils/raise.hpp"

/// The parts of quantize_files(): a file for each kind of result.
namespace accelerate::quantizing_files {

inline constexpr const char* kOperation = "quantize_files";
inline constexpr int64_t kPart = 1 << 20;  ///< elements that are looked at together

/// A Hugging Face folder with codes of bitsandbytes' encodings. @param from  a folder or a .gguf file
/// @param only_check  nothing is written
QuantizedFiles make_folder(const std::filesystem::path& from, const std::filesystem::path& to, codes::Encoding encoding,
                           const QuantizeFilesOptions& options, bool only_check);
/// A .gguf file in GGUF's blocks. @param from  a folder or a .gguf file @param only_check  nothing is written
QuantizedFiles make_gguf(const std::filesystem::path& from, const std::filesystem::path& to, codes::Encoding encoding,
                         const QuantizeFilesOptions& options, bool only_check);

/// A .gguf file of a folder, all of it numbers. @param dtype  of matrices; unset: as they are
QuantizedFiles make_gguf_of_numbers(const std::filesystem::path& from, const std::filesystem::path& to,
                                    std::optional<at::ScalarType> dtype, const QuantizeFilesOptions& options);

/// A config.json: that of a folder, or what the metadata of a .gguf file amount to.
struct ModelConfig {
  std::string source;  ///< the file, for messages
  std::string text;
  nlohmann::json json;
};
/// @throws CheckpointError if there is none
ModelConfig config_of(const std::filesystem::path& from);

/// The model that a config.json describes, with the names that a checkpoint has for it.
class Outline {
 public:
  /// @param checkpoint  gets the names that models of today have for what it holds
  /// @throws ConfigError for an architecture that is not known; CheckpointError for fields that can't be
  Outline(const ModelConfig& config, bigmodel::OpenCheckpoint& checkpoint);

  /// Names and shapes are those of the model; a head that is a copy of the embeddings it is tied to is left out.
  /// @throws CheckpointError with all differences
  void check(const std::filesystem::path& from, checkpointing::StoredTensors& tensors,
             std::vector<std::string>& notes) const;

  /// Paths of modules: of linear layers, of those whose weight is stored as [inputs, outputs], and of all that have a
  /// weight.
  std::set<std::string> linear, transposed, with_weight;
  std::string head;                               ///< of a language model; empty: of another one
  std::vector<std::string> keep_in_fp32_modules;  ///< as ModelDescription's

 private:
  struct Expected {
    TensorSpec spec;
    bool required = true;
  };
  std::string body_of(const ModuleTree& tree, const checkpointing::StoredTensors& tensors);
  void collect(const ModuleTree& module, std::string path);
  void add(const std::string& name, TensorSpec spec, bool required);
  bool is_of_a_head(const std::string& name) const;
  void leave_copy_out(const std::filesystem::path& from, checkpointing::StoredTensors& tensors,
                      std::vector<std::string>& notes) const;

  std::map<std::string, Expected> tensors_;
  std::set<std::string> parts_;  ///< of the body: what its names begin with, up to a dot
  std::string words_;            ///< the embeddings' weight
  bool is_tied_ = false, joins_experts_ = false, has_other_names_ = false;
};

/// "float32"
std::string dtype_name(at::ScalarType dtype);
/// `path` is one of `modules`, or in one of them: by its own name, its path, or the path of a module above it.
bool is_among(const std::string& path, const std::vector<std::string>& modules);
/// "model.norm" of "model.norm.weight"
std::string module_of(const std::string& tensor);
/// @throws ConfigError for one of `modules` that none of `paths` is among
void check_skipped(const std::vector<std::string>& modules, const std::set<std::string>& paths);
/// @throws CheckpointError for a folder with weights in few bits. @param codes  those of bigmodel::Checkpoint
template <class Codes> void refuse_codes(const std::filesystem::path& folder, const Codes& codes) {
  if (!codes.empty())
    raise<CheckpointError>(
        "{}: '{}' has weights in few bits already, such as '{}'. Start from the model they were made of: errors add "
        "up.",
        kOperation, folder.string(), codes.begin()->first);
}
/// @throws CheckpointError for numbers that fp16 does not have
at::Tensor in_dtype(const std::string& name, const at::Tensor& values, at::ScalarType dtype);
/// codes::encode() whose errors name the tensor.
codes::Codes encode_named(const std::string& name, const at::Tensor& values, const codes::EncodeOptions& how);

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
    const auto norm = at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble).item<double>();
    return norm * norm;
  }
  double difference_ = 0, original_ = 0;
};

}  // namespace accelerate::quantizing_files
