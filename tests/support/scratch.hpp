#pragma once

#include <filesystem>
#include <string>

#include <ATen/core/Tensor.h>

#include "ranks.hpp"

namespace support {

/// A path in the test's own folder.
inline std::filesystem::path scratch(const std::string& name) { return std::filesystem::path(scratch_dir()) / name; }

inline double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace support
