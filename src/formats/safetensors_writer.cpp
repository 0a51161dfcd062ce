#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <ATen/core/Tensor.h>

#include "accelerate/error.hpp"
#include "accelerate/safetensors.hpp"
#include "formats/safetensors_dtypes.hpp"
#include "formats/safetensors_header.hpp"
#include "utils/atomic_file.hpp"

namespace accelerate {
namespace {

struct Entry {
  const std::string* name;
  const at::Tensor* tensor;
  const formats::SafetensorsDtype* dtype;
};

Entry check(const std::string& name, const at::Tensor& tensor, const std::string& file) {
  const auto fail = [&](const std::string& what) { throw CheckpointError("save_safetensors '" + file + "': tensor '" + name + "' " + what); };
  if (name == formats::kMetadataKey) fail("has the name that the format reserves for metadata. Rename it.");
  if (!tensor.defined()) fail("is undefined. Leave it out.");
  if (tensor.layout() != at::kStrided) fail("is sparse or of another layout without strides, which the format can't hold. Call to_dense() on it.");
  if (tensor.is_meta()) fail("is on the meta device and has no data. Materialise it first.");
  const auto* dtype = formats::find_dtype(tensor.scalar_type());
  if (!dtype) fail("has dtype " + std::string(c10::toString(tensor.scalar_type())) + ", which the format has no name for. Convert it, or view it as two real tensors if it is complex.");
  if (dtype->packed > 1 && tensor.dim() == 0) fail("is a scalar of a packed dtype, which the format can't describe. Give it one dimension.");
  return {&name, &tensor, dtype};
}

/// Tensors whose bytes overlap would be written twice and come back untied.
void check_not_shared(const std::map<std::string, at::Tensor>& tensors, const std::string& file) {
  struct Area {
    const void* storage;
    uintptr_t begin, end;
    const std::string* name;
  };
  std::vector<Area> areas;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.numel() == 0) continue;
    int64_t span = 1;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) span += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    areas.push_back({tensor.storage().data(), begin, begin + static_cast<uintptr_t>(span * tensor.element_size()), &name});
  }
  std::stable_sort(areas.begin(), areas.end(), [](const Area& a, const Area& b) { return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin); });
  std::string shared;
  const Area* widest = nullptr;
  for (const auto& area : areas) {
    if (widest && widest->storage == area.storage && area.begin < widest->end)
      shared += (shared.empty() ? "'" : ", '") + *widest->name + "' with '" + *area.name + "'";
    if (!widest || widest->storage != area.storage || area.end > widest->end) widest = &area;
  }
  if (!shared.empty())
    throw CheckpointError("save_safetensors '" + file + "': some tensors share memory: " + shared +
                          ". They would be written twice and be separate after loading. Save one name of each and tie them again after loading, or clone() one.");
}

}  // namespace

void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors, const std::map<std::string, std::string>& metadata) {
  std::vector<Entry> entries;
  entries.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) entries.push_back(check(name, tensor, path.string()));
  check_not_shared(tensors, path.string());
  // The map is ordered by name already.
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.dtype > b.dtype; });

  std::vector<std::pair<std::string, SafetensorsInfo>> infos;
  infos.reserve(entries.size());
  int64_t end = 0;
  for (const auto& entry : entries) {
    SafetensorsInfo info{std::string(entry.dtype->name), entry.tensor->sizes().vec(), end, 0};
    if (entry.dtype->packed > 1) info.shape.back() *= entry.dtype->packed;
    end += entry.tensor->numel() * entry.tensor->element_size();
    info.end = end;
    infos.emplace_back(*entry.name, std::move(info));
  }

  const auto header = formats::format_safetensors_header(infos, metadata, path.string());
  AtomicFile file("save_safetensors", path);
  file.write(header);
  for (const auto& entry : entries) {
    const auto bytes = entry.tensor->detach().cpu().resolve_conj().resolve_neg().contiguous();
    file.write({static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel() * bytes.element_size())});
  }
  file.finish();
}

}  // namespace accelerate
