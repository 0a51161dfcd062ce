#include "bigmodel/gguf_header.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>

#include "accelerate/error.hpp"

namespace accelerate::bigmodel {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie in the file");

class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : path_(path), stream_(path, std::ios::binary) {
    std::error_code error;
    if (!stream_) fail(std::string("can't open it: ") + std::strerror(errno) + ".");
    left_ = std::filesystem::file_size(path, error);
    if (error) fail("it is not a regular file.");
  }

  [[noreturn]] void fail(const std::string& what) const { throw CheckpointError("GGUF file '" + path_.string() + "': " + what); }

  template <class T>
  T number() {
    T value{};
    take(sizeof value);
    if (!stream_.read(reinterpret_cast<char*>(&value), sizeof value)) fail("it can't be read.");
    return value;
  }
  void skip(uint64_t bytes) {
    take(bytes);
    stream_.seekg(static_cast<std::streamoff>(bytes), std::ios::cur);
  }
  std::string text(uint64_t most) {
    const auto length = number<uint64_t>();
    if (length > most) fail("it has a name of " + std::to_string(length) + " bytes, at most " + std::to_string(most) + " are meaningful. It is damaged.");
    take(length);
    std::string value(length, '\0');
    if (!stream_.read(value.data(), static_cast<std::streamsize>(length))) fail("it can't be read.");
    return value;
  }
  /// Each of `count` things has `bytes` at least, so a count that the file has no room for is noise.
  void expect_room(uint64_t count, uint64_t bytes, const char* what) const {
    if (count > left_ / bytes) fail("it should have " + std::to_string(count) + " " + what + ", and has room for fewer. It is truncated or damaged.");
  }

 private:
  void take(uint64_t bytes) {
    if (bytes > left_) fail("it ends within its header. It is truncated: copy or download it again.");
    left_ -= bytes;
  }

  std::filesystem::path path_;
  std::ifstream stream_;
  uint64_t left_ = 0;
};

constexpr uint32_t kText = 8, kArray = 9;

/// Bytes of a value of one of the format's types; empty for text and arrays.
std::optional<uint64_t> size_of(uint32_t type, const Reader& reader) {
  constexpr uint64_t kSizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // u8 i8 u16 i16 u32 i32 f32 bool text array u64 i64 f64
  if (type >= std::size(kSizes)) reader.fail("it has a value of type " + std::to_string(type) + ", which the format doesn't have. It is damaged or of a newer version.");
  return kSizes[type] ? std::optional(kSizes[type]) : std::nullopt;
}

void skip_value(Reader& reader, uint32_t type, int depth = 0) {
  if (const auto size = size_of(type, reader)) return reader.skip(*size);
  if (type == kText) return reader.skip(reader.number<uint64_t>());
  constexpr int kDeepest = 4;
  if (depth == kDeepest) reader.fail("its metadata has arrays within arrays. It is damaged.");
  const auto inner = reader.number<uint32_t>();
  const auto count = reader.number<uint64_t>();
  const auto size = size_of(inner, reader);
  reader.expect_room(count, size.value_or(sizeof(uint64_t)), "values in an array");
  if (size) return reader.skip(count * *size);
  for (uint64_t i = 0; i < count; ++i) skip_value(reader, inner, depth + 1);
}

}  // namespace

std::vector<std::pair<std::string, std::vector<int64_t>>> read_gguf_header(const std::filesystem::path& path) {
  constexpr uint32_t kMagic = 0x46554747, kOldest = 2, kNewest = 3, kMostDims = 8;  // "GGUF"
  constexpr uint64_t kLongestKey = 65535, kLeastTensorBytes = 24;
  Reader reader(path);
  if (reader.number<uint32_t>() != kMagic) reader.fail("it does not begin with GGUF.");
  if (const auto version = reader.number<uint32_t>(); version < kOldest || version > kNewest) reader.fail("it has version " + std::to_string(version) + ", expected 2 or 3.");
  const auto tensors = reader.number<uint64_t>(), values = reader.number<uint64_t>();
  reader.expect_room(tensors, kLeastTensorBytes, "tensors");
  for (uint64_t i = 0; i < values; ++i) {
    reader.text(kLongestKey);
    skip_value(reader, reader.number<uint32_t>());
  }
  std::vector<std::pair<std::string, std::vector<int64_t>>> result;
  for (uint64_t i = 0; i < tensors; ++i) {
    auto name = reader.text(kLongestKey);
    const auto dims = reader.number<uint32_t>();
    if (dims > kMostDims) reader.fail("'" + name + "' has " + std::to_string(dims) + " dimensions. It is damaged.");
    std::vector<int64_t> shape(dims);
    for (auto& size : shape)
      if ((size = static_cast<int64_t>(reader.number<uint64_t>())) < 0) reader.fail("'" + name + "' has a negative size. It is damaged.");
    std::reverse(shape.begin(), shape.end());  // the fastest dimension comes first in the file
    reader.number<uint32_t>();                 // the encoding of its elements
    reader.number<uint64_t>();                 // where its data begin
    result.emplace_back(std::move(name), std::move(shape));
  }
  return result;
}

}  // namespace accelerate::bigmodel
