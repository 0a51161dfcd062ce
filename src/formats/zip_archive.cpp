#include "formats/zip_archive.hpp"

#include <algorithm>
#include <array>
#include <string_view>

#include "formats/pickle.hpp"

namespace accelerate::formats {
namespace {

template <class T> T little_endian(std::string_view bytes, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
  return static_cast<T>(value);
}

// Zip, as PKWARE's APPNOTE describes it: sizes of its parts and their first bytes.
constexpr std::string_view kEnd = "PK\5\6", kEnd64 = "PK\6\6", kEnd64Locator = "PK\6\7", kDirectoryEntry = "PK\1\2",
                           kLocalHeader = "PK\3\4";
constexpr uint64_t kEndBytes = 22, kEnd64Bytes = 56, kEnd64LocatorBytes = 20, kEntryBytes = 46, kLocalBytes = 30,
                   kLongestComment = 65535;

/// The CRC-32 of zips (ISO 3309), of bytes that follow others. @param sum  of those before
uint32_t extend_crc32(uint32_t sum, std::string_view bytes) { return ~crc32::extend(~sum, bytes); }

}  // namespace

ZipArchive::ZipArchive(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length, std::string source,
                       Look look)
    : file_(std::move(file)),
      begin_(offset),
      length_(static_cast<uint64_t>(length)),
      source_(std::move(source)),
      look_(look) {
  // Before a comment, and archives of torch.save have none.
  std::string tail;
  size_t end = std::string::npos;
  for (const uint64_t most : {kEnd64LocatorBytes + kEndBytes, kEndBytes + kLongestComment}) {
    tail = read(length_ - std::min(length_, most), std::min(length_, most));
    end = tail.rfind(kEnd);
    if (end != std::string::npos && (end >= kEnd64LocatorBytes || tail.size() == length_)) break;
  }
  if (end == std::string::npos || tail.size() - end < kEndBytes) fail("it has no directory of a zip at its end");
  uint64_t count = little_endian<uint16_t>(tail, end + 10), size = little_endian<uint32_t>(tail, end + 12),
           begin = little_endian<uint32_t>(tail, end + 16);
  if (end >= kEnd64LocatorBytes && std::string_view(tail).substr(end - kEnd64LocatorBytes).starts_with(kEnd64Locator)) {
    const auto large = read(little_endian<uint64_t>(tail, end - kEnd64LocatorBytes + 8), kEnd64Bytes);
    if (!large.starts_with(kEnd64)) fail("the end of its directory is not where it says");
    count = little_endian<uint64_t>(large, 32), size = little_endian<uint64_t>(large, 40),
    begin = little_endian<uint64_t>(large, 48);
  }
  const auto directory = read(begin, size);
  for (uint64_t at = 0; count > 0; --count) {
    const auto rest = std::string_view(directory).substr(at);
    if (rest.size() < kEntryBytes || !rest.starts_with(kDirectoryEntry))
      fail("its directory ends before its last entry");
    const uint64_t name_bytes = little_endian<uint16_t>(rest, 28), extra_bytes = little_endian<uint16_t>(rest, 30),
                   all = kEntryBytes + name_bytes + extra_bytes + little_endian<uint16_t>(rest, 32);
    if (rest.size() < all) fail("its directory ends before its last entry");
    Entry entry{.header = little_endian<uint32_t>(rest, 42),
                .size = little_endian<uint32_t>(rest, 24),
                .crc32 = little_endian<uint32_t>(rest, 16),
                .stored = little_endian<uint16_t>(rest, 10) == 0};
    // Numbers that don't fit are in an extra field, in this order.
    auto extra = rest.substr(kEntryBytes + name_bytes, extra_bytes);
    while (extra.size() >= 4) {
      const uint64_t field_bytes = std::min<uint64_t>(little_endian<uint16_t>(extra, 2), extra.size() - 4);
      auto field = extra.substr(4, field_bytes);
      const auto take = [&](uint64_t& number) {
        if (field.size() < 8) fail("a large record has no size");
        number = little_endian<uint64_t>(field, 0), field.remove_prefix(8);
      };
      if (little_endian<uint16_t>(extra, 0) == 1) {
        uint64_t compressed = little_endian<uint32_t>(rest, 20);
        for (uint64_t* number : {&entry.size, &compressed, &entry.header})
          if (*number == 0xffffffff) take(*number);
      }
      extra.remove_prefix(4 + field_bytes);
    }
    const auto name = rest.substr(kEntryBytes, name_bytes);
    entries_.insert_or_assign(std::string(name.substr(name.find('/') + 1)), entry);
    at += all;
  }
}

void ZipArchive::refuse(const std::string& what) const {
  raise<CheckpointError>(
      "{}: bytes {} to {} are not an intact archive of torch.save ({}). The file is damaged or of another save: copy "
      "it "
      "again, or save again.",
      source_, begin_, static_cast<uint64_t>(begin_) + length_, what);
}

std::string ZipArchive::read(uint64_t begin, uint64_t size, Look look) const {
  if (size > Pickle::kMaxBytes)
    fail("its pickle or its directory has {} bytes, expected at most {}", size, Pickle::kMaxBytes);
  if (begin > length_ || size > length_ - begin)
    fail("byte {} to {} of {} were expected", begin, begin + size, length_);
  std::string bytes(size, '\0');
  const int64_t at = begin_ + static_cast<int64_t>(begin), count = static_cast<int64_t>(size);
  if (look == Look::peeks) file_->peek(at, bytes.data(), count);
  else file_->read(at, bytes.data(), count);
  return bytes;
}

ZipArchive::Bytes ZipArchive::record(const std::string& name, Look look) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail("it has no record '{}'", name);
  if (!found->second.stored)
    raise<CheckpointError>("{}: the record '{}' is compressed, which torch.save never does.", source_, name);
  const auto header = read(found->second.header, kLocalBytes, look);
  if (!header.starts_with(kLocalHeader)) fail("the record '{}' is not where its directory says", name);
  const uint64_t data =
      found->second.header + kLocalBytes + little_endian<uint16_t>(header, 26) + little_endian<uint16_t>(header, 28);
  if (data > length_ || found->second.size > length_ - data)
    raise<CheckpointError>("{}: the record '{}' reaches beyond its archive. The file is damaged.", source_, name);
  const Bytes place{begin_ + static_cast<int64_t>(data), static_cast<int64_t>(found->second.size),
                    static_cast<int64_t>(data - found->second.header)};
  if (place.size > 0 && found->second.crc32 != 0 && file_->wants_records() &&
      !file_->expect_record(name, place.begin, place.size, found->second.crc32))
    fail("the record '{}' lies in the place of another", name);
  return place;
}

std::string ZipArchive::text(const std::string& name, uint64_t most) const {
  const auto place = record(name);
  if (static_cast<uint64_t>(place.size) > most)
    fail("its record '{}' has {} bytes, expected at most {}", name, place.size, most);
  return read(static_cast<uint64_t>(place.begin - begin_), static_cast<uint64_t>(place.size));
}

bool ZipArchive::check(const std::string& name) const {
  const auto place = record(name);
  const auto expected = entries_.at(name).crc32;
  if (expected == 0) return place.size == 0;
  constexpr int64_t kPart = int64_t{4} << 20;
  std::string part;
  uint32_t sum = 0;
  for (int64_t done = 0; done < place.size; done += kPart) {
    part.resize(static_cast<size_t>(std::min(kPart, place.size - done)));
    file_->read(place.begin + done, part.data(), static_cast<int64_t>(part.size()));
    sum = extend_crc32(sum, part);
  }
  if (sum != expected)
    raise<CheckpointError>(
        "{}: the record '{}' (bytes {} to {}) is damaged: its checksum is {:08x}, and {:08x} when it was written. Copy "
        "the file again.",
        source_, name, place.begin, place.begin + place.size - 1, sum, expected);
  return true;
}

}  // namespace accelerate::formats
