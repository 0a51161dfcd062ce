#include <cstring>
#include <fstream>
#include <optional>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;

/// A file made of a header, data of some bytes and, where the true one would not do, a header length.
struct Damage {
  const char* name;
  std::string header;
  int64_t data_bytes = 0;
  const char* message;
  std::optional<uint64_t> length = std::nullopt;
};

std::string bytes_of(const Damage& damage) {
  const auto length = damage.length.value_or(damage.header.size());
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + damage.header + std::string(static_cast<size_t>(damage.data_bytes), 'x');
}

/// The message of loading a file with these bytes; every tensor is touched.
std::string outcome(const std::string& bytes) {
  const auto path = fs::path(support::scratch_dir()) / "damaged.safetensors";
  std::ofstream(path, std::ios::binary) << bytes;
  try {
    for (const auto& [name, tensor] : accelerate::load_safetensors(path)) static_cast<void>(tensor.clone());
  } catch (const accelerate::CheckpointError& error) {
    return error.what();
  }
  return "loaded";
}

const std::string kTwo =
    R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

std::string ones(int count) {
  std::string text = "1";
  for (int i = 1; i < count; ++i) text += ",1";
  return text;
}

std::vector<Damage> damages() {
  std::string nested = R"({"a":)";
  nested += std::string(100000, '[');
  return {
      {"header length near 2^64", kTwo, 12, "more than the format's limit of 100000000", ~uint64_t{0}},
      {"header length of text", kTwo, 12, "probably no safetensors file", 0x2020202020202020},
      {"header length just over the limit", kTwo, 12, "claims 100000001 bytes, more than", 100'000'001},
      {"header longer than the file", kTwo, 12, "claims 100000 bytes, but only 119 follow", 100'000},
      {"header one byte longer than the file", "{}", 0, "claims 3 bytes, but only 2 follow", 3},
      {"empty header", "", 4, "does not start with '{'"},
      {"space before the header", " {}", 0, "does not start with '{'"},
      {"byte order mark", "\xef\xbb\xbf{}", 0, "does not start with '{'"},
      {"header is a list", "[]", 0, "does not start with '{'"},
      {"header is a number", "12345678", 0, "does not start with '{'"},
      {"header cut off", kTwo, 12, "not valid JSON", 40},
      {"header with text behind it", "{}x", 0, "not valid JSON"},
      {"padded with NUL", std::string("{}\0\0\0\0\0\0", 8), 0, "holds a NUL byte"},
      {"not UTF-8", "{\"\xff\xfe\":{}}", 0, "not valid UTF-8"},
      {"UTF-8 of a surrogate", "{\"\xed\xa0\x80\":{}}", 0, "not valid UTF-8"},
      {"single quotes", "{'a':1}", 0, "not valid JSON"},
      {"trailing comma", R"({"__metadata__":{"a":"b"},})", 0, "not valid JSON"},
      {"deep nesting", nested, 0, "nested deeper"},
      {"tensor named twice",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "key \"a\" twice in one object"},
      {"field named twice", R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1,
       "key \"dtype\" twice in one object"},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "key \"__metadata__\" twice in one object"},
      {"metadata key twice", R"({"__metadata__":{"k":"1","k":"2"}})", 0, "key \"k\" twice in one object"},
      {"metadata is text", R"({"__metadata__":"pt"})", 0, "__metadata__ is \"pt\", expected an object of strings"},
      {"metadata value is a number", R"({"__metadata__":{"epoch":3}})", 0, "for 'epoch' the value 3, but only strings"},
      {"metadata value is an object", R"({"__metadata__":{"e":{"f":"g"}}})", 0,
       "for 'e' the value {\"f\":\"g\"}, but only strings"},
      {"entry is a number", R"({"a":1})", 0, "is described by 1, expected an object"},
      {"no dtype", R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "has no field 'dtype'"},
      {"no shape", R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "has no field 'shape'"},
      {"no offsets", R"({"a":{"dtype":"F32","shape":[1]}})", 4, "has no field 'data_offsets'"},
      {"unknown dtype", one("\"F31\"", "[1]", "[0,4]"), 4, "unknown dtype \"F31\""},
      {"dtype in lower case", one("\"f32\"", "[1]", "[0,4]"), 4, "unknown dtype \"f32\""},
      {"dtype is a number", one("32", "[1]", "[0,4]"), 4, "has the dtype 32, expected a name"},
      {"shape is a number", one("\"F32\"", "1", "[0,4]"), 4, "has the shape 1, expected a list"},
      {"negative size", one("\"F32\"", "[-1]", "[0,4]"), 4, "its shape holds the negative number -1"},
      {"fractional size", one("\"F32\"", "[1.0]", "[0,4]"), 4, "its shape holds 1.0, which is not an integer"},
      {"size is text", one("\"F32\"", "[\"1\"]", "[0,4]"), 4, "its shape holds \"1\", which is not an integer"},
      {"size beyond 2^63", one("\"F32\"", "[9223372036854775808]", "[0,4]"), 4, "larger than 2^63 - 1"},
      {"size beyond 2^64", one("\"F32\"", "[99999999999999999999999]", "[0,4]"), 4,
       "not an integer that fits in 64 bits"},
      {"product overflows", one("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4, "overflows 64 bits"},
      {"product overflows to the size claimed", one("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0,
       "overflows 64 bits"},
      {"product times dtype overflows", one("\"F64\"", "[1152921504606846977]", "[0,8]"), 8, "overflows 64 bits"},
      {"overflow hidden by a zero", one("\"U8\"", "[0,4294967296,4294967296]", "[0,0]"), 0, "overflows 64 bits"},
      {"dimensions without end", one("\"U8\"", "[" + ones(65) + "]", "[0,1]"), 1, "a shape of 65 dimensions"},
      {"half a byte", one("\"F4\"", "[3]", "[0,1]"), 1, "does not end on a whole byte"},
      {"dtype that LibTorch lacks", one("\"F6_E2M3\"", "[4]", "[0,3]"), 3, "which LibTorch has no type for"},
      {"pairs across a row", one("\"F4\"", "[2,1]", "[0,1]"), 1, "no multiple of 2"},
      {"one offset", one("\"F32\"", "[1]", "[0]"), 4, "data_offsets [0], expected two integers"},
      {"three offsets", one("\"F32\"", "[1]", "[0,4,4]"), 4, "data_offsets [0,4,4], expected two integers"},
      {"offsets are text", one("\"F32\"", "[1]", "\"0-4\""), 4, "data_offsets \"0-4\", expected two integers"},
      {"negative offset", one("\"F32\"", "[1]", "[-4,0]"), 4, "its data_offsets holds the negative number -4"},
      {"fractional offset", one("\"F32\"", "[1]", "[0,4.5]"), 4, "its data_offsets holds 4.5, which is not an integer"},
      {"offset is null", one("\"F32\"", "[1]", "[0,null]"), 4, "its data_offsets holds null, which is not an integer"},
      {"offset beyond 2^63", one("\"F32\"", "[1]", "[18446744073709551612,18446744073709551615]"), 4,
       "larger than 2^63 - 1"},
      {"begin after end", one("\"F32\"", "[1]", "[4,0]"), 4, "begins at byte 4, after its end at 0"},
      {"too few bytes for the shape", one("\"F32\"", "[2]", "[0,4]"), 4,
       "covers the bytes [0, 4), which are 4, but shape [2] of F32 needs 8"},
      {"too many bytes for the shape", one("\"F16\"", "[1]", "[0,4]"), 4, "which are 4, but shape [1] of F16 needs 2"},
      {"overlap",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "tensor 'b' at bytes [2, 6) overlaps tensor 'a', which ends at 4"},
      {"same bytes twice",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4, "overlaps"},
      {"hole at the start", one("\"U8\"", "[4]", "[4,8]"), 8, "bytes [0, 4) before tensor 'a' belong to no tensor"},
      {"hole between",
       R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})",
       6, "bytes [2, 4) before tensor 'b'"},
      {"empty tensor beyond the data", one("\"U8\"", "[0]", "[7,7]"), 0, "bytes [0, 7) before tensor 'a'"},
      {"data cut off by a byte", kTwo, 11, "tensor 'b' ends at byte 12 of the data, but the file holds only 11"},
      {"no data", kTwo, 0, "probably truncated"},
      {"a byte behind the data", kTwo, 13, "the last 1 of the 13 bytes of data belong to no tensor"},
      {"data without tensors", "{}", 5, "the last 5 of the 5 bytes"},
  };
}

TEST(SafetensorsDamage, EveryKindHasItsOwnMessage) {
  ASSERT_EQ(outcome(bytes_of({"none", kTwo, 12, ""})), "loaded") << "the file that the table damages must be good";
  std::set<std::string> names;
  for (const auto& damage : damages()) {
    SCOPED_TRACE(damage.name);
    const auto found = outcome(bytes_of(damage));
    EXPECT_THAT(found, ::testing::HasSubstr(damage.message));
    EXPECT_THAT(found, ::testing::HasSubstr("damaged.safetensors")) << "a message must name the file";
    EXPECT_LT(found.size(), 600U) << "a message must stay readable whatever the file holds";
    names.insert(damage.name);
  }
  EXPECT_EQ(names.size(), damages().size());
  EXPECT_GE(names.size(), 25U);
}

TEST(SafetensorsDamage, FilesShorterThanTheLengthField) {
  for (size_t size = 0; size < 8; ++size)
    EXPECT_THAT(
        outcome(std::string(size, '\1')),
        ::testing::HasSubstr("it has " + std::to_string(size) + " bytes, but the length of the header alone takes 8"));
}

TEST(SafetensorsDamage, TruncationAtEveryByte) {
  const auto whole = bytes_of({"none", kTwo, 12, ""});
  for (size_t size = 0; size < whole.size(); ++size)
    EXPECT_THAT(outcome(whole.substr(0, size)), ::testing::HasSubstr("truncated")) << size;
}

TEST(SafetensorsDamage, WhatTheReferenceAcceptsIsAccepted) {
  EXPECT_EQ(outcome(bytes_of({"empty", "{}", 0, ""})), "loaded");
  EXPECT_EQ(outcome(bytes_of({"padding", "{} \n\t  ", 0, ""})), "loaded");
  EXPECT_EQ(outcome(bytes_of({"metadata only", R"({"__metadata__":{"a":"b"}})", 0, ""})), "loaded");
  EXPECT_EQ(outcome(bytes_of({"null metadata", R"({"__metadata__":null})", 0, ""})), "loaded");
  EXPECT_EQ(outcome(bytes_of({"scalar", one("\"F64\"", "[]", "[0,8]"), 8, ""})), "loaded");
  EXPECT_EQ(
      outcome(bytes_of({"empty tensors",
                        R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"F32","shape":[0,3],)"
                        R"("data_offsets":[2,2]}})",
                        2, ""})),
      "loaded");
  EXPECT_EQ(outcome(bytes_of(
                {"unknown field", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"checksum":[1,2]}})", 1, ""})),
            "loaded");
}

TEST(SafetensorsDamage, PathsThatAreNoFiles) {
  const auto error_of = [](const fs::path& path) {
    try {
      accelerate::SafetensorsFile file(path);
    } catch (const accelerate::CheckpointError& error) {
      return std::string(error.what());
    }
    return std::string("opened");
  };
  EXPECT_THAT(error_of(support::scratch_dir()), ::testing::HasSubstr("not a regular file"));
  EXPECT_THAT(error_of("/dev/null"), ::testing::HasSubstr("not a regular file"));
  EXPECT_THAT(error_of(fs::path(support::scratch_dir()) / "absent"), ::testing::HasSubstr("No such file"));
}

}  // namespace
