#include "codes/encodings.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>

#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

struct EncodingRow {
  std::string_view name;
  uint32_t gguf_id;
};
constexpr uint32_t kNotGguf = ~0U;

/// In Encoding's order.
constexpr std::array<EncodingRow, kEncodings> kRows{{{"int8_rowwise", kNotGguf},
                                                     {"nf4", kNotGguf},
                                                     {"fp4", kNotGguf},
                                                     {"q4_0", 2},
                                                     {"q4_1", 3},
                                                     {"q5_0", 6},
                                                     {"q5_1", 7},
                                                     {"q8_0", 8},
                                                     {"q2_k", 10},
                                                     {"q3_k", 11},
                                                     {"q4_k", 12},
                                                     {"q5_k", 13},
                                                     {"q6_k", 14}}};

const EncodingRow& row_of(Encoding encoding) { return kRows[static_cast<size_t>(encoding)]; }

}  // namespace

std::string_view name(Encoding encoding) { return row_of(encoding).name; }

std::optional<Encoding> encoding_named(std::string_view name) {
  const auto same = [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); };
  for (size_t i = 0; i < kRows.size(); ++i)
    if (std::ranges::equal(kRows[i].name, name, same)) return static_cast<Encoding>(i);
  return std::nullopt;
}

const formats::GgufEncoding& gguf_encoding(Encoding encoding) {
  if (!is_gguf(encoding)) raise<InternalError>("codes: {} is no encoding of GGUF files", name(encoding));
  return *formats::find_gguf_encoding(row_of(encoding).gguf_id);
}

}  // namespace accelerate::codes
