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

std::string gguf_entry(std::string_view key, const GgufEntryValue& value) {
  // The format's numbers of types.
  constexpr uint32_t kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7, kText = 8, kArray = 9;
  std::string entry;
  put_text(entry, key);
  const auto put_list = [&](uint32_t type, const auto& list, const auto& put_element) {
    put(entry, kArray);
    put(entry, type);
    put<uint64_t>(entry, list.size());
    for (const auto& element : list) put_element(element);
  };
  if (const auto* number = std::get_if<uint32_t>(&value)) {
    put(entry, kU32);
    put(entry, *number);
  } else if (const auto* real = std::get_if<float>(&value)) {
    put(entry, kF32);
    put(entry, *real);
  } else if (const auto* flag = std::get_if<bool>(&value)) {
    put(entry, kBool);
    put<uint8_t>(entry, *flag);
  } else if (const auto* text = std::get_if<std::string>(&value)) {
    put(entry, kText);
    put_text(entry, *text);
  } else if (const auto* numbers = std::get_if<std::vector<int32_t>>(&value)) {
    put_list(kI32, *numbers, [&](int32_t element) { put(entry, element); });
  } else {
    put_list(kText, std::get<std::vector<std::string>>(value), [&](const auto& element) { put_text(entry, element); });
  }
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
