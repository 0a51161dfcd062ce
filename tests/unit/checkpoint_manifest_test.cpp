// Checksums of files, the list that a checkpoint carries, and readers that look at what they read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>

#include <fmt/format.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "checkpoint/saved_state.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "formats/dcp.hpp"
#include "formats/expected_files.hpp"
#include "formats/input_file.hpp"
#include "message_of.hpp"
#include "scratch.hpp"
#include "utils/atomic_file.hpp"
#include "utils/file_checksums.hpp"

using namespace accelerate;
using formats::CheckpointManifest;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

namespace {

std::string random_bytes(size_t count) {
  std::mt19937 random(count % 1000 + 1);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

FileChecksums checksums_of(std::string_view bytes) {
  ChecksumsInTurn sums;
  sums.add(bytes);
  return sums.take();
}

FileChecksums sums_of(std::string_view bytes, size_t part_bytes) {
  FileChecksums sums{.bytes = static_cast<int64_t>(bytes.size()), .parts = {}};
  for (size_t at = 0; at < bytes.size(); at += part_bytes)
    sums.parts.push_back(crc32c::of(bytes.substr(at, part_bytes)));
  return sums;
}

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.data_ptr()), tensor.nbytes()};
}

void flip(const fs::path& file, int64_t byte) {
  std::fstream both(file, std::ios::in | std::ios::out | std::ios::binary);
  both.seekg(byte);
  const char flipped = static_cast<char>(both.get() ^ 0x10);
  both.seekp(byte);
  both.put(flipped);
}

CheckpointManifest some_manifest() {
  return {.files = {{"model.safetensors", {.bytes = kChecksumPartBytes + 1, .parts = {1, 0xFFFFFFFF}}},
                    {"optimizer_0/__0_0.distcp", {.bytes = 7, .parts = {0xABCDEF01}}},
                    {"empty", {}}},
          .world_size = 2,
          .layout = "sharded",
          .step = 17,
          .iteration = 3,
          .accelerate = "0.1.0",
          .libtorch = "2.13.0"};
}

std::string refusal_of(std::string_view text) {
  return message_of<CheckpointError>([&] { formats::parse_manifest(text, "a manifest"); });
}

}  // namespace

// RFC 3720, appendix B.4.
TEST(FileChecksums, AreThoseOfTheStandard) {
  EXPECT_EQ(crc32c::of(""), 0U);
  EXPECT_EQ(crc32c::of("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c::of(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c::of(std::string(32, '\xFF')), 0x62A8AB43U);
}

// The second one's check is that of zips: ISO 3309, "123456789".
TEST(FileChecksums, ByTableAndByProductsAreTheSame) {
  const auto bytes = random_bytes(700);  // the widest take 256 at a time, with what is left and without
  EXPECT_EQ(~crc::by_table(~uint32_t{0}, "123456789", crc32c::kPolynomial), 0xE3069283U);
  EXPECT_EQ(~crc32::extend(~uint32_t{0}, "123456789"), 0xCBF43926U);
  for (const auto* polynomial : {&crc32c::kPolynomial, &crc32::kPolynomial})
    for (size_t from = 0; from < 9; ++from)
      for (size_t count = 0; from + count <= bytes.size(); ++count) {
        const auto some = std::string_view(bytes).substr(from, count);
        const auto expected = crc::by_table(77, some, *polynomial);
        ASSERT_EQ(expected, crc::extend(77, some, *polynomial)) << from << " " << count;
#if defined(__x86_64__)
        if (count >= 64 && count % 16 == 0 && __builtin_cpu_supports("pclmul"))
          ASSERT_EQ(expected, crc::by_products(77, some, *polynomial)) << from << " " << count;
#endif
      }
}

TEST(FileChecksums, DoNotDependOnHowBytesCome) {
  const auto bytes = random_bytes(static_cast<size_t>(2 * kChecksumPartBytes) + 5);
  for (const size_t count : {bytes.size(), bytes.size() - 5, size_t{4}, size_t{0}}) {
    const auto whole = std::string_view(bytes).substr(0, count);
    FileChecksums expected{.bytes = static_cast<int64_t>(count), .parts = {}};
    for (size_t at = 0; at < count; at += static_cast<size_t>(kChecksumPartBytes))
      expected.parts.push_back(crc32c::of(whole.substr(at, static_cast<size_t>(kChecksumPartBytes))));
    EXPECT_EQ(checksums_of(whole), expected);
    ChecksumsInTurn in_turn;
    for (size_t at = 0, next = 1; at < count; at += next, next = next * 7 % 1'000'003)
      in_turn.add(whole.substr(at, next));
    EXPECT_EQ(in_turn.take(), expected);
    EXPECT_EQ(parts_of_bytes(expected.bytes, kChecksumPartBytes), static_cast<int64_t>(expected.parts.size()));
  }
}

TEST(FileChecksums, OfWhatIsWrittenIntoAFolder) {
  const auto folder = support::scratch("recorded");
  fs::create_directories(folder / "below");
  const auto write = [](const fs::path& path, const std::string& text) {
    AtomicFile file("test", path);
    file.write(text.substr(0, 2));
    file.write(text.substr(2));
    file.finish(/*flush=*/false);
  };
  write(folder / "before", "abcd");
  {
    const RecordedFiles recorded(folder);
    write(folder / "a", "hello");
    write(folder / "below" / "b", "world");
    write(folder / "a", "again");
    write(folder.parent_path() / "elsewhere", "hello");
    AtomicFile unfinished("test", folder / "c");
    unfinished.write("never");
    using Files = std::vector<std::pair<std::string, FileChecksums>>;
    EXPECT_EQ(recorded.files(),
              (Files{{"a", checksums_of("hello")}, {"below/b", checksums_of("world")}, {"a", checksums_of("again")}}));
  }
  write(folder / "after", "abcd");  // to nobody
}

TEST(CheckpointManifest, IsReadAsItWasWritten) {
  const auto text = formats::format_manifest(some_manifest());
  EXPECT_EQ(formats::parse_manifest(text, "it"), some_manifest());
  // Also by who has laid it out anew.
  EXPECT_EQ(formats::parse_manifest(nlohmann::json::parse(text).dump(), "it"), some_manifest());
  EXPECT_EQ(nlohmann::json::parse(text)["files"]["model.safetensors"]["crc32c"], "00000001ffffffff");
}

TEST(CheckpointManifest, AFlippedBitIsNeverTakenForAnotherList) {
  const auto text = formats::format_manifest(some_manifest());
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    auto damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    try {
      ASSERT_EQ(formats::parse_manifest(damaged, "it"), some_manifest()) << damaged;
    } catch (const CheckpointError&) {
    }
  }
}

TEST(CheckpointManifest, WhatIsWrongIsNamed) {
  const auto changed = [](const std::function<void(nlohmann::json&)>& change) {
    auto root = nlohmann::json::parse(formats::format_manifest(some_manifest()));
    root.erase("crc32c");
    change(root);
    root["crc32c"] = fmt::format("{:08x}", crc32c::of(root.dump()));
    return refusal_of(root.dump());
  };
  EXPECT_THAT(refusal_of("{"), HasSubstr("is not valid JSON"));
  EXPECT_THAT(changed([](auto& root) { root["version"] = 2; }), HasSubstr("of version 2"));
  EXPECT_THAT(changed([](auto& root) { root["format"] = "other"; }), HasSubstr("its format is 'other'"));
  EXPECT_THAT(changed([](auto& root) { root["world_size"] = -1; }), HasSubstr("found -1 at 'world_size'"));
  EXPECT_THAT(changed([](auto& root) { root["layout"] = 3; }), HasSubstr("expected a text"));
  EXPECT_THAT(changed([](auto& root) { root["part_bytes"] = 0; }), HasSubstr("its parts have 0 bytes"));
  EXPECT_THAT(changed([](auto& root) { root.erase("files"); }), HasSubstr("found null at 'files'"));
  EXPECT_THAT(changed([](auto& root) { root["files"]["empty"] = 3; }), HasSubstr("found 3 for 'empty'"));
  EXPECT_THAT(changed([](auto& root) { root["files"]["empty"]["bytes"] = 5; }),
              HasSubstr("'empty' of 5 bytes has 0 digits of checksums, expected 8 of each of 1 parts"));
  EXPECT_THAT(changed([](auto& root) { root["files"]["optimizer_0/__0_0.distcp"]["crc32c"] = "ABCDEF01"; }),
              HasSubstr("ABCDEF01"));
  for (const char* name : {"", "/etc/passwd", "../up", "a/../../up", "a//b", "./a", "a/", "..", "."})
    EXPECT_THAT(changed([&](auto& root) { root["files"][name] = root["files"]["empty"]; }),
                HasSubstr("is no path of a file in its folder"))
        << name;
  // Another's file of this name.
  EXPECT_EQ(formats::parse_manifest(R"({"steps": 3})", "it"), std::nullopt);
  EXPECT_EQ(formats::parse_manifest("[1]", "it"), std::nullopt);
  auto odd = some_manifest();
  odd.files["\xFF"] = {};
  EXPECT_THAT(message_of<CheckpointError>([&] { formats::format_manifest(odd); }), HasSubstr("not UTF-8"));
}

TEST(CheckpointManifest, ForgetsWhatWasTakenOut) {
  const auto folder = support::scratch("taken_out");
  fs::create_directories(folder);
  EXPECT_EQ(formats::read_manifest(folder), std::nullopt);
  formats::forget_in_manifest(folder / "optimizer_0");  // there is none
  support::write(folder / formats::kManifestFile, formats::format_manifest(some_manifest()));
  formats::forget_in_manifest(folder / "optimizer");
  EXPECT_EQ(formats::read_manifest(folder), some_manifest());
  formats::forget_in_manifest(folder / "optimizer_0" / "");
  auto left = some_manifest();
  left.files.erase("optimizer_0/__0_0.distcp");
  EXPECT_EQ(formats::read_manifest(folder), left);
}

TEST(ExpectedFiles, PartsThatAreReadAreLookedAtOnce) {
  const auto folder = support::scratch("expected");
  fs::create_directories(folder);
  const auto bytes = random_bytes(25);
  support::write(folder / "file", bytes);
  const auto sums = sums_of(bytes, 10);
  flip(folder / "file", 12);
  std::string read(25, '\0');
  {
    const formats::ExpectedFiles expected(folder, {{"file", sums}}, 10);
    const formats::InputFile file(folder / "." / "file"), again(folder / "file");
    file.read(0, read.data(), 10);
    file.read(3, read.data(), 2);
    again.read(0, read.data(), 9);
    EXPECT_EQ(expected.parts_checked(), 1);
    file.read(24, read.data(), 1);  // a part of which little is asked for
    EXPECT_EQ(expected.parts_checked(), 2);
    file.read(20, read.data(), 0);
    for (const auto& [begin, count] : {std::pair(10, 1), std::pair(9, 2), std::pair(0, 25), std::pair(19, 5)})
      EXPECT_THAT(message_of<formats::DamagedFile>(
                      [&, &begin = begin, &count = count] { file.read(begin, read.data(), count); }),
                  AllOf(HasSubstr((folder / "file").string()), HasSubstr("bytes 10 to 19")));
    EXPECT_THROW(file.check(0, 25), formats::DamagedFile);
    EXPECT_THAT(
        message_of<formats::DamagedFile>([&] { formats::naming_damage("tensor 'x'", [&] { file.check(15, 1); }); }),
        testing::StartsWith("tensor 'x': '"));
    flip(folder / "file", 12);
    file.read(0, read.data(), 25);
    EXPECT_EQ(read, bytes);
    EXPECT_EQ(expected.parts_checked(), 3);
    fs::resize_file(folder / "file", 24);
    EXPECT_THAT(message_of<formats::DamagedFile>([&] { formats::InputFile(folder / "file"); }),
                HasSubstr("has 24 bytes, expected the 25"));
  }
  const formats::InputFile file(folder / "file");  // of which nobody knows anything by now
  file.read(0, read.data(), 24);
}

TEST(CheckedRecords, AreLookedAtOnceBeforeAnyOfTheirBytesIsGiven) {
  const auto folder = support::scratch("records");
  fs::create_directories(folder);
  support::write(folder / "file", "head123456789tail");
  std::string read(17, '\0');
  const formats::CheckedRecords checked;
  const formats::InputFile file(folder / "file");
  EXPECT_TRUE(file.wants_records());
  ASSERT_TRUE(file.expect_record("data/0", 4, 9, 0xCBF43926)) << "the checksum that CRC's tables give for 1 to 9";
  EXPECT_TRUE(file.expect_record("again", 4, 9, 0xCBF43926));
  EXPECT_FALSE(file.expect_record("overlaps", 12, 2, 1));
  EXPECT_FALSE(file.expect_record("overlaps", 3, 2, 1));
  EXPECT_FALSE(file.expect_record("longer", 4, 10, 1));
  flip(folder / "file", 12);
  file.read(0, read.data(), 4);
  file.read(13, read.data(), 4);
  EXPECT_EQ(checked.checked(), 0);
  for (const auto& [begin, count] : {std::pair(4, 1), std::pair(12, 1), std::pair(0, 17), std::pair(4, 9)})
    EXPECT_THAT(
        message_of<formats::DamagedFile>([&, &begin = begin, &count = count] { file.read(begin, read.data(), count); }),
        AllOf(HasSubstr((folder / "file").string()), HasSubstr("record 'data/0', bytes 4 to 12")));
  flip(folder / "file", 12);
  file.read(12, read.data(), 1);
  file.read(4, read.data(), 9);
  EXPECT_EQ(checked.checked(), 1);
}

TEST(CheckedRecords, OfWhichTheListKnowsAllAreNotLookedAtTwice) {
  const auto folder = support::scratch("listed");
  fs::create_directories(folder);
  support::write(folder / "file", "123456789");
  const formats::CheckedRecords checked;
  const formats::ExpectedFiles expected(folder, {{"file", {.bytes = 9, .parts = {crc32c::of("123456789")}}}}, 10);
  EXPECT_FALSE(formats::InputFile(folder / "file").wants_records());
}

TEST(ExpectedFiles, AFileThatIsReadInTurnIsReadOnce) {
  const auto folder = support::scratch("in turn");
  fs::create_directories(folder);
  const auto bytes = random_bytes(95);
  support::write(folder / "file", bytes);
  const formats::ExpectedFiles expected(folder, {{"file", sums_of(bytes, 10)}}, 10);
  const formats::InputFile file(folder / "file");
  const int64_t before = formats::InputFile::bytes_read();
  std::string read(95, '\0');
  int64_t at = 0;
  for (const int64_t count : {3, 4, 1, 2, 5, 20, 12, 30, 1, 17}) {
    file.read(at, read.data() + at, count);
    at += count;
  }
  EXPECT_EQ(at, 95);
  EXPECT_EQ(read, bytes);
  EXPECT_EQ(formats::InputFile::bytes_read() - before, 95);
  EXPECT_EQ(expected.parts_checked(), 10);
  // What was looked at is no longer read around.
  file.read(31, read.data(), 2);
  EXPECT_EQ(formats::InputFile::bytes_read() - before, 97);
  EXPECT_EQ(read.substr(0, 2), bytes.substr(31, 2));
}

// Of an archive whose tensors are read later what leads to them is no more than looked up, so that opening it reads no
// part for that; it is checked with the tensor.
TEST(ExpectedFiles, WhatLeadsToATensorIsCheckedWithIt) {
  const auto folder = support::scratch("headers");
  fs::create_directories(folder);
  const auto a = torch::rand({100}), b = torch::rand({100});
  checkpointing::save_object(checkpointing::to_dict({{"a", a}, {"b", b}}), folder / "file");
  auto bytes = support::text_of(folder / "file");
  const formats::ExpectedFiles expected(folder, {{"file", sums_of(bytes, 16)}}, 16);
  const auto header = static_cast<int64_t>(bytes.rfind("PK\3\4", bytes.find(bytes_of(b))));
  flip(folder / "file", header + 15);  // of a checksum that nobody looks at
  const auto tensors = checkpointing::open_archive(folder / "file");
  EXPECT_TRUE(tensors.at("a").read_whole().equal(a));
  EXPECT_THROW(tensors.at("b").read_whole(), formats::DamagedFile);
  EXPECT_THROW(checkpointing::load_object(folder / "file"), formats::DamagedFile);
  flip(folder / "file", header + 15);
  EXPECT_TRUE(tensors.at("b").read_whole().equal(b));
}

TEST(ExpectedFiles, OfADistributedTensorAllOfItsArchiveIsChecked) {
  const auto folder = support::scratch("distributed");
  fs::create_directories(folder);
  const auto values = torch::rand({300});
  const std::vector<int64_t> sizes{300};
  const auto records = formats::write_dcp_items(
      folder, 0, {}, {{.name = "model.w", .sizes = sizes, .box = formats::whole(sizes), .tensor = values}});
  formats::write_dcp_metadata(folder, records, {{"model.w", formats::DcpPath{std::string("model"), std::string("w")}}});
  const auto file = folder / "__0_0.distcp";
  const auto bytes = support::text_of(file);
  const auto first = static_cast<int64_t>(bytes.find(bytes_of(values)));
  const auto behind = static_cast<int64_t>(bytes.rfind("PK\1\2")) + 17;
  const formats::ExpectedFiles expected(folder, {{"__0_0.distcp", sums_of(bytes, 16)}}, 16);
  for (const int64_t damaged : {int64_t{15}, first - 1, behind}) {  // checksums and padding that nobody looks at
    flip(file, damaged);
    const formats::DcpCheckpoint checkpoint(folder);
    const auto found = checkpoint.find_chunk("model.w", formats::whole(sizes));
    EXPECT_EQ(found.file, file);
    EXPECT_THROW(found.read(torch::empty(sizes)), formats::DamagedFile) << damaged;
    flip(file, damaged);
  }
  const formats::DcpCheckpoint checkpoint(folder);
  const auto to = torch::empty(sizes);
  checkpoint.find_chunk("model.w", formats::whole(sizes)).read(to);
  EXPECT_TRUE(to.equal(values));
}

TEST(ExpectedFiles, OfATensorThatIsReadInPartItsPartAlone) {
  const auto folder = support::scratch("part");
  fs::create_directories(folder);
  const int64_t rows = 3, columns = kChecksumPartBytes / 4;  // a row is a part, but for the header
  {
    const RecordedFiles recorded(folder);
    save_safetensors(folder / "w", {{"first", torch::ones({rows, columns})}, {"second", torch::ones({3})}});
    const formats::ExpectedFiles expected(folder, {recorded.files().begin(), recorded.files().end()},
                                          kChecksumPartBytes);
    const auto tensors = checkpointing::open_safetensors(folder / "w");
    EXPECT_EQ(expected.parts_checked(), 1) << "the header";
    at::Tensor row = torch::empty({1, 5});
    tensors.at("first").read({{1, 9}, {1, 5}}, row);
    EXPECT_TRUE(row.eq(1).all().item<bool>());
    EXPECT_EQ(expected.parts_checked(), 2);
    tensors.at("first").read({{0, 0}, {0, 5}}, torch::empty({0, 5}));
    EXPECT_EQ(expected.parts_checked(), 2);
    flip(folder / "w", 2 * kChecksumPartBytes + 100);
    EXPECT_THROW(tensors.at("first").read({{2, 9}, {1, 5}}, row), formats::DamagedFile);
    EXPECT_THROW(tensors.at("first").read_whole(), formats::DamagedFile);
    tensors.at("second").read_whole();
  }
}
