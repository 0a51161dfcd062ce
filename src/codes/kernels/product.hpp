#pragma once

#include <cstdint>

// Declarations that the files compiled for one instruction set share with the rest: plain structs, pointers and no
// templates of the standard library, because the linker might take their instances from such a file for code that runs
// on any processor.

namespace accelerate::codes::kernels {

constexpr int64_t kGroup = 16;  ///< rows of a weight that are computed together, interleaved
constexpr int64_t kPart = 32;   ///< columns for which a row of inputs has one scale

/// How codes lie in a group. The first eight are GGUF's blocks; the scales of the others lie apart.
enum class GroupForm : uint8_t {
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q4_k,
  q5_k,
  q6_k,
  bytes,  ///< 32 signed bytes of each row
  table,  ///< 4 bits that stand for a number in a table, in the order of q4_0
};
constexpr int kForms = 10;

/// y = x w^T for codes in groups of 16 rows, and inputs as signed bytes.
struct Product {
  const unsigned char* codes = nullptr;  ///< [groups][k / columns of a block][16 * bytes of a block]
  int64_t group_bytes = 0;
  const float* scales = nullptr;         ///< bytes, table: [groups][k / (kPart * period)][16]
  int64_t period = 0;                    ///< parts that share such a scale
  const unsigned char* table = nullptr;  ///< of 14 bits: 16 upper halves, then 16 lower halves of 7 bits each
  int64_t n = 0;                         ///< rows of the weight, up to 15 less than the groups have
  int64_t k = 0;                         ///< columns, a multiple of kPart
  const signed char* inputs = nullptr;   ///< [rows of x][k]
  const int16_t* words = nullptr;        ///< the same as words, for InstructionSet::table_takes_words
  const float* input_scales = nullptr;   ///< [rows of x][k / kPart]
  const float* input_sums = nullptr;     ///< [rows of x][k / kPart][InstructionSet::sums]
  const int32_t* whole_sums = nullptr;   ///< [rows of x]: what InstructionSet::whole_product adds
  float* y = nullptr;                    ///< [rows of x][n]
};

/// The products that one instruction set offers. A weight is scale * code + least, or scale * (code - offset).
struct InstructionSet {
  const char* name;
  /// x = scale * input for each part, rounded to the nearest. A NaN or an infinite number makes its scale NaN.
  /// @param columns  of x; those from there to `k` become 0
  /// @param unit  by which scales are multiplied
  /// @param sums  of a part: 1, or 2 for halves of it  @param factor  by which sums of scale * input are multiplied
  void (*quantize)(const float* x, int64_t columns, int64_t k, float unit, int sums, float factor, signed char* inputs,
                   float* scales, float* input_sums);
  /// Columns [16 * group, 16 * group + 16) of rows [first, last) of y. By Form.
  void (*product[kForms])(const Product& product, int64_t group, int64_t first, int64_t last);
  /// By Form: 1 where weights have a least value, else the offset, negated.
  float factor[kForms];
  int sums[kForms];
  bool table_takes_words;  ///< products of Form::table read Product::words, and neither inputs nor input_sums
  /// As `product` for Form::bytes without scales, and some groups; sums are whole numbers of 32 bits.
  void (*whole_product)(const Product& product, int64_t group, int64_t groups, int64_t first, int64_t last);
  /// Two numbers of each byte, that of its upper half first: table[half] * scale.
  void (*four_bits)(const unsigned char* from, int64_t bytes, const float* table, float scale, float* to);
};

const InstructionSet& plain_instructions();
/// AVX2, FMA and F16C; null where the processor, or this build, has them not.
const InstructionSet* avx2_instructions();
/// AVX-512 (F, BW, VL) with VNNI; null as above. A processor with AVX-512 but without VNNI takes AVX2.
const InstructionSet* avx512_instructions();

}  // namespace accelerate::codes::kernels
