#include "formats/safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include "formats/safetensors_elements.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and tensors are mapped as they are");

template <class... Args>
[[noreturn]] void fail(const std::string& file, fmt::format_string<Args...> what, Args&&... args) {
  raise<CheckpointError>("safetensors file '{}': {}", file, fmt::format(what, std::forward<Args>(args)...));
}

using NamedInfo = std::pair<const std::string, SafetensorsInfo>;

constexpr uint64_t kLeastBytesOfATensor = 64;  ///< of a header, that a tensor takes at least, about

/// A name in a message.
std::string cut(const std::string& name) { return name.size() <= 200 ? name : name.substr(0, 197) + "..."; }

std::string show_range(const SafetensorsInfo& info) { return fmt::format("[{}, {})", info.begin, info.end); }

/// Each name that is new.
void parse_header(std::string_view text, const std::string& file,
                  const std::function<bool(const std::string& name, const json& entry)>& add) {
  if (text.empty() || text.front() != '{')
    fail(file,
         "the header does not start with '{{'. A safetensors header is one JSON object; is this a file of another "
         "format?");
  if (text.find('\0') != std::string_view::npos)
    fail(file, "the header holds a NUL byte; it must be JSON padded with spaces. The file is damaged.");
  constexpr size_t kDeepest = 3;  // header > tensor > shape
  const auto problem = parse_json_members(
      text,
      [&](const std::string& name, const json& entry) {
        if (!add(name, entry))
          fail(file, "the header has the key {} twice in one object, so which one holds is open. The file is damaged.",
               show_json(json(name)));
      },
      {.deepest = kDeepest, .unique_keys = true});
  if (!problem.empty()) fail(file, "the header {}. The file is damaged or of another format.", problem);
}

/// The subject of a message. It becomes a text only where there is a message: there may be 200,000 subjects.
struct Subject {
  const std::string& name;
  const char* part = "";
  std::string text() const { return "tensor '" + cut(name) + "'" + part; }
};

int64_t as_count(const json& value, const Subject& what, const std::string& file) {
  if (!value.is_number_integer())
    fail(file, "{} holds {}, which is not an integer that fits in 64 bits.", what.text(), show_json(value));
  if (!value.is_number_unsigned()) fail(file, "{} holds the negative number {}.", what.text(), show_json(value));
  const auto count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail(file, "{} holds {}, which is larger than 2^63 - 1.", what.text(), show_json(value));
  return static_cast<int64_t>(count);
}

const json& field(const json& entry, const char* key, const Subject& what, const std::string& file) {
  const auto found = entry.find(key);
  if (found == entry.end())
    fail(file, "{} has no field '{}'; needed are dtype, shape and data_offsets.", what.text(), key);
  return *found;
}

/// Bytes that the shape needs, with every step checked.
int64_t byte_size(const SafetensorsInfo& info, const SafetensorsElement& dtype, const Subject& what,
                  const std::string& file) {
  int64_t elements = 1;
  int64_t bits = 0;
  bool empty = false;
  bool overflow = false;
  for (const int64_t size : info.shape) {
    empty = empty || size == 0;
    // Strides are products of the other sizes even where one size is 0, so these must not overflow either.
    overflow = overflow || __builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements);
  }
  overflow = overflow || __builtin_mul_overflow(elements, dtype.bits, &bits);
  if (overflow)
    fail(file, "{} has shape {} of {}, whose size in bytes overflows 64 bits. The header is damaged.", what.text(),
         info.shape, info.dtype);
  if (empty) return 0;
  if (bits % 8 != 0)
    fail(file, "{} has shape {} of {}, which does not end on a whole byte.", what.text(), info.shape, info.dtype);
  return bits / 8;
}

SafetensorsInfo parse_entry(const json& entry, const Subject& what, const std::string& file) {
  if (!entry.is_object())
    fail(file, "{} is described by {}, expected an object with dtype, shape and data_offsets.", what.text(),
         show_json(entry));
  SafetensorsInfo info;
  const auto& dtype = field(entry, "dtype", what, file);
  if (!dtype.is_string())
    fail(file, "{} has the dtype {}, expected a name such as \"F32\".", what.text(), show_json(dtype));
  info.dtype = dtype.get<std::string>();
  const auto* row = find_element(info.dtype);
  if (!row)
    fail(file, "{} has the unknown dtype {}. The file may come from a newer writer; convert it to a known dtype.",
         what.text(), show_json(dtype));

  const auto& shape = field(entry, "shape", what, file);
  if (!shape.is_array()) fail(file, "{} has the shape {}, expected a list of sizes.", what.text(), show_json(shape));
  constexpr size_t kMostDimensions = 64;  // PyTorch's limit
  if (shape.size() > kMostDimensions)
    fail(file, "{} has a shape of {} dimensions, expected at most {}. The header is damaged.", what.text(),
         shape.size(), kMostDimensions);
  info.shape.reserve(shape.size());
  for (const auto& size : shape) info.shape.push_back(as_count(size, Subject{what.name, ": its shape"}, file));

  const auto& offsets = field(entry, "data_offsets", what, file);
  if (!offsets.is_array() || offsets.size() != 2)
    fail(file, "{} has the data_offsets {}, expected two integers: begin and end.", what.text(), show_json(offsets));
  info.begin = as_count(offsets[0], Subject{what.name, ": its data_offsets"}, file);
  info.end = as_count(offsets[1], Subject{what.name, ": its data_offsets"}, file);
  if (info.begin > info.end)
    fail(file, "{} begins at byte {}, after its end at {}.", what.text(), info.begin, info.end);

  const int64_t needed = byte_size(info, *row, what, file);
  if (info.end - info.begin != needed)
    fail(file,
         "{} covers the bytes {}, which are {}, but shape {} of {} needs {}. The header is damaged or its writer is at "
         "fault.",
         what.text(), show_range(info), info.end - info.begin, info.shape, info.dtype, needed);
  return info;
}

std::map<std::string, std::string> parse_metadata(const json& entries, const std::string& file) {
  std::map<std::string, std::string> metadata;
  if (entries.is_null()) return metadata;
  if (!entries.is_object()) fail(file, "__metadata__ is {}, expected an object of strings.", show_json(entries));
  for (const auto& [key, value] : entries.items()) {
    if (!value.is_string())
      fail(file, "__metadata__ has for '{}' the value {}, but only strings are allowed there.", key, show_json(value));
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

/// The tensors, in the order of their bytes, must fill the data section from its first byte to its last, each byte
/// once.
void check_coverage(const std::vector<const NamedInfo*>& tensors, int64_t data_bytes, const std::string& file) {
  int64_t covered = 0;
  const std::string* before = nullptr;
  for (const auto* tensor : tensors) {
    const auto& [name, info] = *tensor;
    if (info.begin < covered)
      fail(file, "tensor '{}' at bytes {} overlaps tensor '{}', which ends at {}. The header is damaged.", cut(name),
           show_range(info), cut(*before), covered);
    if (info.begin > covered)
      fail(file, "the bytes [{}, {}) before tensor '{}' belong to no tensor; holes are not allowed.", covered,
           info.begin, cut(name));
    covered = info.end;
    before = &name;
  }
  if (covered > data_bytes)
    fail(file,
         "tensor '{}' ends at byte {} of the data, but the file holds only {} bytes of data. It is probably truncated: "
         "copy or download it again.",
         cut(*before), covered, data_bytes);
  if (covered < data_bytes)
    fail(file,
         "the last {} of the {} bytes of data belong to no tensor. Something was appended, or the header is that of "
         "another file.",
         data_bytes - covered, data_bytes);
}

}  // namespace

SafetensorsHeader read_safetensors_header(const InputFile& file) {
  std::string start(static_cast<size_t>(std::min(file.size(), kLengthBytes)), '\0');
  file.read(0, start.data(), static_cast<int64_t>(start.size()));
  if (static_cast<int64_t>(start.size()) == kLengthBytes) {
    uint64_t length = 0;
    std::memcpy(&length, start.data(), sizeof length);
    const auto wanted = static_cast<int64_t>(std::min<uint64_t>(length, kMaxHeaderBytes + 1));
    const int64_t more = std::min(wanted, file.size() - kLengthBytes);
    start.resize(static_cast<size_t>(kLengthBytes + more));
    file.read(kLengthBytes, start.data() + kLengthBytes, more);
  }
  return parse_safetensors_header(start, file.size(), file.path().string());
}

SafetensorsHeader parse_safetensors_header(std::string_view bytes, int64_t file_bytes, const std::string& file) {
  if (file_bytes < kLengthBytes)
    fail(file,
         "it has {} bytes, but the length of the header alone takes {}. It is empty or truncated: copy or download it "
         "again.",
         file_bytes, kLengthBytes);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes))
    fail(file, "its header claims {} bytes, more than the format's limit of {}. It is probably no safetensors file.",
         length, kMaxHeaderBytes);
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes)
    fail(file, "its header claims {} bytes, but only {} follow. It is probably truncated: copy or download it again.",
         length, file_bytes - kLengthBytes);

  SafetensorsHeader header;
  header.data_begin = kLengthBytes + static_cast<int64_t>(length);
  header.tensors.reserve(static_cast<size_t>(length / kLeastBytesOfATensor));
  std::vector<const NamedInfo*> tensors;
  bool has_metadata = false;
  const auto add = [&](const std::string& name, const json& entry) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(entry, file);
      return !std::exchange(has_metadata, true);
    }
    const auto [added, fresh] = header.tensors.emplace(name, parse_entry(entry, {name}, file));
    if (fresh) tensors.push_back(&*added);
    return fresh;
  };
  parse_header(bytes.substr(static_cast<size_t>(kLengthBytes), static_cast<size_t>(length)), file, add);
  std::sort(tensors.begin(), tensors.end(), [](const NamedInfo* a, const NamedInfo* b) {
    return std::tie(a->second.begin, a->second.end, a->first) < std::tie(b->second.begin, b->second.end, b->first);
  });
  check_coverage(tensors, file_bytes - header.data_begin, file);
  header.names.reserve(tensors.size());
  for (const auto* tensor : tensors) header.names.push_back(tensor->first);
  return header;
}

std::string format_safetensors_header(const std::vector<std::pair<std::string, SafetensorsInfo>>& tensors,
                                      const std::map<std::string, std::string>& metadata, const std::string& file) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!metadata.empty()) root[std::string(kMetadataKey)] = metadata;
  auto& entries = root.get_ref<nlohmann::ordered_json::object_t&>();
  for (const auto& [name, info] : tensors) {
    nlohmann::ordered_json entry;
    entry["dtype"] = info.dtype;
    entry["shape"] = info.shape;
    entry["data_offsets"] = {info.begin, info.end};
    // Appended without the search for an equal key that operator[] makes: names are unique, and there may be many.
    static_cast<std::vector<std::pair<const std::string, nlohmann::ordered_json>>&>(entries).emplace_back(
        name, std::move(entry));
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const json::exception&) {
    fail(file, "can't write it: a tensor's name or a metadata text is not valid UTF-8.");
  }
  text.append(
      static_cast<size_t>((kHeaderAlignment - static_cast<int64_t>(text.size()) % kHeaderAlignment) % kHeaderAlignment),
      ' ');
  if (static_cast<int64_t>(text.size()) > kMaxHeaderBytes)
    fail(file,
         "can't write it: its header would take {} bytes, more than the format's limit of {}. Split the tensors over "
         "several files.",
         text.size(), kMaxHeaderBytes);
  const auto length = static_cast<uint64_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof length).append(text);
}

}  // namespace accelerate::formats
