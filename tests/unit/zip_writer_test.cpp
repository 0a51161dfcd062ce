// The zip around torch archives: LibTorch's bytes, of records that come in pieces.
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "formats/zip_writer.hpp"

using accelerate::formats::ZipWriter;

namespace {

std::string numbers(size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes.push_back(static_cast<char>(i * 7 + 3));
  return bytes;
}

std::string by_libtorch(const std::vector<std::pair<std::string, std::string>>& records) {
  std::string written;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* bytes, size_t size) {
    written.append(static_cast<const char*>(bytes), size);
    return size;
  });
  for (const auto& [name, bytes] : records) writer.writeRecord(name, bytes.data(), bytes.size());
  writer.writeEndOfFile();
  return written;
}

TEST(ZipWriter, ItsBytesAreLibTorchs) {
  std::vector<std::pair<std::string, std::string>> records{
      {"data.pkl", numbers(77)}, {".format_version", "1"}, {"data/0", ""},
      {"data/1", numbers(1)},    {"data/2", numbers(3)},   {"data/3", numbers(100001)}};
  for (int i = 4; i < 40; ++i) records.emplace_back("data/" + std::to_string(i), numbers(static_cast<size_t>(i) * 5));
  for (const size_t piece : {size_t{1} << 30, size_t{1000}, size_t{13}}) {
    std::string written;
    ZipWriter writer([&](std::string_view bytes) { written += bytes; });
    for (const auto& [name, bytes] : records)
      writer.record(name, static_cast<int64_t>(bytes.size()), [&, &all = bytes](const ZipWriter::Write& take) {
        for (size_t at = 0; at < all.size(); at += piece) take(std::string_view(all).substr(at, piece));
      });
    writer.finish();
    EXPECT_TRUE(written == by_libtorch(records)) << "in pieces of " << piece;
  }
}

TEST(ZipWriter, ARecordOfAnotherSizeIsRefused) {
  ZipWriter writer([](std::string_view) {});
  EXPECT_THROW(writer.record("data/0", 10, [](const ZipWriter::Write& take) { take("12345"); }),
               accelerate::InternalError);
}

}  // namespace
