#include "formats/safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "accelerate/utils/error.hpp"
#include "formats/safetensors_dtypes.hpp"

namespace accelerate::formats {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and tensors are mapped as they are");

[[noreturn]] void fail(const std::string& file, const std::string& what) {
  throw CheckpointError("safetensors file '" + file + "': " + what);
}

std::string show(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text.append(text.size() > 1 ? ", " : "").append(std::to_string(size));
  return text.append("]");
}

std::string show_range(const SafetensorsInfo& info) {
  return std::string("[").append(std::to_string(info.begin)).append(", ").append(std::to_string(info.end)).append(")");
}

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
        fail(file_, "the key " + show(parsed) +
                        " occurs twice in one object of the header, so which one holds is open. Write the file again "
                        "with unique names.");
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
         "the header does not start with '{'. A safetensors header is one JSON object; is this a file of another "
         "format?");
  // The JSON library takes a NUL for the end of its input and would ignore what follows.
  if (text.find('\0') != std::string_view::npos)
    fail(file, "the header holds a NUL byte; it must be JSON padded with spaces. The file is damaged.");
  try {
    return json::parse(text, StrictKeys(file));
  } catch (const json::exception& error) {
    const std::string_view detail = error.what();
    if (detail.find("UTF-8") != std::string_view::npos)
      fail(file, "the header is not valid UTF-8 (" + std::string(detail) + "). The file is damaged.");
    fail(file, "the header is not valid JSON (" + std::string(detail) + "). The file is damaged or of another format.");
  }
}

int64_t as_count(const json& value, const std::string& what, const std::string& file) {
  if (!value.is_number_integer())
    fail(file, what + " holds " + show(value) + ", which is not an integer that fits in 64 bits.");
  if (!value.is_number_unsigned()) fail(file, what + " holds the negative number " + show(value) + ".");
  const auto count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail(file, what + " holds " + show(value) + ", which is larger than 2^63 - 1.");
  return static_cast<int64_t>(count);
}

const json& field(const json& entry, const char* key, const std::string& what, const std::string& file) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail(file, what + " has no field '" + key + "'; needed are dtype, shape and data_offsets.");
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
    fail(file, what + " has shape " + show(info.shape) + " of " + info.dtype +
                   ", whose size in bytes overflows 64 bits. The header is damaged.");
  if (empty) return 0;
  if (bits % 8 != 0)
    fail(file, what + " has shape " + show(info.shape) + " of " + info.dtype + ", which does not end on a whole byte.");
  return bits / 8;
}

SafetensorsInfo parse_entry(const json& entry, const std::string& what, const std::string& file) {
  if (!entry.is_object())
    fail(file, what + " is described by " + show(entry) + ", expected an object with dtype, shape and data_offsets.");
  SafetensorsInfo info;
  const auto& dtype = field(entry, "dtype", what, file);
  if (!dtype.is_string()) fail(file, what + " has the dtype " + show(dtype) + ", expected a name such as \"F32\".");
  info.dtype = dtype.get<std::string>();
  const auto* row = find_dtype(info.dtype);
  if (!row)
    fail(file, what + " has the unknown dtype " + show(dtype) +
                   ". The file may come from a newer writer; convert it to a known dtype.");

  const auto& shape = field(entry, "shape", what, file);
  if (!shape.is_array()) fail(file, what + " has the shape " + show(shape) + ", expected a list of sizes.");
  info.shape.reserve(shape.size());
  for (const auto& size : shape) info.shape.push_back(as_count(size, what + ": its shape", file));

  const auto& offsets = field(entry, "data_offsets", what, file);
  if (!offsets.is_array() || offsets.size() != 2)
    fail(file, what + " has the data_offsets " + show(offsets) + ", expected two integers: begin and end.");
  info.begin = as_count(offsets[0], what + ": its data_offsets", file);
  info.end = as_count(offsets[1], what + ": its data_offsets", file);
  if (info.begin > info.end)
    fail(file, what + " begins at byte " + std::to_string(info.begin) + ", after its end at " +
                   std::to_string(info.end) + ".");

  const int64_t needed = byte_size(info, *row, what, file);
  if (info.end - info.begin != needed)
    fail(file, what + " covers the bytes " + show_range(info) + ", which are " + std::to_string(info.end - info.begin) +
                   ", but shape " + show(info.shape) + " of " + info.dtype + " needs " + std::to_string(needed) +
                   ". The header is damaged or its writer is at fault.");
  return info;
}

std::map<std::string, std::string> parse_metadata(const json& entries, const std::string& file) {
  std::map<std::string, std::string> metadata;
  if (entries.is_null()) return metadata;
  if (!entries.is_object()) fail(file, "__metadata__ is " + show(entries) + ", expected an object of strings.");
  for (const auto& [key, value] : entries.items()) {
    if (!value.is_string())
      fail(file,
           "__metadata__ has for '" + key + "' the value " + show(value) + ", but only strings are allowed there.");
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
      fail(file, "tensor '" + name + "' at bytes " + show_range(info) + " overlaps tensor '" + *before +
                     "', which ends at " + std::to_string(covered) + ". The header is damaged.");
    if (info.begin > covered)
      fail(file, "the bytes [" + std::to_string(covered) + ", " + std::to_string(info.begin) + ") before tensor '" +
                     name + "' belong to no tensor; holes are not allowed.");
    covered = info.end;
    before = &name;
  }
  if (covered > data_bytes)
    fail(file, "tensor '" + *before + "' ends at byte " + std::to_string(covered) +
                   " of the data, but the file holds only " + std::to_string(data_bytes) +
                   " bytes of data. It is probably truncated: copy or download it again.");
  if (covered < data_bytes)
    fail(file,
         "the last " + std::to_string(data_bytes - covered) + " of the " + std::to_string(data_bytes) +
             " bytes of data belong to no tensor. Something was appended, or the header is that of another file.");
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view bytes, int64_t file_bytes, const std::string& file) {
  if (file_bytes < kLengthBytes)
    fail(file, "it has " + std::to_string(file_bytes) + " bytes, but the length of the header alone takes " +
                   std::to_string(kLengthBytes) + ". It is empty or truncated: copy or download it again.");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > static_cast<uint64_t>(kMaxHeaderBytes))
    fail(file, "its header claims " + std::to_string(length) + " bytes, more than the format's limit of " +
                   std::to_string(kMaxHeaderBytes) + ". It is probably no safetensors file.");
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes)
    fail(file, "its header claims " + std::to_string(length) + " bytes, but only " +
                   std::to_string(file_bytes - kLengthBytes) +
                   " follow. It is probably truncated: copy or download it again.");

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
    fail(file, "can't write it: its header would take " + std::to_string(text.size()) +
                   " bytes, more than the format's limit of " + std::to_string(kMaxHeaderBytes) +
                   ". Split the tensors over several files.");
  const auto length = static_cast<uint64_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof length).append(text);
}

}  // namespace accelerate::formats
