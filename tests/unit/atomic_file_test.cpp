// Files that appear whole: what is gathered, and goes past the system's cache, comes out as it was written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "scratch.hpp"
#include "utils/atomic_file.hpp"

namespace {

using namespace accelerate;
using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

std::string random_bytes(size_t count) {
  std::mt19937_64 random(count + 1);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::string content(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

size_t files_in(const fs::path& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

}  // namespace

// Around the sizes of one buffer and of both, in pieces that don't end where these do.
TEST(AtomicFile, HasWhatWasWritten) {
  const auto folder = support::scratch(testing::UnitTest::GetInstance()->current_test_info()->name());
  fs::create_directories(folder);
  constexpr size_t kBuffer = AtomicFile::kBufferBytes;
  for (const size_t count : {size_t{0}, size_t{1}, kBuffer - 1, kBuffer, kBuffer + 1, 2 * kBuffer, 3 * kBuffer + 4097})
    for (const size_t piece : {count + 1, size_t{999'983}, size_t{4096}}) {
      const auto bytes = random_bytes(count);
      {
        AtomicFile file("a test", folder / "some");
        for (size_t at = 0; at < count; at += piece) file.write(std::string_view(bytes).substr(at, piece));
        EXPECT_FALSE(fs::exists(folder / "some"));
        file.finish();
      }
      ASSERT_TRUE(content(folder / "some") == bytes) << count << " bytes in pieces of " << piece;
      EXPECT_EQ(files_in(folder), 1);
      fs::remove(folder / "some");
    }
}

namespace {

int64_t blocks_read() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  return use.ru_inblock;
}
/// Whether the file system has transfers past the cache, after which a reader is seen to read the disk.
bool has_direct_transfers(const fs::path& file) {
  constexpr size_t kBytes = 1 << 20;
  const std::unique_ptr<char, decltype(&std::free)> memory(static_cast<char*>(std::aligned_alloc(4096, kBytes)),
                                                           &std::free);
  std::fill_n(memory.get(), kBytes, 'x');
  const int direct = ::open(file.c_str(), O_WRONLY | O_CREAT | O_DIRECT, 0666);
  const bool written = direct >= 0 && ::pwrite(direct, memory.get(), kBytes, 0) == static_cast<ssize_t>(kBytes);
  if (direct >= 0) ::close(direct);
  const int64_t before = blocks_read();
  return written && content(file).size() == kBytes && blocks_read() - before >= static_cast<int64_t>(kBytes / 512);
}

}  // namespace

// It is on the disk, and the cache has none of it but the last piece.
TEST(AtomicFile, GoesPastTheCache) {
  const auto folder = support::scratch(testing::UnitTest::GetInstance()->current_test_info()->name());
  fs::create_directories(folder);
  if (!has_direct_transfers(folder / "probe")) GTEST_SKIP() << "this file system has no transfers past the cache";
  AtomicFile file("a test", folder / "some");
  file.write(random_bytes(3 * AtomicFile::kBufferBytes));
  file.finish();
  const int64_t before = blocks_read();
  const auto bytes = content(folder / "some");
  EXPECT_EQ(bytes.size(), 3 * AtomicFile::kBufferBytes);
  EXPECT_GT(blocks_read() - before, static_cast<int64_t>(bytes.size() / 512 / 2)) << "read from the disk";
}

TEST(AtomicFile, AFullDiskLeavesTheOldFile) {
  const auto folder = support::scratch(testing::UnitTest::GetInstance()->current_test_info()->name());
  fs::create_directories(folder);
  std::ofstream(folder / "some") << "old";
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 6 << 20, .rlim_max = before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  for (const size_t count : {5 * AtomicFile::kBufferBytes, AtomicFile::kBufferBytes * 2 - 1})
    EXPECT_THAT(support::message_of<ResourceError>([&] {
                  AtomicFile file("a test", folder / "some");
                  file.write(random_bytes(count));
                  file.finish();
                }),
                AllOf(HasSubstr("a test"), HasSubstr("more bytes"), HasSubstr("untouched")));
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(content(folder / "some"), "old");
  EXPECT_EQ(files_in(folder), 1);
}
