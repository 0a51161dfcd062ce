#include "formats/gguf_writer.hpp"

#include <bit>
#include <cstring>
#include <utility>

#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

template <class T> void put(std::string& to, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  to.append(bytes, sizeof value);
}

void put_text(std::string& to, std::string_view text) {
  put<uint64_t>(to, text.size());
  to += text;
}

int64_t up_to(int64_t bytes, int64_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

std::string gguf_entry(std::string_view key, uint32_t value) {
  constexpr uint32_t kU32 = 4;  // the format's number of this type
  std::string entry;
  put_text(entry, key);
  put(entry, kU32);
  put(entry, value);
  return entry;
}

int64_t GgufOutline::Tensor::bytes() const {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements / encoding->block * encoding->block_bytes;
}

GgufWriter::GgufWriter(std::string operation, const std::filesystem::path& path, const GgufOutline& outline)
    : file_(std::move(operation), path), alignment_(outline.alignment) {
  constexpr uint32_t kVersion = 3;
  std::string header = "GGUF";
  put(header, kVersion);
  put<uint64_t>(header, outline.tensors.size());
  put<uint64_t>(header, outline.entries.size());
  for (const auto& entry : outline.entries) header += entry;
  int64_t offset = 0;
  for (const auto& tensor : outline.tensors) {
    put_text(header, tensor.name);
    put(header, static_cast<uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size)
      put(header, static_cast<uint64_t>(*size));
    put(header, tensor.encoding->id);
    put(header, static_cast<uint64_t>(offset));
    if (const int64_t bytes = tensor.bytes(); bytes > 0) bytes_.push_back(bytes), offset += up_to(bytes, alignment_);
  }
  header.resize(static_cast<size_t>(up_to(static_cast<int64_t>(header.size()), alignment_)), '\0');
  file_.write(header);
}

void GgufWriter::write(std::string_view bytes) {
  if (bytes.empty()) return;
  if (tensor_ == bytes_.size() || static_cast<int64_t>(bytes.size()) > bytes_[tensor_] - written_)
    raise<InternalError>("GgufWriter: found {} bytes for tensor {}, expected no more than {}", bytes.size(), tensor_,
                         tensor_ == bytes_.size() ? 0 : bytes_[tensor_] - written_);
  file_.write(bytes);
  written_ += static_cast<int64_t>(bytes.size());
  if (written_ < bytes_[tensor_]) return;
  file_.write(std::string(static_cast<size_t>(up_to(written_, alignment_) - written_), '\0'));
  ++tensor_, written_ = 0;
}

void GgufWriter::finish() {
  if (tensor_ != bytes_.size())
    raise<InternalError>("GgufWriter: found {} of {} tensors, expected all", tensor_, bytes_.size());
  file_.finish();
}

}  // namespace accelerate::formats
