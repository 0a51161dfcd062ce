#pragma once

#include <torch/torch.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "formats/dcp.hpp"

namespace dcp_test {

namespace fs = std::filesystem;
using namespace accelerate::formats;

/// A folder that is removed with the object.
struct Scratch {
  fs::path path;
  Scratch() {
    std::string name = fs::temp_directory_path() / "dcp-XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~Scratch() { fs::remove_all(path); }
  fs::path operator/(const std::string& name) const { return path / name; }
};

inline std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A tensor and along which dimension ranks share it; -1: rank 0 writes all of it.
struct Shared {
  std::string name;
  torch::Tensor tensor;
  int64_t dim = 0;
};

/// Rank r's part of a dimension, as torch.chunk cuts it: equal parts, rounded up, then a smaller one, then none.
inline DcpBox part_of(const torch::Tensor& tensor, int64_t dim, int64_t rank, int64_t world) {
  auto box = whole(tensor.sizes().vec());
  if (dim < 0 || tensor.dim() == 0) return box;
  const auto size = tensor.size(dim), each = (size + world - 1) / world, begin = std::min(rank * each, size);
  box.offsets[static_cast<size_t>(dim)] = begin;
  box.sizes[static_cast<size_t>(dim)] = std::min(each, size - begin);
  return box;
}

inline torch::Tensor cut(torch::Tensor tensor, const DcpBox& box) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim)
    tensor = tensor.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  return tensor;
}

/// "model.0.weight" is the value "0.weight" of the dict "model", as modules save; in "groups.0.lr" every step counts
/// and 0 is the index of a list, as optimizers save.
inline DcpPath path_of(const std::string& name) {
  const auto dot = name.find('.');
  if (dot == std::string::npos) return {name};
  DcpPath path{name.substr(0, dot)};
  if (name.substr(0, dot) != "groups") return path.emplace_back(name.substr(dot + 1)), path;
  std::istringstream steps(name.substr(dot + 1));
  for (std::string step; std::getline(steps, step, '.');) {
    if (std::isdigit(static_cast<unsigned char>(step[0]))) path.emplace_back(int64_t{std::stoll(step)});
    else path.emplace_back(step);
  }
  return path;
}

inline std::map<std::string, DcpPath> paths_of(const std::vector<DcpRecord>& records) {
  std::map<std::string, DcpPath> paths;
  for (const auto& record : records) paths[record.name] = path_of(record.name);
  return paths;
}

/// Saves as `world` ranks would, one after the other.
inline void save(const fs::path& folder, const std::vector<Shared>& state, int64_t world,
                 const std::vector<DcpObjectItem>& objects = {}) {
  prepare_dcp_folder(folder);
  std::vector<DcpRecord> all;
  for (int64_t rank = 0; rank < world; ++rank) {
    std::vector<DcpTensorItem> items;
    for (const auto& [name, tensor, dim] : state) {
      if (rank > 0 && (dim < 0 || tensor.dim() == 0)) continue;
      const auto box = part_of(tensor, dim, rank, world);
      items.push_back({name, tensor.sizes().vec(), box, cut(tensor, box)});
    }
    for (auto& record :
         write_dcp_items(folder, rank, rank == world - 1 ? objects : std::vector<DcpObjectItem>{}, items))
      all.push_back(std::move(record));
  }
  write_dcp_metadata(folder, all, paths_of(all));
}

/// Equal in shape, type and every bit.
inline bool same(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto left = a.contiguous(), right = b.contiguous();
  if (left.numel() == 0) return true;  // there may be no address
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

}  // namespace dcp_test
