#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "accelerate/bigmodel/sizes.hpp"
#include "accelerate/config.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

struct DtypeBits {
  std::string_view name;
  int64_t bits;
};

/// bool is one bit, although LibTorch stores a byte: the reference counts it so. The last three are no tensor types;
/// quantised weights are sized with them.
constexpr DtypeBits kDtypes[] = {
    {"float32", 32},
    {"float16", 16},
    {"bfloat16", 16},
    {"float64", 64},
    {"int64", 64},
    {"int32", 32},
    {"int16", 16},
    {"int8", 8},
    {"uint8", 8},
    {"bool", 1},
    {"uint16", 16},
    {"uint32", 32},
    {"uint64", 64},
    {"float8_e4m3fn", 8},
    {"float8_e5m2", 8},
    {"float8_e4m3fnuz", 8},
    {"float8_e5m2fnuz", 8},
    {"float8_e8m0fnu", 8},
    {"complex32", 32},
    {"complex64", 64},
    {"complex128", 128},
    {"float4_e2m1fn_x2", 8},
    {"fp8", 8},
    {"int4", 4},
    {"int2", 2},
};

struct ByteUnit {
  std::string_view name;  ///< in capitals
  double bytes;
};
constexpr ByteUnit kUnits[] = {{"GIB", 1073741824.0}, {"MIB", 1048576.0}, {"KIB", 1024.0},
                               {"GB", 1e9},           {"MB", 1e6},        {"KB", 1e3}};

/// Without what Python's float() also takes: spaces around it, a leading plus, underscores between digits ("1_000").
std::string plain_number(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  const auto digit_at = [&](size_t i) { return i < text.size() && std::isdigit(static_cast<unsigned char>(text[i])); };
  std::string number;
  for (size_t i = 0; i < text.size(); ++i)
    if (!(text[i] == '_' && i > 0 && digit_at(i - 1) && digit_at(i + 1))) number += text[i];
  return number;
}

}  // namespace

double dtype_byte_size(std::string_view dtype) {
  constexpr std::string_view kPrefix = "torch.";
  if (dtype.starts_with(kPrefix)) dtype.remove_prefix(kPrefix.size());
  for (const auto& row : kDtypes)
    if (row.name == dtype) return static_cast<double>(row.bits) / 8;
  std::vector<std::string> names;
  for (const auto& row : kDtypes) names.emplace_back(row.name);
  const auto nearest = nearest_name(dtype, names);
  raise<ConfigError>(
      "there is no dtype '{}'{}", dtype,
      nearest ? fmt::format(". Did you mean '{}'?", *nearest) : "; use PyTorch's name, like float32 or bfloat16.");
}

int64_t convert_file_size_to_int(std::string_view size) {
  const auto fail = [&]() -> int64_t {
    raise<ConfigError>(
        "'{}' is no size. Use a number of bytes, or a number of 0 or more with one of the units GB, MB, KB, GiB, MiB, "
        "KiB, like '5.0GB'.",
        size);
  };
  std::string upper;
  for (const char c : size) upper += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  for (const auto& unit : kUnits) {
    if (!upper.ends_with(unit.name)) continue;
    const std::string digits = plain_number(size.substr(0, size.size() - unit.name.size()));
    double number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) return fail();
    const double bytes = number * unit.bytes;
    if (!(bytes >= 0 && bytes < static_cast<double>(std::numeric_limits<int64_t>::max()))) return fail();
    // A small b is for bits, but in "GiB" the reference takes it for bytes, and so do people.
    const bool bits = size.back() == 'b' && unit.name.size() == 2;
    return bits ? static_cast<int64_t>(bytes) / 8 : static_cast<int64_t>(bytes);
  }
  return fail();
}

std::string convert_bytes(double bytes) {
  const auto number = [](double value, bool whole) {
    std::array<char, 64> text{};
    if (whole && value == std::floor(value)) {
      std::snprintf(text.data(), text.size(), "%.0f", value);
      return std::string(text.data());
    }
    std::snprintf(text.data(), text.size(), "%.2f", value);
    std::string result(text.data());
    if (result.ends_with("0"))
      result.pop_back();  // two decimals at most and one at least, as Python prints a rounded float
    return result;
  };
  constexpr const char* kNames[] = {"bytes", "KB", "MB", "GB", "TB"};
  for (const char* name : kNames) {
    if (bytes < 1024) return number(bytes, name == kNames[0]) + " " + name;
    bytes /= 1024;
  }
  return number(bytes, false) + " PB";
}

}  // namespace accelerate
