#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace accelerate::formats {

/// A tensor that is to be written, read only when its turn comes: a file can hold more than memory does.
struct TensorSource {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::function<at::Tensor()> read;  ///< called once; any device, [sizes] of dtype
};

/// As save_safetensors, tensor by tensor. The order of the tensors in the file does not depend on that of `tensors`.
/// @throws CheckpointError, ResourceError as save_safetensors, and whatever `read` throws; no file appears then.
void write_safetensors(const std::filesystem::path& path, std::vector<TensorSource> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace accelerate::formats
