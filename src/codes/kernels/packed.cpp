#include "codes/kernels/packed.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include <ATen/ops/empty.h>

#include "memory/huge_pages.hpp"
#include "utils/parallel.hpp"

namespace accelerate::codes::kernels {
namespace {

using Byte = unsigned char;

/// Part of a row's block: units of `unit` bytes of 16 rows take turns.
struct PackedSection {
  int64_t bytes, unit;
  bool are_fifth_bits = false;
};

/// Blocks of a row: its sections lie one after another.
struct Blocks {
  int64_t columns, bytes;
  std::array<PackedSection, 5> sections;
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

uint32_t turn_fifth_bits_back(uint32_t turned) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 8; ++i)
    for (uint32_t j = 0; j < 4; ++j) bits |= (turned >> (8 * j + i) & 1) << (4 * i + j);
  return bits;
}

/// Moves 32 columns in 16 bytes: bitsandbytes has neighbours in one byte, the even one above; GGUF and we the columns j
/// and j + 16, the first one below.
void nibbles_from_neighbours(const Byte* from, Byte* to) {
  for (int64_t i = 0; i < 8; ++i) {
    const Byte first = from[i], second = from[i + 8];
    to[2 * i] = static_cast<Byte>(first >> 4 | (second & 0xF0));
    to[2 * i + 1] = static_cast<Byte>((first & 15) | second << 4);
  }
}
void neighbours_from_nibbles(const Byte* from, Byte* to) {
  for (int64_t i = 0; i < 8; ++i) {
    const Byte even = from[2 * i], odd = from[2 * i + 1];
    to[i] = static_cast<Byte>(even << 4 | (odd & 15));
    to[i + 8] = static_cast<Byte>((even & 0xF0) | odd >> 4);
  }
}

/// Rows of a group, within it.
struct Range {
  int64_t begin, end;
};
struct AllRows {
  static constexpr int64_t begin = 0, end = kGroup;  // NOLINT(readability-identifier-naming): those of a Range
};

/// Moves a section of `bytes` of each row to where it lies in a group, or back.
template <bool kPack, int kUnit, class Rows>
void move_section(Rows range, int64_t bytes, Byte* const* rows, Byte* packed) {
  for (int64_t at = 0; at < bytes; at += kUnit, packed += kUnit * kGroup) {
    for (int64_t r = range.begin; r < range.end; ++r) {
      Byte *const plain = rows[r] + at, *const place = packed + r * kUnit;
      std::memcpy(kPack ? place : plain, kPack ? plain : place, kUnit);
    }
  }
}

template <bool kPack, class Rows> void move_fifth_bits(Rows range, Byte* const* rows, Byte* packed) {
  for (int64_t r = range.begin; r < range.end; ++r) {
    Byte *const plain = rows[r], *const place = packed + r * 4;
    uint32_t four = 0;
    std::memcpy(&four, kPack ? plain : place, 4);
    four = kPack ? turn_fifth_bits(four) : turn_fifth_bits_back(four);
    std::memcpy(kPack ? place : plain, &four, 4);
  }
}

/// Rows of a group, of `blocks` blocks each. @param rows  16 of them, of which those in range are looked at
/// @param packed  where the group begins
template <bool kPack, class Rows>
void move_rows(const Blocks& form, int64_t blocks, Rows range, std::array<Byte*, kGroup> rows, Byte* packed) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (const auto& section : form.sections) {
      if (section.bytes == 0) break;
      if (section.are_fifth_bits) move_fifth_bits<kPack>(range, rows.data(), packed);
      else if (section.unit == 4) move_section<kPack, 4>(range, section.bytes, rows.data(), packed);
      else if (section.unit == 2) move_section<kPack, 2>(range, section.bytes, rows.data(), packed);
      else move_section<kPack, 1>(range, section.bytes, rows.data(), packed);
      for (auto& row : rows) row += section.bytes;
      packed += section.bytes * kGroup;
    }
  }
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

std::optional<GroupForm> form_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::q4_0:
      return GroupForm::q4_0;
    case Encoding::q4_1:
      return GroupForm::q4_1;
    case Encoding::q5_0:
      return GroupForm::q5_0;
    case Encoding::q5_1:
      return GroupForm::q5_1;
    case Encoding::q8_0:
      return GroupForm::q8_0;
    case Encoding::q4_k:
      return GroupForm::q4_k;
    case Encoding::q5_k:
      return GroupForm::q5_k;
    case Encoding::q6_k:
      return GroupForm::q6_k;
    case Encoding::int8_rowwise:
      return GroupForm::bytes;
    case Encoding::nf4:
    case Encoding::fp4:
      return GroupForm::table;
    case Encoding::q2_k:
    case Encoding::q3_k:
      return std::nullopt;
  }
  return std::nullopt;
}

namespace {

/// How a row lies in Codes::data, and whether it does so in a group.
struct RowForm {
  const Blocks& blocks;
  int64_t count;   ///< of blocks
  int64_t bytes;   ///< of a row in a group
  int64_t stored;  ///< of a row of Codes::data
  bool is_copied;  ///< the two differ in more than their places

  explicit RowForm(const Packed& packed)
      : blocks(kBlocks[static_cast<size_t>(packed.form)]),
        count(packed.k / blocks.columns),
        bytes(count * blocks.bytes),
        stored(packed.form == GroupForm::bytes ? packed.columns : bytes),
        is_copied(packed.form == GroupForm::table || stored != bytes) {}

  void into_group(GroupForm form, const Byte* from, Byte* to) const {
    if (form == GroupForm::table)
      for (int64_t at = 0; at < bytes; at += 16) nibbles_from_neighbours(from + at, to + at);
    else std::fill(std::copy_n(from, stored, to), to + bytes, Byte{0});
  }
  void from_group(GroupForm form, const Byte* from, Byte* to) const {
    if (form == GroupForm::table)
      for (int64_t at = 0; at < bytes; at += 16) neighbours_from_nibbles(from + at, to + at);
    else std::copy_n(from, stored, to);
  }
};

}  // namespace

bool can_be_packed(const Codes& codes) {
  return form_of(codes.encoding) && (!is_four_bit(codes.encoding) || codes.columns() % codes.block_size == 0);
}

std::optional<Packed> pack(const Codes& codes) {
  if (!can_be_packed(codes)) return std::nullopt;
  const auto form = form_of(codes.encoding);
  const int64_t columns = codes.columns();
  Packed packed{.form = *form, .n = codes.rows(), .columns = columns, .k = (columns + kPart - 1) / kPart * kPart};
  const RowForm row(packed);
  packed.codes = empty_in_huge_pages({groups_of(packed.n), row.bytes * kGroup}, at::kByte);
  if (*form == GroupForm::table) {
    packed.unit = fill_table(codes.encoding, packed.table);
    packed.period = codes.block_size / kPart;
  } else if (*form == GroupForm::bytes) {
    packed.unit = 1.0F / 127;
    packed.period = packed.k / kPart;
  }
  at::Tensor plain;
  int64_t periods = 0;
  if (packed.period > 0) {
    periods = packed.k / kPart / packed.period;
    plain = plain_scales(codes).contiguous();
    packed.scales = empty_in_huge_pages({packed.groups(), periods, kGroup}, at::kFloat);
  }
  auto* const data = static_cast<Byte*>(const_cast<void*>(codes.data.const_data_ptr()));  // only read
  const auto* const factors = plain.defined() ? plain.const_data_ptr<float>() : nullptr;
  auto* const to = packed.codes.mutable_data_ptr<Byte>();
  auto* const scales = plain.defined() ? packed.scales.mutable_data_ptr<float>() : nullptr;
  parallel_ranges(packed.groups(), 8, [&](int64_t begin, int64_t end) {
    std::vector<Byte> copies(static_cast<size_t>(row.is_copied ? kGroup * row.bytes : 0));
    std::vector<Byte> zeros(static_cast<size_t>(end * kGroup > packed.n ? row.bytes : 0));
    for (int64_t group = begin; group < end; ++group) {
      std::array<Byte*, kGroup> rows{};
      for (int64_t r = 0; r < kGroup; ++r) {
        const int64_t index = group * kGroup + r;
        if (index >= packed.n) {
          rows[r] = zeros.data();
        } else if (row.is_copied) {
          rows[r] = copies.data() + r * row.bytes;
          row.into_group(*form, data + index * row.stored, rows[r]);
        } else {
          rows[r] = data + index * row.stored;
        }
        for (int64_t i = 0; i < periods; ++i)
          scales[(group * periods + i) * kGroup + r] = index < packed.n ? factors[index * periods + i] : 0;
      }
      move_rows<true>(row.blocks, row.count, AllRows(), rows, to + group * row.bytes * kGroup);
    }
  });
  return packed;
}

void unpack(const Packed& packed, int64_t first, int64_t count, void* data) {
  const RowForm row(packed);
  auto* const to = static_cast<Byte*>(data);
  auto* const from = const_cast<Byte*>(packed.codes.const_data_ptr<Byte>());  // only read
  const int64_t first_group = first / kGroup, groups = count > 0 ? (first + count - 1) / kGroup + 1 - first_group : 0;
  parallel_ranges(groups, 8, [&](int64_t begin, int64_t end) {
    std::vector<Byte> copies(static_cast<size_t>(row.is_copied ? kGroup * row.bytes : 0));
    for (int64_t group = first_group + begin; group < first_group + end; ++group) {
      const Range range{std::max<int64_t>(first - group * kGroup, 0),
                        std::min<int64_t>(first + count - group * kGroup, kGroup)};
      std::array<Byte*, kGroup> rows{};
      for (int64_t r = range.begin; r < range.end; ++r)
        rows[r] = row.is_copied ? copies.data() + r * row.bytes : to + (group * kGroup + r - first) * row.stored;
      auto* const place = from + group * row.bytes * kGroup;
      if (range.begin == 0 && range.end == kGroup) move_rows<false>(row.blocks, row.count, AllRows(), rows, place);
      else move_rows<false>(row.blocks, row.count, range, rows, place);
      for (int64_t r = range.begin; row.is_copied && r < range.end; ++r)
        row.from_group(packed.form, rows[r], to + (group * kGroup + r - first) * row.stored);
    }
  });
}

at::Tensor unpacked_scales(const Packed& packed, int64_t first, int64_t count) {
  const int64_t periods = packed.k / kPart / packed.period;
  at::Tensor scales = at::empty({count * periods}, at::TensorOptions().dtype(at::kFloat));
  const auto* const from = packed.scales.const_data_ptr<float>();
  auto* to = scales.mutable_data_ptr<float>();
  for (int64_t r = first; r < first + count; ++r)
    for (int64_t i = 0; i < periods; ++i) *to++ = from[(r / kGroup * periods + i) * kGroup + r % kGroup];
  return scales;
}

at::Tensor columns_of_bytes(const Packed& packed, const at::Tensor& columns) {
  const int64_t count = columns.numel();
  at::Tensor values = at::empty({packed.n, count}, at::TensorOptions().dtype(at::kFloat));
  const auto* const from = reinterpret_cast<const signed char*>(packed.codes.const_data_ptr<Byte>());
  const at::Tensor indices = columns.contiguous();
  const auto* const wanted = indices.const_data_ptr<int64_t>();
  auto* const to = values.mutable_data_ptr<float>();
  for (int64_t n = 0; n < packed.n; ++n)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t group = n / kGroup, quad = wanted[i] / 4;
      to[n * count + i] = from[group * packed.codes.size(1) + (quad * kGroup + n % kGroup) * 4 + wanted[i] % 4];
    }
  return values;
}

}  // namespace accelerate::codes::kernels
