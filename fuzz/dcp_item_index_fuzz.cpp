#include <algorithm>
#include <cstdlib>
#include <string>

#include "accelerate/utils/error.hpp"
#include "formats/dcp/item_index.hpp"
#include "utils/file_checksums.hpp"

namespace {

// A file ends with an index of items that lie before it, which can be written and reads the same, or is a
// CheckpointError.
void read(const std::string& bytes) {
  using namespace accelerate;
  using namespace accelerate::formats;
  try {
    const auto index = read_item_index(InputFile("fuzz", bytes));
    const auto again = format_item_index(index);
    if (!bytes.ends_with(again)) std::abort();
    const auto before = static_cast<int64_t>(bytes.size() - again.size());
    for (const auto& item : index.items) {
      if (item.offset < 0 || item.length <= 0 || item.offset > before - item.length) std::abort();
      if (index.find(item.entry, item.box_number) != &item) std::abort();
    }
  } catch (const CheckpointError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  read(bytes);
  // With the end that it should have, so that something is behind it; the first byte says how many are items.
  if (bytes.empty()) return 0;
  const size_t items = std::min<size_t>(static_cast<uint8_t>(bytes[0]), bytes.size());
  std::string index = bytes.substr(items);
  const auto put = [&](uint64_t number, int count) {
    for (int i = 0; i < count; ++i) index.push_back(static_cast<char>(number >> 8 * i & 0xFF));
  };
  put(index.size(), 8);
  put(1, 4);
  put(accelerate::crc32c::of(index), 4);
  read(bytes.substr(0, items) + index + "ACCITEMS");
  return 0;
}
