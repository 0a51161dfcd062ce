#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/bigmodel/quantize_files.hpp"
#include "accelerate/codes/codes.hpp"
#include "utils/raise.hpp"

/// What quantize_files() is made of: a file for each kind of result.
namespace accelerate::quantizing_files {

inline constexpr const char* kOperation = "quantize_files";
inline constexpr int64_t kPart = 1 << 20;  ///< elements that are looked at together

/// A Hugging Face folder with codes of bitsandbytes' encodings. @param from  a folder or a .gguf file
QuantizedFiles make_folder(const std::filesystem::path& from, const std::filesystem::path& to, codes::Encoding encoding,
                           const QuantizeFilesOptions& options);
/// A .gguf file in GGUF's blocks. @param from  a folder or a .gguf file
QuantizedFiles make_gguf(const std::filesystem::path& from, const std::filesystem::path& to, codes::Encoding encoding,
                         const QuantizeFilesOptions& options);

/// config.json of a folder. @throws CheckpointError if there is none
std::string text_of_config(const std::filesystem::path& folder);
/// "float32"
std::string dtype_name(at::ScalarType dtype);
/// `path` is one of `modules`, or in one of them: by its own name, its path, or the path of a module above it.
bool is_among(const std::string& path, const std::vector<std::string>& modules);
/// @throws CheckpointError for a folder with weights in few bits. @param codes  those of bigmodel::Checkpoint
template <class Codes> void refuse_codes(const std::filesystem::path& folder, const Codes& codes) {
  if (!codes.empty())
    raise<CheckpointError>(
        "{}: '{}' has weights in few bits already, such as '{}'. Start from the model they were made of: errors add "
        "up.",
        kOperation, folder.string(), codes.begin()->first);
}
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
    const double norm = at::linalg_vector_norm(values, 2, std::nullopt, false, at::kDouble).item<double>();
    return norm * norm;
  }
  double difference_ = 0, original_ = 0;
};

}  // namespace accelerate::quantizing_files
