#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <ATen/core/Tensor.h>

#include "ranks.hpp"

namespace support {

inline std::string text_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
inline void write(const std::filesystem::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary) << text;
}

/// A path in the test's own folder.
inline std::filesystem::path scratch(const std::string& name) { return std::filesystem::path(scratch_dir()) / name; }
/// Of the job: those of other numbers of ranks have their own.
inline std::filesystem::path scratch_of_job(const std::string& name) {
  return scratch(name + "_" + std::to_string(world_size()));
}

inline double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace support
