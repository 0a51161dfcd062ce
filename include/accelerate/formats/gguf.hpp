#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace at {
class Tensor;
}

/// Reading of GGUF files, the format of llama.cpp. The format is described in docs/formats/gguf.md.
///
/// A file that breaks a rule of the format is refused as a whole with a CheckpointError that names the file, the rule
/// and the numbers; nothing is half loaded. This header includes nothing of LibTorch, so that metadata can be read
/// without it.
namespace accelerate {

/// One value of the metadata. Integers of all widths are int64 (a u64 keeps its bits), f32 and f64 are double, an array
/// of booleans is one of integers.
struct GgufValue {
  std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>,
               std::vector<GgufValue>>
      content;
};

class GgufMetadata : public std::map<std::string, GgufValue> {
 public:
  /// Null where the key is missing or of another kind.
  template <class T> const T* find_as(const std::string& key) const {
    const auto found = find(key);
    return found == end() ? nullptr : std::get_if<T>(&found->second.content);
  }
  std::optional<int64_t> integer(const std::string& key) const {
    const auto* value = find_as<int64_t>(key);
    return value ? std::optional(*value) : std::nullopt;
  }
  std::optional<double> number(const std::string& key) const {
    if (const auto* value = find_as<double>(key)) return *value;
    const auto whole = integer(key);
    return whole ? std::optional(static_cast<double>(*whole)) : std::nullopt;
  }
};

/// A tensor as it appears outside of the file.
struct GgufTensorInfo {
  std::string encoding;        ///< The format's name of how elements are stored, e.g. "F32" or "Q4_1".
  std::vector<int64_t> shape;  ///< PyTorch's order of dimensions.
  int64_t stored_bytes = 0;    ///< Its size in the file.
  bool transposed = false;     ///< Rows of the file are columns of this matrix.
};

/// A GGUF file opened for reading, with Hugging Face's names and layouts of tensors.
///
/// For the architectures llama (LLaMA, Mistral, Mixtral, SmolLM), qwen2 and gpt2 names are those of Hugging Face's
/// checkpoints, and what llama.cpp's converter changed is undone: the order of rows in rotary projections, transposed
/// weights, experts joined to one tensor. Files of other architectures show their tensors as they are. Opening reads
/// the header only; data is mapped and decoded when it is asked for. Copies of this object share one mapping. Safe to
/// use from several threads. While it is mapped the file must not be shortened by others: the system answers an access
/// behind the new end with SIGBUS.
class ACCELERATE_API GgufFile {
 public:
  /// @throws CheckpointError if the file can't be opened or breaks a rule of the format.
  explicit GgufFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  const GgufMetadata& metadata() const;
  /// In the order of the file.
  const std::vector<std::string>& names() const;
  bool contains(const std::string& name) const;
  /// @throws CheckpointError if there is no such tensor.
  const GgufTensorInfo& info(const std::string& name) const;
  /// The text of a Hugging Face config.json for the model. @throws CheckpointError if the architecture is not one of
  /// those above, or the metadata lacks a field.
  std::string config_json() const;

  /// Decodes a part of a tensor into memory of the caller.
  ///
  /// Rows are what the tensor has along its last dimension, seen as a matrix [numel / last, last]; a vector is one row.
  /// Encodings: F64, F32, F16, BF16, I8, I16, I32, I64, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, to
  /// the bit as the Python package `gguf` decodes them.
  /// @param rows  contiguous, on the CPU, fp32, fp16, bf16 or fp64, of any shape with a whole number of rows; it is
  /// filled from row `first_row` on.
  /// @throws CheckpointError if there is no such tensor or its encoding is another one; ShapeError if `rows` does not
  /// fit.
  void read(const std::string& name, const at::Tensor& rows, int64_t first_row = 0) const;

  /// The stored bytes of a tensor, for who computes on codes: uint8 [rows, bytes of a row], rows as read() has them.
  /// Of a transposed tensor they are its columns. Where rows are in the file's order it points into the mapping and
  /// keeps it alive; else it is a copy.
  /// @return  undefined for a tensor whose rows are no whole blocks. @throws CheckpointError if there is no such tensor
  at::Tensor stored_rows(const std::string& name) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace accelerate
