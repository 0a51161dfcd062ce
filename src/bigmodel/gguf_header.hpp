#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::bigmodel {

/// Names and shapes (PyTorch's order of dimensions) of the tensors of a GGUF file, versions 2 and 3, little-endian. Metadata is stepped over and no weight is read.
/// Source: ggml's docs/gguf.md. @throws CheckpointError for a damaged file.
std::vector<std::pair<std::string, std::vector<int64_t>>> read_gguf_header(const std::filesystem::path& path);

}  // namespace accelerate::bigmodel
