#include "formats/gguf_header.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <type_traits>

namespace accelerate::formats {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are read as they lie in the file");

constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
enum : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kText, kArray, kU64, kI64, kF64 };

/// Bytes that values of one kind take at least, so that a count which the file has no room for is known as noise before
/// memory is asked for.
constexpr uint64_t kLeastBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};

class GgufHeaderReader {
 public:
  GgufHeaderReader(std::string_view bytes, const std::string& file, GgufLists lists)
      : bytes_(bytes), file_(file), lists_(lists) {}

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("GGUF file '{}': {}", file_, fmt::format(what, std::forward<Args>(args)...));
  }
  uint64_t position() const { return at_; }
  /// The length of the list that was read last, and is not in another one.
  int64_t elements() const { return elements_; }
  bool leaves_out(int64_t elements) const { return lists_ == GgufLists::short_ones && elements > kMostInShortList; }

  template <class T> T number() {
    T value{};
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text(uint64_t most = kMost) {
    const auto length = number<uint64_t>();
    if (length > most) fail("it has a name of {} bytes, at most {} are meaningful. It is damaged.", length, most);
    const char* begin = take(length);
    return {begin, length};
  }
  void expect_room(uint64_t count, uint64_t bytes, const char* what) const {
    if (count > (bytes_.size() - at_) / bytes)
      fail("it should have {} {}, and has room for fewer. It is truncated or damaged.", count, what);
  }
  GgufValue value(uint32_t type, int depth = 0) {
    switch (type) {
      case kU8:
        return {int64_t{number<uint8_t>()}};
      case kI8:
        return {int64_t{number<int8_t>()}};
      case kU16:
        return {int64_t{number<uint16_t>()}};
      case kI16:
        return {int64_t{number<int16_t>()}};
      case kU32:
        return {int64_t{number<uint32_t>()}};
      case kI32:
        return {int64_t{number<int32_t>()}};
      case kF32:
        return {double{number<float>()}};
      case kBool:
        return {number<uint8_t>() != 0};
      case kText:
        return {text()};
      case kArray:
        return array(depth);
      case kU64:
      case kI64:
        return {number<int64_t>()};
      case kF64:
        return {number<double>()};
      default:
        fail_type(type);
    }
  }

 private:
  [[noreturn]] void fail_type(uint32_t type) const {
    fail("it has a value of type {}, which the format doesn't have. It is damaged or of a newer version.", type);
  }
  const char* take(uint64_t count) {
    if (count > bytes_.size() - at_) fail("it ends within its header. It is truncated: copy or download it again.");
    const char* begin = bytes_.data() + at_;
    at_ += count;
    return begin;
  }
  template <class T, class Read> GgufValue list(uint64_t count, Read read) {
    if (leaves_out(static_cast<int64_t>(count))) {
      for (uint64_t i = 0; i < count; ++i) read();
      return {std::vector<T>()};
    }
    std::vector<T> values;
    values.reserve(count);
    for (uint64_t i = 0; i < count; ++i) values.push_back(read());
    return {std::move(values)};
  }
  GgufValue array(int depth) {
    constexpr int kDeepest = 4;
    if (depth == kDeepest) fail("its metadata has arrays within arrays. It is damaged.");
    const auto type = number<uint32_t>();
    if (type >= std::size(kLeastBytes)) fail_type(type);
    const auto count = number<uint64_t>();
    expect_room(count, kLeastBytes[type], "values in an array");
    if (depth == 0) elements_ = static_cast<int64_t>(count);
    if (type == kText) return list<std::string>(count, [&] { return text(); });
    if (type == kArray) return list<GgufValue>(count, [&] { return array(depth + 1); });
    if (type == kF32) return list<double>(count, [&] { return double{number<float>()}; });
    if (type == kF64) return list<double>(count, [&] { return number<double>(); });
    if (type == kBool) return list<int64_t>(count, [&] { return int64_t{number<uint8_t>() != 0}; });
    return list<int64_t>(count, [&] { return std::get<int64_t>(value(type).content); });
  }

  std::string_view bytes_;
  const std::string& file_;
  GgufLists lists_;
  uint64_t at_ = 0;
  int64_t elements_ = 0;
};

/// Sizes are checked where they are multiplied: they come from the file.
bool multiply(int64_t a, int64_t b, int64_t& product) { return !__builtin_mul_overflow(a, b, &product); }

GgufTensor read_tensor(GgufHeaderReader& reader, uint64_t longest_name, uint64_t& offset) {
  constexpr uint32_t kMostDims = 8;
  GgufTensor tensor;
  tensor.name = reader.text(longest_name);
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    reader.fail("tensor '{}' {}", tensor.name, fmt::format(what, std::forward<Args>(args)...));
  };
  const auto dims = reader.number<uint32_t>();
  if (dims > kMostDims) fail("has {} dimensions, at most {} are meaningful. The file is damaged.", dims, kMostDims);
  tensor.shape.resize(dims);
  int64_t numel = 1;
  for (auto& size : tensor.shape) {
    const auto stored = reader.number<uint64_t>();
    size = static_cast<int64_t>(stored);
    if (stored > kMost || !multiply(numel, std::max<int64_t>(size, 1), numel))
      fail("has more elements than there are numbers. The file is damaged.");
  }
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) numel = 0;
  std::reverse(tensor.shape.begin(), tensor.shape.end());  // the fastest dimension comes first in the file
  const auto type = reader.number<uint32_t>();
  tensor.encoding = find_gguf_encoding(type);
  if (!tensor.encoding)
    fail("is stored in encoding number {}, which is not known. The file is damaged or of a newer llama.cpp.", type);
  const auto& encoding = *tensor.encoding;
  if (tensor.row() % encoding.block != 0)
    fail("has rows of {} elements, but {} stores blocks of {}. The file is damaged.", tensor.row(), encoding.name,
         encoding.block);
  if (!multiply(numel / encoding.block, encoding.block_bytes, tensor.bytes))
    fail("has more bytes than there are numbers. The file is damaged.");
  offset = reader.number<uint64_t>();
  return tensor;
}

}  // namespace

GgufHeader parse_gguf_header(std::string_view bytes, const std::string& file, GgufLists lists) {
  constexpr uint32_t kMagic = 0x46554747, kMagicTurned = 0x47475546, kOldest = 2, kNewest = 3;  // "GGUF"
  constexpr uint64_t kLongestKey = 65535, kLeastTensorBytes = 24, kLeastValueBytes = 13;
  GgufHeaderReader reader(bytes, file, lists);
  const auto magic = reader.number<uint32_t>();
  const auto fail_turned = [&] {
    reader.fail(
        "it is of the big-endian variant, which is not supported. Convert it to little-endian, with gguf-py's "
        "gguf_convert_endian.py for instance.");
  };
  if (magic == kMagicTurned) fail_turned();
  if (magic != kMagic) reader.fail("it does not begin with GGUF.");
  GgufHeader header;
  header.version = reader.number<uint32_t>();
  // Writers of the big-endian variant turn the version, and the first four bytes or not.
  if (const auto turned = __builtin_bswap32(header.version); turned >= kOldest && turned <= kNewest) fail_turned();
  if (header.version < kOldest || header.version > kNewest)
    reader.fail("it has version {}, expected 2 or 3.", header.version);
  const auto tensors = reader.number<uint64_t>(), values = reader.number<uint64_t>();
  reader.expect_room(tensors, kLeastTensorBytes, "tensors");
  reader.expect_room(values, kLeastValueBytes, "values of metadata");
  for (uint64_t i = 0; i < values; ++i) {
    const auto begin = static_cast<int64_t>(reader.position());
    auto key = reader.text(kLongestKey);
    const auto type = reader.number<uint32_t>();
    auto value = reader.value(type);
    header.entries.push_back(
        {key, begin, static_cast<int64_t>(reader.position()) - begin, type == kArray ? reader.elements() : 0});
    if (const auto [place, fresh] = header.metadata.emplace(std::move(key), std::move(value)); !fresh)
      reader.fail("the key '{}' occurs twice in its metadata. It is damaged.", place->first);
  }
  for (const auto& entry : header.entries)
    if (reader.leaves_out(entry.elements)) header.metadata.erase(entry.key);
  if (const auto parts = header.metadata.integer("split.count").value_or(1); parts > 1)
    reader.fail(
        "it is part {} of a model in {} files, expected the whole model in one: its other tensors would be missing. "
        "Join them with llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE.gguf`.",
        header.metadata.integer("split.no").value_or(0) + 1, parts);
  const auto alignment = static_cast<uint64_t>(header.metadata.integer("general.alignment").value_or(32));
  if (!std::has_single_bit(alignment) || alignment > 1U << 30)
    reader.fail("general.alignment is {}, expected a power of two. It is damaged.", alignment);
  header.alignment = static_cast<int64_t>(alignment);

  std::vector<uint64_t> offsets(tensors);
  header.tensors.reserve(tensors);
  for (auto& offset : offsets) header.tensors.push_back(read_tensor(reader, kLongestKey, offset));
  std::set<std::string_view> names;
  const uint64_t data_begin = (reader.position() + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < offsets.size(); ++i) {
    auto& tensor = header.tensors[i];
    if (!names.insert(tensor.name).second)
      reader.fail("it has two tensors of the name '{}'. It is damaged.", tensor.name);
    if (offsets[i] % alignment != 0 || offsets[i] > kMost - data_begin)
      reader.fail("tensor '{}' begins at byte {} of the data, expected a multiple of the alignment {}. It is damaged.",
                  tensor.name, offsets[i], alignment);
    tensor.begin = static_cast<int64_t>(data_begin + offsets[i]);
  }
  return header;
}

void check_gguf_data(const GgufHeader& header, int64_t file_bytes, const std::string& file) {
  for (const auto& tensor : header.tensors)
    if (tensor.begin > file_bytes || tensor.bytes > file_bytes - tensor.begin)
      raise<CheckpointError>(
          "GGUF file '{}': tensor '{}' takes {} bytes from byte {}, but the file has {}. It is probably truncated: "
          "copy or download it again.",
          file, tensor.name, tensor.bytes, tensor.begin, file_bytes);
  std::vector<const GgufTensor*> in_order;
  for (const auto& tensor : header.tensors)
    if (tensor.bytes > 0) in_order.push_back(&tensor);
  std::ranges::sort(in_order, {}, &GgufTensor::begin);
  for (size_t i = 1; i < in_order.size(); ++i)
    if (const auto& before = *in_order[i - 1], &tensor = *in_order[i]; tensor.begin < before.begin + before.bytes)
      raise<CheckpointError>(
          "GGUF file '{}': tensor '{}' begins at byte {}, within '{}', which ends at byte {}, expected each to have "
          "bytes of its own. It is damaged: copy or download it again.",
          file, tensor.name, tensor.begin, before.name, before.begin + before.bytes);
}

}  // namespace accelerate::formats
