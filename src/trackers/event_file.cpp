#include "trackers/event_file.hpp"

#include "trackers/record.hpp"
#include "utils/raise.hpp"

#include <unistd.h>

#include <array>
#include <bit>

namespace accelerate {
namespace {

static_assert(std::endian::native == std::endian::little, "records are little-endian");

uint32_t crc32c(const std::string& bytes) {
  static const auto table = [] {
    std::array<uint32_t, 256> entries{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? (value >> 1) ^ 0x82F63B78u : value >> 1;
      entries[i] = value;
    }
    return entries;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (const unsigned char byte : bytes) crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8);
  return crc ^ 0xFFFFFFFFu;
}

/// The format stores checksums rotated and offset, so that a checksum of data that holds checksums stays meaningful.
uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

template <class T> std::string raw(T value) { return {reinterpret_cast<const char*>(&value), sizeof(T)}; }

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

// Wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
std::string key(int field, int wire_type) { return varint(static_cast<uint64_t>(field << 3 | wire_type)); }
std::string bytes_field(int field, const std::string& bytes) { return key(field, 2) + varint(bytes.size()) + bytes; }

std::string file_name() {
  char host[256] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  return fmt::format("events.out.tfevents.{}.{}.{}.0", static_cast<int64_t>(wall_time()), host, ::getpid());
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder) : path_(folder / file_name()), out_(path_, std::ios::binary) {
  record(key(1, 1) + raw(wall_time()) +
         bytes_field(3, "brain.Event:2"));  // every file begins with the version of the format
  out_.flush();
}

void EventFile::scalar(const std::string& tag, double value, int64_t step) {
  const std::string entry = bytes_field(1, tag) + key(2, 5) + raw(static_cast<float>(value));
  record(key(1, 1) + raw(wall_time()) + key(2, 0) + varint(static_cast<uint64_t>(step)) +
         bytes_field(5, bytes_field(1, entry)));
}

void EventFile::record(const std::string& event) {
  const std::string length = raw(static_cast<uint64_t>(event.size()));
  out_ << length << raw(masked(crc32c(length))) << event << raw(masked(crc32c(event)));
  if (!out_)
    raise<CheckpointError>(
        "tensorboard: writing '{}' failed; check that the folder may be written to and the disk is not full",
        path_.string());
}

}  // namespace accelerate
