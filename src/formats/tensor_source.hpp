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

/// The order in which such a file has them.
void sort_for_safetensors(std::vector<TensorSource>& tensors);
/// @throws CheckpointError where bytes of two overlap: they would be written twice and come back untied. @param file
/// its name, for messages
void expect_none_shared(const std::map<std::string, at::Tensor>& tensors, const std::string& file);

/// As save_safetensors, tensor by tensor. The order of the tensors in the file does not depend on that of `tensors`.
/// @throws CheckpointError, ResourceError as save_safetensors, and whatever `read` throws; no file appears then.
void write_safetensors(const std::filesystem::path& path, std::vector<TensorSource> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace accelerate::formats
