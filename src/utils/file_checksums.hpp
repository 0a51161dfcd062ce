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

/// What moves 16 bytes on past so many: powers of x modulo the polynomial, for the halves of them, reflected, times x.
constexpr std::array<uint64_t, 2> make_powers(uint32_t reflected_polynomial, int bytes) {
  const auto power = [&](int exponent) {
    uint32_t rest = uint32_t{1} << 31;
    for (int i = 0; i < exponent; ++i) rest = rest >> 1 ^ (rest & 1 ? reflected_polynomial : 0);
    return uint64_t{rest} << 1;
  };
  return {power(8 * bytes + 32), power(8 * bytes - 32)};
}

struct Polynomial {
  constexpr explicit Polynomial(uint32_t reflected)
      : tables(make_tables(reflected)),
        by_256(make_powers(reflected, 256)),
        by_64(make_powers(reflected, 64)),
        by_16(make_powers(reflected, 16)) {}
  Tables tables;
  std::array<uint64_t, 2> by_256, by_64, by_16;
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
/// Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009).
#define ACCELERATE_PRODUCTS __attribute__((target("pclmul,sse4.1")))
ACCELERATE_PRODUCTS inline __m128i powers(const std::array<uint64_t, 2>& of) {
  return _mm_set_epi64x(static_cast<int64_t>(of[1]), static_cast<int64_t>(of[0]));
}
ACCELERATE_PRODUCTS inline __m128i load(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
ACCELERATE_PRODUCTS inline __m128i moved(__m128i value, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11));
}
/// What is left of 64 bytes, which stand for all before `rest`, and of these. @param rest  a multiple of 16
ACCELERATE_PRODUCTS inline uint32_t remainder(const __m128i (&last)[4], std::string_view rest,
                                              const Polynomial& polynomial) {
  const __m128i by_16 = powers(polynomial.by_16);
  __m128i all = last[0];
  for (size_t i = 1; i < 4; ++i) all = _mm_xor_si128(moved(all, by_16), last[i]);
  for (; rest.size() >= 16; rest.remove_prefix(16)) all = _mm_xor_si128(moved(all, by_16), load(rest.data()));
  std::array<char, 16> bytes{};  // whose remainder is that of all of them
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes.data()), all);
  return by_table(0, {bytes.data(), bytes.size()}, polynomial);
}
/// @param bytes  64 or more, a multiple of 16
ACCELERATE_PRODUCTS inline uint32_t by_products(uint32_t state, std::string_view bytes, const Polynomial& polynomial) {
  const __m128i by_64 = powers(polynomial.by_64);
  const char* at = bytes.data();
  __m128i last[] = {load(at), load(at + 16), load(at + 32), load(at + 48)};
  last[0] = _mm_xor_si128(last[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  for (bytes.remove_prefix(64); bytes.size() >= 64; bytes.remove_prefix(64))
    for (size_t i = 0; i < 4; ++i) last[i] = _mm_xor_si128(moved(last[i], by_64), load(bytes.data() + 16 * i));
  return remainder(last, bytes, polynomial);
}
#undef ACCELERATE_PRODUCTS

/// The same four times as wide. @param bytes  256 or more, a multiple of 16
#define ACCELERATE_PRODUCTS __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))
ACCELERATE_PRODUCTS inline __m512i wide_powers(const std::array<uint64_t, 2>& of) {
  return _mm512_set4_epi64(static_cast<int64_t>(of[1]), static_cast<int64_t>(of[0]), static_cast<int64_t>(of[1]),
                           static_cast<int64_t>(of[0]));
}
ACCELERATE_PRODUCTS inline __m512i wide_load(const char* from) { return _mm512_loadu_si512(from); }
ACCELERATE_PRODUCTS inline __m512i wide_moved(__m512i value, __m512i by) {
  return _mm512_xor_si512(_mm512_clmulepi64_epi128(value, by, 0x00), _mm512_clmulepi64_epi128(value, by, 0x11));
}
ACCELERATE_PRODUCTS inline uint32_t by_wide_products(uint32_t state, std::string_view bytes,
                                                     const Polynomial& polynomial) {
  const __m512i by_256 = wide_powers(polynomial.by_256), by_64 = wide_powers(polynomial.by_64);
  const char* at = bytes.data();
  __m512i a = wide_load(at), b = wide_load(at + 64), c = wide_load(at + 128), d = wide_load(at + 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  for (bytes.remove_prefix(256); bytes.size() >= 256; bytes.remove_prefix(256)) {
    at = bytes.data();
    a = _mm512_xor_si512(wide_moved(a, by_256), wide_load(at));
    b = _mm512_xor_si512(wide_moved(b, by_256), wide_load(at + 64));
    c = _mm512_xor_si512(wide_moved(c, by_256), wide_load(at + 128));
    d = _mm512_xor_si512(wide_moved(d, by_256), wide_load(at + 192));
  }
  a = _mm512_xor_si512(wide_moved(a, by_64), b);
  a = _mm512_xor_si512(wide_moved(a, by_64), c);
  a = _mm512_xor_si512(wide_moved(a, by_64), d);
  for (; bytes.size() >= 64; bytes.remove_prefix(64))
    a = _mm512_xor_si512(wide_moved(a, by_64), wide_load(bytes.data()));
  char last[64];
  _mm512_storeu_si512(last, a);
  return remainder({load(last), load(last + 16), load(last + 32), load(last + 48)}, bytes, polynomial);
}
#undef ACCELERATE_PRODUCTS
#endif

inline uint32_t extend(uint32_t state, std::string_view bytes, const Polynomial& polynomial) {
#if defined(__x86_64__)
  static const bool has_products = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  static const bool has_wide =
      has_products && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
  if (const size_t whole = bytes.size() / 16 * 16; has_products && whole >= 64) {
    const auto by = has_wide && whole >= 256 ? by_wide_products : by_products;
    state = by(state, bytes.substr(0, whole), polynomial);
    bytes.remove_prefix(whole);
  }
#endif
  return by_table(state, bytes, polynomial);
}

}  // namespace crc

namespace crc32c {

inline constexpr crc::Polynomial kPolynomial(0x82F63B78);
inline uint32_t extend(uint32_t state, std::string_view bytes) { return crc::extend(state, bytes, kPolynomial); }
inline uint32_t of(std::string_view bytes) { return ~extend(~uint32_t{0}, bytes); }

}  // namespace crc32c

/// The checksum that records of a zip carry (ISO 3309's polynomial). The register is as above.
namespace crc32 {

inline constexpr crc::Polynomial kPolynomial(0xEDB88320);
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
