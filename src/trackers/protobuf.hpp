#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

/// Fields of protocol buffers, written by hand since few are needed: LibTorch exports symbols of protobuf that a second
/// copy would clash with. Messages are fields behind each other. Source:
/// https://protobuf.dev/programming-guides/encoding
namespace accelerate::protobuf {

static_assert(std::endian::native == std::endian::little, "numbers are little-endian there");

template <class T> std::string raw(T value) { return {reinterpret_cast<const char*>(&value), sizeof(T)}; }

inline std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
inline std::string key(int field, int wire_type) { return varint(static_cast<uint64_t>(field << 3 | wire_type)); }

inline std::string whole(int field, int64_t value) { return key(field, 0) + varint(static_cast<uint64_t>(value)); }
inline std::string real(int field, double value) { return key(field, 1) + raw(value); }
inline std::string real(int field, float value) { return key(field, 5) + raw(value); }
/// Texts, bytes, messages, and packed lists.
inline std::string bytes(int field, std::string_view value) {
  return key(field, 2).append(varint(value.size())).append(value);
}

}  // namespace accelerate::protobuf
