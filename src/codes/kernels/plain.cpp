#include "codes/kernels/product_loops.hpp"

// For any processor: a vector is one row, four columns in a word of 32 bits.

namespace accelerate::codes::kernels {
namespace {

struct PlainVectors {
  static constexpr int kRows = 1;
  static constexpr int kTile = 1;
  static constexpr float kWideOffset = 0;
  using Bytes = uint32_t;
  using Ints = int32_t;
  using Floats = float;
  using Small = Byte;
  using Entries = const Byte*;

  static Bytes load(const Byte* from) {
    Bytes four = 0;
    __builtin_memcpy(&four, from, sizeof four);
    return four;
  }
  static Small load_small(const Byte* from) { return *from; }
  static Bytes bits(Bytes a, int mask) { return a & static_cast<uint32_t>(mask) * 0x01010101U; }
  static Small bits(Small a, int mask) { return static_cast<Small>(a & mask); }
  static Bytes either(Bytes a, Bytes b) { return a | b; }
  static Small either(Small a, Small b) { return a | b; }
  static Bytes right(Bytes a, int by) { return a >> by; }
  static Small right(Small a, int by) { return static_cast<Small>(a >> by); }
  static Bytes left(Bytes a, int by) { return a << by; }
  static Entries table(const Byte* entries) { return entries; }
  static Bytes look_up(Entries entries, Bytes indices) {
    Bytes found = 0;
    for (int i = 0; i < 32; i += 8) found |= static_cast<Bytes>(entries[indices >> i & 15]) << i;
    return found;
  }
  static Ints zero() { return 0; }
  static Ints dot(Ints sum, Bytes codes, int32_t x) {
    for (int i = 0; i < 32; i += 8)
      sum += static_cast<int32_t>(codes >> i & 255) * static_cast<signed char>(static_cast<uint32_t>(x) >> i & 255);
    return sum;
  }
  static Bytes wide(Bytes codes) { return codes; }
  static Ints dot_wide(Ints sum, Bytes codes, int32_t x) {
    for (int i = 0; i < 32; i += 8)
      sum += static_cast<signed char>(codes >> i & 255) * static_cast<signed char>(static_cast<uint32_t>(x) >> i & 255);
    return sum;
  }
  static Ints sum(Ints a, Ints b) { return a + b; }
  static Ints all_ints(int32_t a) { return a; }
  static Ints times_128(Ints a) { return a * 128; }
  static Floats to_floats_of(Ints a) { return static_cast<float>(a); }
  static Floats to_floats(Small a) { return a; }
  static Floats to_signed_floats(Small a) { return static_cast<signed char>(a); }
  static Floats halves(const Byte* from) {
    const uint32_t bits = from[0] | static_cast<uint32_t>(from[1]) << 8, rest = bits & 0x7FFF;
    const uint32_t number = rest >= 0x7C00 ? (rest << 13) + (224U << 23) : (rest << 13) + (112U << 23);
    float value = 0;
    __builtin_memcpy(&value, &number, sizeof value);
    if (rest < 0x400) value = static_cast<float>(rest) * 0x1p-24F;  // subnormal
    return bits & 0x8000 ? -value : value;
  }
  static Floats numbers(const float* from) { return *from; }
  static Floats all(float a) { return a; }
  static Floats negative(Floats a) { return -a; }
  static Floats times(Floats a, Floats b) { return a * b; }
  static Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
  static void store(float* to, Floats a) { *to = a; }

  static constexpr int kNumbers = 2;  // that numbers_of_halves() makes
  struct Sixteen {
    float values[16];
  };
  static Sixteen sixteen(const float* table, float scale) {
    Sixteen made;
    for (int i = 0; i < 16; ++i) made.values[i] = table[i] * scale;
    return made;
  }
  static void numbers_of_halves(const Sixteen& sixteen, const Byte* from, float* to) {
    to[0] = sixteen.values[*from >> 4];
    to[1] = sixteen.values[*from & 15];
  }

  static float quantize_part(const float* x, signed char* to, int32_t* sums) {
    float largest = 0, undefined = 0;
    for (int i = 0; i < kPart; ++i) {
      const float magnitude = __builtin_fabsf(x[i]);
      largest = magnitude > largest ? magnitude : largest;
      undefined += x[i] - x[i];
    }
    const float inverse = largest > kSmallest ? 127 / largest : 0;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < kPart; ++i) {
      const float scaled = undefined == 0 ? x[i] * inverse : 0;
      to[i] = static_cast<signed char>(__builtin_nearbyintf(scaled));
      sums[i / 16] += to[i];
    }
    return largest / 127 + undefined;
  }
};

constexpr InstructionSet kInstructions = instructions<PlainVectors>("plain");

}  // namespace

const InstructionSet& plain_instructions() { return kInstructions; }

}  // namespace accelerate::codes::kernels
