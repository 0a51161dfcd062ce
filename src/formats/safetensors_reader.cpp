#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "accelerate/formats/safetensors.hpp"
#include "formats/input_file.hpp"
#include "formats/mapped_file.hpp"
#include "formats/safetensors_dtypes.hpp"
#include "formats/safetensors_header.hpp"
#include "formats/similar_names.hpp"
#include "utils/raise.hpp"

namespace accelerate {

struct SafetensorsFile::Content {
  explicit Content(const std::filesystem::path& path) : file(path), header(formats::read_safetensors_header(file)) {}

  /// Mapped when the first tensor is asked for: a mapping counts against RLIMIT_DATA, and a program that only reads
  /// parts needs none.
  const formats::MappedFile& map() const {
    std::call_once(once, [&] { mapping.emplace(file.duplicate(), file.path()); });
    return *mapping;
  }

  formats::InputFile file;
  formats::SafetensorsHeader header;
  mutable std::once_flag once;
  mutable std::optional<formats::MappedFile> mapping;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : content_(std::make_shared<const Content>(path)) {}

const std::filesystem::path& SafetensorsFile::path() const { return content_->file.path(); }
const std::vector<std::string>& SafetensorsFile::names() const { return content_->header.names; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return content_->header.metadata; }
int64_t SafetensorsFile::data_begin() const { return content_->header.data_begin; }
bool SafetensorsFile::contains(const std::string& name) const { return content_->header.tensors.contains(name); }

const SafetensorsInfo& SafetensorsFile::info(const std::string& name) const {
  const auto& tensors = content_->header.tensors;
  if (const auto found = tensors.find(name); found != tensors.end()) return found->second;
  raise<CheckpointError>("safetensors file '{}' has no tensor '{}'; it has {} others.{}", path().string(), name,
                         names().size(), formats::similar_names(name, names()));
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto& entry = info(name);
  const auto* dtype = formats::find_dtype(entry.dtype);
  if (!dtype->torch)
    raise<CheckpointError>(
        "safetensors file '{}': tensor '{}' has dtype {}, which LibTorch has no type for. Convert the file to another "
        "dtype.",
        path().string(), name, entry.dtype);
  auto shape = entry.shape;
  if (dtype->packed > 1) {
    if (shape.empty() || shape.back() % dtype->packed != 0)
      raise<CheckpointError>(
          "safetensors file '{}': tensor '{}' of {} has a last dimension that is no multiple of {}, so LibTorch can't "
          "hold it.",
          path().string(), name, entry.dtype, dtype->packed);
    shape.back() /= dtype->packed;
  }
  const auto& map = content_->map();
  if (map.size() < content_->file.size())
    raise<CheckpointError>(
        "safetensors file '{}' has been shortened from {} to {} bytes since it was opened. Put the checkpoint back.",
        path().string(), content_->file.size(), map.size());
  char* bytes = map.data() + content_->header.data_begin + entry.begin;
  // The tensor's storage owns a share of the mapping.
  auto tensor = at::from_blob(
      bytes, shape, [content = content_](void*) {}, at::TensorOptions().dtype(*dtype->torch));
  const auto alignment = c10::elementSize(*dtype->torch);
  return reinterpret_cast<uintptr_t>(bytes) % alignment == 0 ? tensor : tensor.clone();
}

std::map<std::string, at::Tensor> load_safetensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& name : file.names()) tensors.emplace(name, file.tensor(name));
  return tensors;
}

}  // namespace accelerate
