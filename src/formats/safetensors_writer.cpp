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

#include "accelerate/formats/safetensors.hpp"
#include "formats/safetensors_dtypes.hpp"
#include "formats/safetensors_header.hpp"
#include "formats/tensor_source.hpp"
#include "observe/trace.hpp"
#include "snapshot/put_off.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

template <class... Args>
[[noreturn]] void refuse_tensor(const std::string& file, const std::string& name, fmt::format_string<Args...> what,
                                Args&&... args) {
  raise<CheckpointError>("save_safetensors '{}': tensor '{}' {}", file, name,
                         fmt::format(what, std::forward<Args>(args)...));
}

formats::TensorSource source_of(const std::string& name, const at::Tensor& tensor, const std::string& file) {
  if (!tensor.defined()) refuse_tensor(file, name, "is undefined. Leave it out.");
  if (tensor.layout() != at::kStrided)
    refuse_tensor(
        file, name,
        "is sparse or of another layout without strides, which the format can't hold. Call to_dense() on it.");
  if (tensor.is_meta()) refuse_tensor(file, name, "is on the meta device and has no data. Materialise it first.");
  return {name, tensor.scalar_type(), tensor.sizes().vec(), [&tensor] { return tensor; }};
}

const formats::SafetensorsDtype* dtype_of(const formats::TensorSource& source, const std::string& file) {
  if (source.name == formats::kMetadataKey)
    refuse_tensor(file, source.name, "has the name that the format reserves for metadata. Rename it.");
  const auto* dtype = formats::find_dtype(source.dtype);
  if (!dtype)
    refuse_tensor(
        file, source.name,
        "has dtype {}, which the format has no name for. Convert it, or view it as two real tensors if it is complex.",
        c10::toString(source.dtype));
  if (dtype->packed > 1 && source.sizes.empty())
    refuse_tensor(file, source.name,
                  "is a scalar of a packed dtype, which the format can't describe. Give it one dimension.");
  return dtype;
}

}  // namespace

void formats::expect_none_shared(const std::map<std::string, at::Tensor>& tensors, const std::string& file) {
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
    areas.push_back(
        {tensor.storage().data(), begin, begin + static_cast<uintptr_t>(span * tensor.element_size()), &name});
  }
  std::stable_sort(areas.begin(), areas.end(), [](const Area& a, const Area& b) {
    return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
  });
  std::vector<std::string> shared;
  const Area* widest = nullptr;
  for (const auto& area : areas) {
    if (widest && widest->storage == area.storage && area.begin < widest->end)
      shared.push_back(fmt::format("'{}' with '{}'", *widest->name, *area.name));
    if (!widest || widest->storage != area.storage || area.end > widest->end) widest = &area;
  }
  if (!shared.empty())
    raise<CheckpointError>(
        "save_safetensors '{}': some tensors share memory: {}. They would be written twice and be separate after "
        "loading. Save one name of each and tie them again after loading, or clone() one.",
        file, fmt::join(shared, ", "));
}

void formats::sort_for_safetensors(std::vector<TensorSource>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorSource& a, const TensorSource& b) {
    const auto *left = find_dtype(a.dtype), *right = find_dtype(b.dtype);
    return left != right ? left > right : a.name < b.name;
  });
}

void formats::write_safetensors(const std::filesystem::path& path, std::vector<TensorSource> tensors,
                                const std::map<std::string, std::string>& metadata) {
  for (const auto& source : tensors) dtype_of(source, path.string());
  sort_for_safetensors(tensors);

  std::vector<std::pair<std::string, SafetensorsInfo>> infos;
  infos.reserve(tensors.size());
  int64_t end = 0;
  for (const auto& source : tensors) {
    const auto* dtype = find_dtype(source.dtype);
    SafetensorsInfo info{std::string(dtype->name), source.sizes, end, 0};
    if (dtype->packed > 1) info.shape.back() *= dtype->packed;
    auto bytes = static_cast<int64_t>(c10::elementSize(source.dtype));
    for (const auto size : source.sizes) bytes *= size;
    end += bytes;
    info.end = end;
    infos.emplace_back(source.name, std::move(info));
  }

  const auto header = format_safetensors_header(infos, metadata, path.string());
  const trace::Span span(trace::SpanKind::checkpoint_write, path.filename().string(), end);
  AtomicFile file("save_safetensors", path);
  file.write(header);
  for (auto& source : tensors) {
    const auto bytes = std::exchange(source.read, nullptr)().detach().cpu().resolve_conj().resolve_neg().contiguous();
    snapshot::bytes_at_mark(bytes.const_data_ptr(), bytes.numel() * static_cast<int64_t>(bytes.element_size()),
                            [&](std::string_view part) { file.write(part); });
  }
  file.finish();
}

void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<formats::TensorSource> sources;
  sources.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) sources.push_back(source_of(name, tensor, path.string()));
  formats::expect_none_shared(tensors, path.string());
  if (auto* const later = snapshot::PutOff::here()) {
    for (auto& source : sources) {
      dtype_of(source, path.string());  // refuses now
      source.read = [held = later->hold(source.read(), snapshot::Ledger::Order::row_major)] { return held; };
    }
    return later->files().writes.push_back(
        [path, sources, metadata] { formats::write_safetensors(path, sources, metadata); });
  }
  formats::write_safetensors(path, std::move(sources), metadata);
}

}  // namespace accelerate
