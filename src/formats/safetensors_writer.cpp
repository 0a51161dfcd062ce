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

namespace accelerate {
namespace {

/// A file that appears under its name when it is finished and leaves nothing behind when it is not.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path) : path_(path), temporary_(temporary_name(path)) {
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0) fail("can't create it");
  }
  ~AtomicFile() {
    if (file_ >= 0) ::close(file_);
    if (!finished_) ::unlink(temporary_.c_str());
  }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto written = ::write(file_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("can't write to it");
      bytes.remove_prefix(static_cast<size_t>(written));
    }
  }

  void finish() {
    if (::fsync(file_) != 0) fail("can't flush it to the disk");
    const int closed = ::close(std::exchange(file_, -1));
    if (closed != 0) fail("can't close it");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("can't rename the finished file");
    finished_ = true;
    // The new name survives a power cut only when the folder is flushed too. Not every file system can, and the file is complete without.
    const auto folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
    if (const int handle = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); handle >= 0) {
      ::fsync(handle);
      ::close(handle);
    }
  }

 private:
  static std::filesystem::path temporary_name(const std::filesystem::path& path) {
    static std::atomic<int> counter{0};
    return path.parent_path() / ("." + path.filename().string() + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(counter++));
  }

  [[noreturn]] void fail(const std::string& what) const {
    const int error = errno;
    const auto message = "save_safetensors '" + path_.string() + "': " + what + ": " + std::strerror(error) + ".";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) throw ResourceError(message + " Free some space or raise the limit; an older file of this name is untouched.");
    throw CheckpointError(message + " Check that its folder exists and may be written to; an older file of this name is untouched.");
  }

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
  bool finished_ = false;
};

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
  AtomicFile file(path);
  file.write(header);
  for (const auto& entry : entries) {
    const auto bytes = entry.tensor->detach().cpu().resolve_conj().resolve_neg().contiguous();
    file.write({static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel() * bytes.element_size())});
  }
  file.finish();
}

}  // namespace accelerate
