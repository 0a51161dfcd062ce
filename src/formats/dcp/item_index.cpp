#include "formats/dcp/item_index.hpp"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "utils/file_checksums.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

constexpr std::string_view kIndexMagic = "ACCITEMS";
constexpr uint32_t kIndexVersion = 1;
constexpr size_t kIndexedItemBytes = 24, kIndexHeaderBytes = 24, kIndexFooterBytes = 24;

/// Numbers are little-endian, whatever the machine.
void put_number(std::string& bytes, uint64_t number, int count) {
  for (int i = 0; i < count; ++i) bytes.push_back(static_cast<char>(number >> 8 * i & 0xFF));
}
uint64_t take_number(std::string_view& bytes, size_t count) {
  uint64_t number = 0;
  for (size_t i = 0; i < count; ++i) number |= uint64_t{static_cast<uint8_t>(bytes[i])} << 8 * i;
  bytes.remove_prefix(count);
  return number;
}

auto place_in_index(const DcpIndexedItem& item) { return std::pair(item.entry, item.box_number); }

}  // namespace

const DcpIndexedItem* DcpItemIndex::find(size_t entry, int64_t box_number) const {
  const auto wanted = std::pair(static_cast<uint32_t>(entry), static_cast<uint32_t>(box_number));
  const auto found = std::lower_bound(items.begin(), items.end(), wanted,
                                      [](const auto& item, const auto& at) { return place_in_index(item) < at; });
  return found == items.end() || place_in_index(*found) != wanted ? nullptr : &*found;
}

std::string format_item_index(const DcpItemIndex& index) {
  std::string bytes;
  put_number(bytes, static_cast<uint64_t>(index.rank), 8);
  put_number(bytes, index.items.size(), 8);
  put_number(bytes, index.layout, 4);
  put_number(bytes, 0, 4);
  for (const auto& item : index.items) {
    put_number(bytes, item.entry, 4), put_number(bytes, item.box_number, 4);
    put_number(bytes, static_cast<uint64_t>(item.offset), 8), put_number(bytes, static_cast<uint64_t>(item.length), 8);
  }
  put_number(bytes, bytes.size(), 8);
  put_number(bytes, kIndexVersion, 4);
  put_number(bytes, crc32c::of(bytes), 4);
  return bytes.append(kIndexMagic);
}

DcpItemIndex read_item_index(const InputFile& file) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>(
        "the index of '{}': {}. The file is truncated or damaged, or of another save: copy the "
        "checkpoint again.",
        file.path().string(), fmt::format(what, std::forward<Args>(args)...));
  };
  // Nobody else has to look at these bytes: the index has a checksum of its own.
  std::string footer(kIndexFooterBytes, '\0');
  const int64_t size = file.size(), footer_at = size - static_cast<int64_t>(kIndexFooterBytes);
  if (footer_at < static_cast<int64_t>(kIndexHeaderBytes))
    fail("found {} bytes, expected at least {}", size, kIndexHeaderBytes + kIndexFooterBytes);
  file.peek(footer_at, footer.data(), static_cast<int64_t>(kIndexFooterBytes));
  if (!footer.ends_with(kIndexMagic)) fail("found none at the end, expected one");
  std::string_view rest = footer;
  const uint64_t length = take_number(rest, 8);
  const auto version = static_cast<uint32_t>(take_number(rest, 4)),
             checksum = static_cast<uint32_t>(take_number(rest, 4));
  if (version != kIndexVersion) fail("found version {}, and this program reads version {}", version, kIndexVersion);
  if (length < kIndexHeaderBytes || (length - kIndexHeaderBytes) % kIndexedItemBytes != 0 ||
      length > static_cast<uint64_t>(footer_at))
    fail("found a length of {} bytes, expected {}, some times {}, and at most the {} before it", length,
         kIndexHeaderBytes, kIndexedItemBytes, footer_at);
  std::string bytes(length, '\0');
  const int64_t begin = footer_at - static_cast<int64_t>(length);
  file.peek(begin, bytes.data(), static_cast<int64_t>(length));
  bytes.append(footer, 0, 12);
  if (const auto found = crc32c::of(bytes); found != checksum)
    fail("found the checksum {:08x}, expected {:08x}", found, checksum);

  rest = bytes;
  DcpItemIndex index;
  index.rank = static_cast<int64_t>(take_number(rest, 8));
  const uint64_t count = take_number(rest, 8);
  index.layout = static_cast<uint32_t>(take_number(rest, 4));
  if (const auto unknown = take_number(rest, 4); unknown != 0) fail("found {} where 0 is expected", unknown);
  if (index.rank < 0 || count != (length - kIndexHeaderBytes) / kIndexedItemBytes)
    fail("found {} items of rank {} in {} bytes, expected {}", count, index.rank, length,
         (length - kIndexHeaderBytes) / kIndexedItemBytes);
  index.items.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    DcpIndexedItem item;
    item.entry = static_cast<uint32_t>(take_number(rest, 4)),
    item.box_number = static_cast<uint32_t>(take_number(rest, 4));
    item.offset = static_cast<int64_t>(take_number(rest, 8)), item.length = static_cast<int64_t>(take_number(rest, 8));
    if (item.offset < 0 || item.length <= 0 || item.offset > begin || item.length > begin - item.offset)
      fail("item {} has offset {} and length {}, expected a part of the {} bytes before it", i, item.offset,
           item.length, begin);
    if (i > 0 && place_in_index(item) <= place_in_index(index.items.back()))
      fail("item {} is box {} of entry {}, expected one behind box {} of entry {}", i, item.box_number, item.entry,
           index.items.back().box_number, index.items.back().entry);
    index.items.push_back(item);
  }
  return index;
}

}  // namespace accelerate::formats
