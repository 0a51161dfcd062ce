#include "formats/safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "formats/safetensors_dtypes.hpp"
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

std::string show_range(const SafetensorsInfo& info) { return fmt::format("[{}, {})", info.begin, info.end); }

/// A value in a message: short, whatever a hostile file holds.
std::string show(const json& value) {
  auto text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 60) text.replace(57, std::string::npos, "...");
  return text;
}

/// Refuses while parsing what the JSON library lets pass: keys that occur twice (it keeps the last) and deep nesting
/// (memory).
class StrictKeys {
 public:
  explicit StrictKeys(const std::string& file) : file_(file) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    constexpr int kDeepest = 3;  // header > tensor > shape > number
    if (depth > kDeepest)
      fail(file_,
           "the header is nested deeper than tensors, their fields and lists of numbers. It is damaged or no "
           "safetensors header.");
    if (event == json::parse_event_t::object_start) {
      if (keys_.size() <= static_cast<size_t>(depth)) keys_.resize(static_cast<size_t>(depth) + 1);
      keys_[static_cast<size_t>(depth)].clear();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_[static_cast<size_t>(depth) - 1].insert(key).second)
        fail(file_,
             "the key {} occurs twice in one object of the header, so which one holds is open. Write the file again "
             "with unique names.",
             show(parsed));
    }
    return true;
  }

 private:
  const std::string& file_;
  std::vector<std::set<std::string>> keys_;
};

json parse_json(std::string_view text, const std::string& file) {
  if (text.empty() || text.front() != '{')
    fail(file,
         "the header does not start with '{{'. A safetensors header is one JSON object; is this a file of another "
         "format?");
  // The JSON library takes a NUL for the end of its input and would ignore what follows.
  if (text.find('\0') != std::string_view::npos)
    fail(file, "the header holds a NUL byte; it must be JSON padded with spaces. The file is damaged.");
  try {
    return json::parse(text, StrictKeys(file));
  } catch (const json::exception& error) {
    const std::string_view detail = error.what();
    if (detail.find("UTF-8") != std::string_view::npos)
      fail(file, "the header is not valid UTF-8 ({}). The file is damaged.", detail);
    fail(file, "the header is not valid JSON ({}). The file is damaged or of another format.", detail);
  }
}

int64_t as_count(const json& value, const std::string& what, const std::string& file) {
  if (!value.is_number_integer())
    fail(file, "{} holds {}, which is not an integer that fits in 64 bits.", what, show(value));
  if (!value.is_number_unsigned()) fail(file, "{} holds the negative number {}.", what, show(value));
  const auto count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail(file, "{} holds {}, which is larger than 2^63 - 1.", what, show(value));
  return static_cast<int64_t>(count);
}

const json& field(const json& entry, const char* key, const std::string& what, const std::string& file) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail(file, "{} has no field '{}'; needed are dtype, shape and data_offsets.", what, key);
  return *found;
}

/// Bytes that the shape needs, with every step checked.
int64_t byte_size(const SafetensorsInfo& info, const SafetensorsDtype& dtype, const std::string& what,
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
    fail(file, "{} has shape {} of {}, whose size in bytes overflows 64 bits. The header is damaged.", what, info.shape,
         info.dtype);
  if (empty) return 0;
  if (bits % 8 != 0)
    fail(file, "{} has shape {} of {}, which does not end on a whole byte.", what, info.shape, info.dtype);
  return bits / 8;
}

SafetensorsInfo parse_entry(const json& entry, const std::string& what, const std::string& file) {
  if (!entry.is_object())
    fail(file, "{} is described by {}, expected an object with dtype, shape and data_offsets.", what, show(entry));
  SafetensorsInfo info;
  const auto& dtype = field(entry, "dtype", what, file);
  if (!dtype.is_string()) fail(file, "{} has the dtype {}, expected a name such as \"F32\".", what, show(dtype));
  info.dtype = dtype.get<std::string>();
  const auto* row = find_dtype(info.dtype);
  if (!row)
    fail(file, "{} has the unknown dtype {}. The file may come from a newer writer; convert it to a known dtype.", what,
         show(dtype));

  const auto& shape = field(entry, "shape", what, file);
  if (!shape.is_array()) fail(file, "{} has the shape {}, expected a list of sizes.", what, show(shape));
  info.shape.reserve(shape.size());
  for (const auto& size : shape) info.shape.push_back(as_count(size, what + ": its shape", file));

  const auto& offsets = field(entry, "data_offsets", what, file);
  if (!offsets.is_array() || offsets.size() != 2)
    fail(file, "{} has the data_offsets {}, expected two integers: begin and end.", what, show(offsets));
  info.begin = as_count(offsets[0], what + ": its data_offsets", file);
  info.end = as_count(offsets[1], what + ": its data_offsets", file);
  if (info.begin > info.end) fail(file, "{} begins at byte {}, after its end at {}.", what, info.begin, info.end);

  const int64_t needed = byte_size(info, *row, what, file);
  if (info.end - info.begin != needed)
    fail(file,
         "{} covers the bytes {}, which are {}, but shape {} of {} needs {}. The header is damaged or its writer is at "
         "fault.",
         what, show_range(info), info.end - info.begin, info.shape, info.dtype, needed);
  return info;
}

std::map<std::string, std::string> parse_metadata(const json& entries, const std::string& file) {
  std::map<std::string, std::string> metadata;
  if (entries.is_null()) return metadata;
  if (!entries.is_object()) fail(file, "__metadata__ is {}, expected an object of strings.", show(entries));
  for (const auto& [key, value] : entries.items()) {
    if (!value.is_string())
      fail(file, "__metadata__ has for '{}' the value {}, but only strings are allowed there.", key, show(value));
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

/// The tensors must fill the data section from its first byte to its last, each byte once.
void check_coverage(const SafetensorsHeader& header, int64_t data_bytes, const std::string& file) {
  int64_t covered = 0;
  const std::string* before = nullptr;
  for (const auto& name : header.names) {
    const auto& info = header.tensors.at(name);
    if (info.begin < covered)
      fail(file, "tensor '{}' at bytes {} overlaps tensor '{}', which ends at {}. The header is damaged.", name,
           show_range(info), *before, covered);
    if (info.begin > covered)
      fail(file, "the bytes [{}, {}) before tensor '{}' belong to no tensor; holes are not allowed.", covered,
           info.begin, name);
    covered = info.end;
    before = &name;
  }
  if (covered > data_bytes)
    fail(file,
         "tensor '{}' ends at byte {} of the data, but the file holds only {} bytes of data. It is probably truncated: "
         "copy or download it again.",
         *before, covered, data_bytes);
  if (covered < data_bytes)
    fail(file,
         "the last {} of the {} bytes of data belong to no tensor. Something was appended, or the header is that of "
         "another file.",
         data_bytes - covered, data_bytes);
}

}  // namespace

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
  const auto root = parse_json(bytes.substr(static_cast<size_t>(kLengthBytes), static_cast<size_t>(length)), file);
  for (const auto& [name, entry] : root.items()) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(entry, file);
    } else {
      header.tensors.emplace(name, parse_entry(entry, "tensor '" + name + "'", file));
      header.names.push_back(name);
    }
  }
  const auto by_place = [&](const std::string& a, const std::string& b) {
    const auto& left = header.tensors.at(a);
    const auto& right = header.tensors.at(b);
    return std::tie(left.begin, left.end, a) < std::tie(right.begin, right.end, b);
  };
  std::sort(header.names.begin(), header.names.end(), by_place);
  check_coverage(header, file_bytes - header.data_begin, file);
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
