#include "codes/kernels/packed.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include "utils/parallel.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes::kernels {
namespace {

using Byte = unsigned char;

/// Part of a row's block: units of `unit` bytes of 16 rows take turns.
struct Section {
  int64_t bytes, unit;
  bool are_fifth_bits = false;
};

/// Blocks of a row: its sections lie one after another.
struct Blocks {
  int64_t columns, bytes;
  std::array<Section, 5> sections;
};

/// By Form. Numbers are interleaved one by one, codes four bytes by four: what one instruction multiplies and adds.
constexpr Blocks kBlocks[kForms] = {
    {32, 18, {{{2, 2}, {16, 4}}}},
    {32, 20, {{{2, 2}, {2, 2}, {16, 4}}}},
    {32, 22, {{{2, 2}, {4, 4, true}, {16, 4}}}},
    {32, 24, {{{2, 2}, {2, 2}, {4, 4, true}, {16, 4}}}},
    {32, 34, {{{2, 2}, {32, 4}}}},
    {256, 144, {{{2, 2}, {2, 2}, {12, 1}, {128, 4}}}},
    {256, 176, {{{2, 2}, {2, 2}, {12, 1}, {32, 4}, {128, 4}}}},
    {256, 210, {{{128, 4}, {64, 4}, {16, 1}, {2, 2}}}},
    {32, 32, {{{32, 4}}}},
    {32, 16, {{{16, 4}}}},
};

/// Bit 4 i + j of 32 becomes bit i of byte j: so shifts by the same distance find what four columns need.
uint32_t turn_fifth_bits(uint32_t bits) {
  uint32_t turned = 0;
  for (uint32_t i = 0; i < 8; ++i)
    for (uint32_t j = 0; j < 4; ++j) turned |= (bits >> (4 * i + j) & 1) << (8 * j + i);
  return turned;
}

/// Of 32 columns in 16 bytes: bitsandbytes has neighbours in one byte, the even one above; GGUF and we the columns j
/// and j + 16, the first one below.
void nibbles_from_neighbours(const Byte* from, Byte* to) {
  const auto column = [&](int i) { return i % 2 == 0 ? from[i / 2] >> 4 : from[i / 2] & 15; };
  for (int j = 0; j < 16; ++j) to[j] = static_cast<Byte>(column(j) | column(j + 16) << 4);
}

/// One row of a group, of `blocks` blocks. `packed` is where the group begins.
void pack_row(const Blocks& form, int64_t blocks, int64_t row, const Byte* plain, Byte* packed) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (const auto& section : form.sections) {
      Byte* to = packed + row * section.unit;
      for (int64_t at = 0; at < section.bytes; at += section.unit, to += section.unit * kGroup) {
        if (section.unit != 4) {
          std::memcpy(to, plain + at, static_cast<size_t>(section.unit));
          continue;
        }
        uint32_t four = 0;
        std::memcpy(&four, plain + at, sizeof four);
        if (section.are_fifth_bits) four = turn_fifth_bits(four);
        std::memcpy(to, &four, sizeof four);
      }
      plain += section.bytes;
      packed += section.bytes * kGroup;
    }
  }
}

/// Memory in pages of 2 MB where that pays: a product goes through all of it once, and would spend time on looking up
/// addresses.
at::Tensor empty_bytes(int64_t groups, int64_t bytes) {
  constexpr size_t kPage = 2 << 20;
  const auto size = static_cast<size_t>(groups * bytes);
  if (size < 2 * kPage) return at::empty({groups, bytes}, at::kByte);
  const size_t whole = (size + kPage - 1) / kPage * kPage;
  void* const memory = std::aligned_alloc(kPage, whole);
  if (!memory) raise<ResourceError>("codes: no memory for {} bytes of codes in the order of products.", whole);
#if defined(__linux__)
  (void)madvise(memory, whole, MADV_HUGEPAGE);  // without them it is slower, not wrong
#endif
  return at::from_blob(
      memory, {groups, bytes}, [](void* at) { std::free(at); }, at::kByte);
}

/// Numbers of 14 bits for a table from -1 to 1, as two times 7 bits, and what one is worth.
float fill_table(Encoding encoding, Byte* upper_and_lower) {
  // fp4's values are twelfths of 0 to 12 and one sixteenth: whole in this unit. nf4's are rounded by 6e-5.
  const float unit = encoding == Encoding::fp4 ? 42 * 192 : 8191;
  const auto values = table(encoding);
  for (size_t i = 0; i < 16; ++i) {
    const auto number = static_cast<uint32_t>(std::lround(values[i] * unit) + 8192);
    upper_and_lower[i] = static_cast<Byte>(number >> 7);
    upper_and_lower[i + 16] = static_cast<Byte>(number & 127);
  }
  return 1 / unit;
}

int64_t groups_of(int64_t rows) { return (rows + kGroup - 1) / kGroup; }

}  // namespace

std::optional<Form> form_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::q4_0:
      return Form::q4_0;
    case Encoding::q4_1:
      return Form::q4_1;
    case Encoding::q5_0:
      return Form::q5_0;
    case Encoding::q5_1:
      return Form::q5_1;
    case Encoding::q8_0:
      return Form::q8_0;
    case Encoding::q4_k:
      return Form::q4_k;
    case Encoding::q5_k:
      return Form::q5_k;
    case Encoding::q6_k:
      return Form::q6_k;
    case Encoding::int8_rowwise:
      return Form::bytes;
    case Encoding::nf4:
    case Encoding::fp4:
      return Form::table;
    case Encoding::q2_k:
    case Encoding::q3_k:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<Packed> pack(const Codes& codes) {
  const auto form = form_of(codes.encoding);
  const int64_t columns = codes.columns();
  if (!form || (is_four_bit(codes.encoding) && columns % codes.block_size != 0)) return std::nullopt;
  Packed packed{.form = *form, .n = codes.rows(), .columns = columns, .k = (columns + kPart - 1) / kPart * kPart};
  const auto& blocks = kBlocks[static_cast<size_t>(*form)];
  const int64_t count = packed.k / blocks.columns, row_bytes = count * blocks.bytes;
  packed.codes = empty_bytes(groups_of(packed.n), row_bytes * kGroup);
  if (*form == Form::table) {
    packed.unit = fill_table(codes.encoding, packed.table);
    packed.period = codes.block_size / kPart;
  } else if (*form == Form::bytes) {
    packed.unit = 1.0F / 127;
    packed.period = packed.k / kPart;
  }
  at::Tensor plain;
  int64_t periods = 0;
  if (packed.period > 0) {
    periods = packed.k / kPart / packed.period;
    plain = plain_scales(codes).contiguous();
    packed.scales = at::zeros({packed.groups(), periods, kGroup}, at::kFloat);
  }
  const auto* const data = static_cast<const Byte*>(codes.data.const_data_ptr());
  const auto* const factors = plain.defined() ? plain.const_data_ptr<float>() : nullptr;
  auto* const to = packed.codes.mutable_data_ptr<Byte>();
  auto* const scales = plain.defined() ? packed.scales.mutable_data_ptr<float>() : nullptr;
  const int64_t stored = *form == Form::bytes ? columns : row_bytes;  // of a row of Codes::data
  parallel_ranges(packed.groups(), 8, [&](int64_t begin, int64_t end) {
    std::vector<Byte> row(static_cast<size_t>(row_bytes));
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t r = 0; r < kGroup; ++r) {
        const int64_t index = group * kGroup + r;
        const Byte* from = row.data();
        if (index >= packed.n) std::fill(row.begin(), row.end(), Byte{0});
        else if (*form == Form::table)
          for (int64_t b = 0; b < count; ++b)
            nibbles_from_neighbours(data + index * stored + b * 16, row.data() + b * 16);
        else if (stored != row_bytes)
          std::fill(std::copy_n(data + index * stored, stored, row.begin()), row.end(), Byte{0});
        else from = data + index * stored;
        pack_row(blocks, count, r, from, to + group * row_bytes * kGroup);
        for (int64_t i = 0; index < packed.n && i < periods; ++i)
          scales[(group * periods + i) * kGroup + r] = factors[index * periods + i];
      }
    }
  });
  return packed;
}

}  // namespace accelerate::codes::kernels
