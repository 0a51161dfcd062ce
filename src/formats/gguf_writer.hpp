#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "formats/gguf_encodings.hpp"
#include "utils/atomic_file.hpp"

namespace accelerate::formats {

using GgufEntryValue = std::variant<uint32_t, float, bool, std::string, std::vector<int32_t>, std::vector<std::string>>;

/// A key of the metadata with its value, as a GGUF file has it.
std::string gguf_entry(std::string_view key, const GgufEntryValue& value);

/// The contents that a file will have.
struct GgufOutline {
  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;  ///< PyTorch's order; rows are whole blocks of the encoding
    const GgufEncoding* encoding = nullptr;
    int64_t bytes() const;
  };
  std::vector<std::string> entries;  ///< of gguf_entry(), or as another file has them; all keys differ
  std::vector<Tensor> tensors;
  int64_t alignment = 32;  ///< as the entry general.alignment says, if there is one
};

/// A GGUF file (version 3) that is written from its beginning to its end, and appears when it is finished.
///
/// The sizes of all tensors are known from the outline; their bytes come in its order, in pieces of any size, so that
/// nothing has to be in memory as a whole.
class GgufWriter {
 public:
  /// Writes the header. @throws CheckpointError, ResourceError as AtomicFile, beginning with `operation`
  GgufWriter(std::string operation, const std::filesystem::path& path, const GgufOutline& outline);
  /// The next bytes of the tensor whose turn it is; never beyond its end.
  void write(std::string_view bytes);
  /// @throws InternalError if bytes are missing
  void finish();

 private:
  AtomicFile file_;
  int64_t alignment_;
  std::vector<int64_t> bytes_;  ///< of the tensors that have some
  size_t tensor_ = 0;
  int64_t written_ = 0;  ///< of that tensor
};

}  // namespace accelerate::formats
