#include "formats/zip_writer.hpp"

#include <c10/util/hash.h>
#include <fmt/format.h>

#include <algorithm>

#include "accelerate/utils/error.hpp"
#include "utils/file_checksums.hpp"

namespace accelerate::formats {
namespace {

constexpr uint64_t kMost32 = 0xffffffff;
constexpr uint64_t kAlignment = 64;
constexpr uint32_t kRecordMark = 0x04034b50, kSumsMark = 0x08074b50, kEntryMark = 0x02014b50, kEnd64Mark = 0x06064b50,
                   kLocatorMark = 0x07064b50, kEndMark = 0x06054b50;
constexpr uint16_t kUtf8 = 0x0800, kSumsBehind = 0x0008;

template <class T> void put_little(std::string& to, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) to.push_back(static_cast<char>(value >> 8 * i & 0xff));
}
uint32_t at_most_32(uint64_t value) { return static_cast<uint32_t>(std::min(value, kMost32)); }

/// The extra field of what does not fit into 32 bits; empty: all fits.
std::string wide_sizes(uint64_t bytes, uint64_t stored, uint64_t begin) {
  if (bytes < kMost32 && begin < kMost32) return {};
  std::string sizes;
  if (bytes >= kMost32) put_little(sizes, bytes), put_little(sizes, stored);
  if (begin >= kMost32) put_little(sizes, begin);
  std::string field;
  put_little(field, uint16_t{1}), put_little(field, static_cast<uint16_t>(sizes.size()));
  return field + sizes;
}

uint16_t flags_of(uint64_t bytes) { return bytes > 0 ? kUtf8 | kSumsBehind : kUtf8; }

}  // namespace

void ZipWriter::write(const std::string& bytes) {
  write_(bytes);
  position_ += bytes.size();
}

void ZipWriter::record(const std::string& short_name, int64_t bytes, const std::function<void(const Write&)>& pieces) {
  Entry entry{"archive/" + short_name, static_cast<uint64_t>(bytes), position_, 0};
  const auto wide = wide_sizes(entry.bytes, 0, entry.begin);
  std::string header;
  put_little(header, kRecordMark), put_little(header, uint16_t{0}), put_little(header, flags_of(entry.bytes));
  header.append(2 + 2 + 2 + 4 + 4 + 4, '\0');  // method, time, date, and sums that come behind
  put_little(header, static_cast<uint16_t>(entry.name.size()));
  const uint64_t begin = position_ + header.size() + 2 + entry.name.size() + wide.size() + 4;
  const uint64_t padding = (kAlignment - begin % kAlignment) % kAlignment;
  put_little(header, static_cast<uint16_t>(wide.size() + 4 + padding));
  header += entry.name + wide + "FB";
  put_little(header, static_cast<uint16_t>(padding));
  header.append(padding, 'Z');
  write(header);

  uint32_t crc = ~uint32_t{0};
  uint64_t given = 0;
  pieces([&](std::string_view piece) {
    crc = crc32::extend(crc, piece);
    given += piece.size();
    write_(piece);
  });
  if (given != entry.bytes) throw InternalError("writing a torch archive: a record has another size than was said");
  position_ += given;
  if (given > 0) {
    entry.crc = ~crc;
    std::string behind;
    put_little(behind, kSumsMark), put_little(behind, entry.crc);
    if (wide.empty())
      put_little(behind, static_cast<uint32_t>(given)), put_little(behind, static_cast<uint32_t>(given));
    else put_little(behind, given), put_little(behind, given);
    write(behind);
    sums_ = c10::hash_combine(sums_, entry.crc);
  }
  names_.insert(short_name);
  entries_.push_back(std::move(entry));
}

void ZipWriter::record(const std::string& name, std::string_view bytes) {
  record(name, static_cast<int64_t>(bytes.size()), [&](const Write& take) { take(bytes); });
}

std::string ZipWriter::directory() const {
  std::string all;
  for (const auto& entry : entries_) {
    const auto wide = wide_sizes(entry.bytes, entry.bytes, entry.begin);
    put_little(all, kEntryMark), put_little(all, uint16_t{0}), put_little(all, uint16_t{0}),
        put_little(all, flags_of(entry.bytes));
    all.append(2 + 2 + 2, '\0');  // method, time, date
    put_little(all, entry.crc), put_little(all, at_most_32(entry.bytes)), put_little(all, at_most_32(entry.bytes));
    put_little(all, static_cast<uint16_t>(entry.name.size())), put_little(all, static_cast<uint16_t>(wide.size()));
    all.append(2 + 2 + 2 + 4, '\0');  // comment, disk, attributes
    put_little(all, at_most_32(entry.begin));
    all += entry.name + wide;
  }
  return all;
}

void ZipWriter::finish() {
  record("version", "3\n");
  if (!names_.contains("byteorder")) record("byteorder", "little");
  uint64_t names = 0;
  for (const auto& name : names_) names = c10::hash_combine(names, c10::hash<std::string>{}(name));
  record(".data/serialization_id", fmt::format("{:020}{:020}", names, sums_));
  const uint64_t begin = position_, count = entries_.size();
  const auto entries = directory();
  std::string end;
  put_little(end, kEnd64Mark), put_little(end, uint64_t{44}), put_little(end, uint16_t{0x031e}),
      put_little(end, uint16_t{45});
  put_little(end, uint32_t{0}), put_little(end, uint32_t{0}), put_little(end, count), put_little(end, count);
  put_little(end, static_cast<uint64_t>(entries.size())), put_little(end, begin);
  put_little(end, kLocatorMark), put_little(end, uint32_t{0}), put_little(end, begin + entries.size()),
      put_little(end, uint32_t{1});
  const auto few = static_cast<uint16_t>(std::min<uint64_t>(count, 0xffff));
  put_little(end, kEndMark), put_little(end, uint16_t{0}), put_little(end, uint16_t{0}), put_little(end, few),
      put_little(end, few);
  put_little(end, at_most_32(entries.size())), put_little(end, at_most_32(begin)), put_little(end, uint16_t{0});
  write(entries);
  write(end);
}

}  // namespace accelerate::formats
