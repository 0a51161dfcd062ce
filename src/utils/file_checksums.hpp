#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

/// Checksums of files: CRC-32C (Castagnoli's polynomial, RFC 3720, appendix B.4), one for each part of a fixed size, so
/// that who reads some of a file checks some of it. Needs no LibTorch.
namespace accelerate {

namespace crc32c {

/// tables[0][b]: the remainder of the byte b; tables[k][b]: of b with k zero bytes behind it, so that eight bytes take
/// eight lookups that don't wait for each other.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables(uint32_t reflected_polynomial) {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? reflected_polynomial : 0);
    tables[0][byte] = rest;
  }
  for (size_t k = 1; k < tables.size(); ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 0xFF];
  return tables;
}
inline constexpr Tables kTables = make_tables(0x82F63B78);

/// The register behind these bytes, which begins and ends inverted.
inline uint32_t by_table(uint32_t state, std::string_view bytes, const Tables& tables = kTables) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    const uint32_t first = state ^ (at(0) | uint32_t{at(1)} << 8 | uint32_t{at(2)} << 16 | uint32_t{at(3)} << 24);
    state = tables[7][first & 0xFF] ^ tables[6][first >> 8 & 0xFF] ^ tables[5][first >> 16 & 0xFF] ^
            tables[4][first >> 24] ^ tables[3][at(4)] ^ tables[2][at(5)] ^ tables[1][at(6)] ^ tables[0][at(7)];
  }
  for (const char byte : bytes) state = state >> 8 ^ tables[0][(state ^ static_cast<uint8_t>(byte)) & 0xFF];
  return state;
}

#if defined(__x86_64__)
/// The same by SSE4.2's instruction, for who has asked whether the processor has it.
__attribute__((target("sse4.2"))) inline uint32_t by_instruction(uint32_t state, std::string_view bytes) {
  uint64_t wide = state;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    uint64_t eight;
    std::memcpy(&eight, bytes.data(), sizeof eight);
    wide = _mm_crc32_u64(wide, eight);
  }
  state = static_cast<uint32_t>(wide);
  for (const char byte : bytes) state = _mm_crc32_u8(state, static_cast<uint8_t>(byte));
  return state;
}
#endif

inline uint32_t extend(uint32_t state, std::string_view bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return by_instruction(state, bytes);
#endif
  return by_table(state, bytes);
}

inline uint32_t of(std::string_view bytes) { return ~extend(~uint32_t{0}, bytes); }

}  // namespace crc32c

/// The checksum that records of a zip carry (ISO 3309's polynomial). The register is as above.
namespace crc32 {

inline constexpr crc32c::Tables kTables = crc32c::make_tables(0xEDB88320);
inline uint32_t extend(uint32_t state, std::string_view bytes) { return crc32c::by_table(state, bytes, kTables); }

}  // namespace crc32

/// What a file is known by.
struct FileChecksums {
  int64_t bytes = 0;
  std::vector<uint32_t> parts;  ///< of each part, the last of which may be shorter; none of an empty file
  bool operator==(const FileChecksums&) const = default;
};

inline constexpr int64_t kChecksumPartBytes = int64_t{4} << 20;

/// How many parts so many bytes are.
inline int64_t parts_of_bytes(int64_t bytes, int64_t part_bytes) {
  return bytes / part_bytes + (bytes % part_bytes != 0);
}

/// Makes them of bytes that come one after the other.
class ChecksumsInTurn {
 public:
  void add(std::string_view bytes) {
    while (!bytes.empty()) {
      const int64_t into_part = sums_.bytes % kChecksumPartBytes;
      const auto now = bytes.substr(0, static_cast<size_t>(kChecksumPartBytes - into_part));
      if (into_part == 0) sums_.parts.push_back(crc32c::of({}));
      sums_.parts.back() = ~crc32c::extend(~sums_.parts.back(), now);
      sums_.bytes += static_cast<int64_t>(now.size());
      bytes.remove_prefix(now.size());
    }
  }
  FileChecksums take() { return std::exchange(sums_, {}); }

 private:
  FileChecksums sums_;
};

}  // namespace accelerate
