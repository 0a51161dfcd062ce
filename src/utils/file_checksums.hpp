#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/// Checksums of files: CRC-32C (Castagnoli's polynomial, RFC 3720, appendix B.4), one for each part of a fixed size, so
/// that who reads some of a file checks some of it. Needs no LibTorch.
namespace accelerate {

namespace crc {

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

struct Polynomial {
  Tables tables;
  /// Powers of x modulo the polynomial, reflected, times x: of 512 + 32, 512 - 32, 128 + 32 and 128 - 32.
  std::array<uint64_t, 2> by_64, by_16;
};

/// The register behind these bytes, which begins and ends inverted.
inline uint32_t by_table(uint32_t state, std::string_view bytes, const Polynomial& polynomial) {
  const Tables& tables = polynomial.tables;
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
/// The same by products without carries, for who has asked whether the processor has them: 64 bytes stand for all
/// before them, and are moved on by multiplying their halves with powers of x (V. Gopal and others, "Fast CRC
/// Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009). @param bytes  64 or more, a multiple of 16
__attribute__((target("pclmul,sse4.1"))) inline uint32_t by_products(uint32_t state, std::string_view bytes,
                                                                     const Polynomial& polynomial) {
  const auto load = [&bytes](size_t at) __attribute__((target("sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data() + at));
  };
  const auto moved = [](__m128i value, __m128i powers) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00), _mm_clmulepi64_si128(value, powers, 0x11));
  };
  const auto powers = [](const std::array<uint64_t, 2>& of) __attribute__((target("sse4.1"))) {
    return _mm_set_epi64x(static_cast<int64_t>(of[1]), static_cast<int64_t>(of[0]));
  };
  const __m128i by_64 = powers(polynomial.by_64), by_16 = powers(polynomial.by_16);
  __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(state))), b = load(16), c = load(32),
          d = load(48);
  for (bytes.remove_prefix(64); bytes.size() >= 64; bytes.remove_prefix(64)) {
    a = _mm_xor_si128(moved(a, by_64), load(0));
    b = _mm_xor_si128(moved(b, by_64), load(16));
    c = _mm_xor_si128(moved(c, by_64), load(32));
    d = _mm_xor_si128(moved(d, by_64), load(48));
  }
  a = _mm_xor_si128(moved(a, by_16), b);
  a = _mm_xor_si128(moved(a, by_16), c);
  a = _mm_xor_si128(moved(a, by_16), d);
  for (; bytes.size() >= 16; bytes.remove_prefix(16)) a = _mm_xor_si128(moved(a, by_16), load(0));
  std::array<char, 16> rest{};  // whose remainder is that of all of them
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest.data()), a);
  return by_table(0, {rest.data(), rest.size()}, polynomial);
}
#endif

inline uint32_t extend(uint32_t state, std::string_view bytes, const Polynomial& polynomial) {
#if defined(__x86_64__)
  static const bool has_products = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (const size_t whole = bytes.size() / 16 * 16; has_products && whole >= 64) {
    state = by_products(state, bytes.substr(0, whole), polynomial);
    bytes.remove_prefix(whole);
  }
#endif
  return by_table(state, bytes, polynomial);
}

}  // namespace crc

namespace crc32c {

inline constexpr crc::Polynomial kPolynomial{
    crc::make_tables(0x82F63B78), {0x0740eef02, 0x09e4addf8}, {0x0f20c0dfe, 0x0493c7d27}};
inline uint32_t extend(uint32_t state, std::string_view bytes) { return crc::extend(state, bytes, kPolynomial); }
inline uint32_t of(std::string_view bytes) { return ~extend(~uint32_t{0}, bytes); }

}  // namespace crc32c

/// The checksum that records of a zip carry (ISO 3309's polynomial). The register is as above.
namespace crc32 {

inline constexpr crc::Polynomial kPolynomial{
    crc::make_tables(0xEDB88320), {0x154442bd4, 0x1c6e41596}, {0x1751997d0, 0x0ccaa009e}};
inline uint32_t extend(uint32_t state, std::string_view bytes) { return crc::extend(state, bytes, kPolynomial); }

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
