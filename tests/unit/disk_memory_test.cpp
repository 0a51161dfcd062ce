/// Tensors that lie on a disk: they are read and written where they lie, and come and go in groups.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "no_io_uring.hpp"
#include "residency/counters.hpp"
#include "residency/disk/by_turns.hpp"
#include "residency/disk/disk_memory.hpp"
#include "scratch.hpp"

using namespace accelerate;
using namespace accelerate::residency;
using testing::AllOf;
using testing::HasSubstr;

namespace {

class OnADisk : public ::testing::TestWithParam<DiskRequests> {
 protected:
  const SpillFile::Wording wording{.user = "the test", .contents = "tensors", .advice = "stop testing"};
  std::filesystem::path folder = support::scratch("disk");
  std::shared_ptr<DiskMemory> disk = std::make_shared<DiskMemory>(folder, GetParam(), wording);
  static int64_t read() { return counts::read(ResidencyCount::disk_bytes_read); }
  static int64_t written() { return counts::read(ResidencyCount::disk_bytes_written); }
};

// Sizes that end in the middle of a block, of a request, and of a share of threads.
const std::vector<std::vector<int64_t>> kSizes{{1}, {1000}, {4096, 3}, {7, 100'003}};

std::vector<at::Tensor> drawn() {
  torch::manual_seed(1);
  std::vector<at::Tensor> all;
  for (const auto& sizes : kSizes) all.push_back(torch::randint(-1000, 1000, sizes).to(at::kFloat));
  return all;
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Requests, OnADisk,
                         testing::Values(DiskRequests{}, DiskRequests{.bytes = 4096, .depth = 2, .threads = 3},
                                         DiskRequests{.bytes = 8192, .depth = 4, .one_by_one = true},
                                         DiskRequests{.bytes = 4096, .depth = 3, .refills_at_once = false}));

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

/// Whether malloc takes most of so many large tensors from its heap, which keeps them, once as much has been freed.
bool malloc_keeps(size_t tensors) {
  void* volatile large = std::malloc(24 << 20);  // or the compiler leaves both out
  std::free(large);
  const auto before = ::mallinfo2().hblks;
  std::vector<at::Tensor> some;
  for (size_t i = 0; i < tensors; ++i) some.push_back(torch::ones({1 << 20}));
  return ::mallinfo2().hblks - before < tensors / 2;
}

}  // namespace

// Or the heap keeps the holes of what has gone to the disk. It costs time, and is for who has little memory; and it is
// for the whole process, so that it is seen once.
TEST(MemoryOfDisks, GoesBackToTheSystemWhereItIsScarce) {
  const SpillFile::Wording wording{.user = "the test", .contents = "tensors", .advice = "stop testing"};
  const auto disk_with = [&](std::optional<int64_t> memory) {
    return std::make_shared<DiskMemory>(support::scratch("disk"), DiskRequests{}, wording, memory);
  };
  const auto plenty = disk_with({}), scarce = disk_with(4 << 20);
  const auto one = plenty->zeros({1 << 20}, at::kFloat);
  EXPECT_TRUE(malloc_keeps(4));
  for (int i = 0; i < 3; ++i) scarce->zeros({1 << 18}, at::kFloat);
  EXPECT_TRUE(malloc_keeps(4)) << "each has ended before the next one";
  const auto two = scarce->zeros({1 << 19}, at::kFloat);
  EXPECT_FALSE(malloc_keeps(32)) << "holes of those before have room for a few";
}
#endif

TEST_P(OnADisk, TensorsAreThemselvesWhereverTheyLie) {
  const auto values = drawn();
  std::vector<at::Tensor> tensors, views;
  for (const auto& value : values) {
    tensors.push_back(disk->zeros(value.sizes(), at::kFloat));
    views.push_back(tensors.back().view({-1}).narrow(0, value.numel() / 2, 1));
    EXPECT_TRUE(tensors.back().equal(torch::zeros_like(value)));
    tensors.back().copy_(value);  // where it lies
  }
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    const auto expect = [&](double plus) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(disk->has(tensors[i]));
        EXPECT_TRUE(tensors[i].equal(values[i] + plus)) << kSizes[i];
        EXPECT_TRUE(views[i].equal((values[i] + plus).view({-1}).narrow(0, values[i].numel() / 2, 1)));
      }
    };
    expect(round * 3);
    disk->bring(tensors)->wait();
    disk->bring(tensors)->wait();  // they are there
    expect(round * 3);
    for (auto& tensor : tensors) tensor.add_(1);  // in memory
    const auto going = disk->send(tensors);
    expect(round * 3 + 1);
    going->wait();
    expect(round * 3 + 1);  // from the disk, through the cache
    disk->bring(tensors)->wait();
    disk->drop(tensors);
    for (auto& tensor : tensors) tensor.add_(2);  // where it lies
    expect(round * 3 + 3);
  }
}

TEST_P(OnADisk, BytesGoToTheDiskAndComeBack) {
  const auto values = drawn();
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) tensors.push_back(value.clone());
  int64_t bytes = 0;
  for (auto& tensor : tensors) {
    disk->take(tensor);
    bytes += (static_cast<int64_t>(tensor.nbytes()) + 4095) / 4096 * 4096;
  }
  int64_t before = written();
  disk->send(tensors)->wait();
  EXPECT_EQ(written() - before, bytes);
  EXPECT_FALSE(disk->may_have_been_touched(tensors.back())) << "written past the cache";
  before = read();
  disk->bring({tensors[0], tensors[0], tensors[3]})->wait();
  EXPECT_EQ(read() - before, 4096 + (static_cast<int64_t>(tensors[3].nbytes()) + 4095) / 4096 * 4096) << "each once";
  disk->drop(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(disk->may_have_been_touched(tensors[i]) || tensors[i].equal(values[i]));
    const at::Tensor to = torch::empty_like(values[i]);
    if (const auto coming = disk->read(tensors[i], to)) coming->wait();
    EXPECT_TRUE(to.equal(values[i]));
    disk->write(tensors[i], values[i] * 2);
    EXPECT_TRUE(tensors[i].equal(values[i] * 2));
  }
  EXPECT_TRUE(disk->may_have_been_touched(tensors.back())) << "it was read where it lies";
}

// Each storage once, however many lie in it and wherever they stand in the list.
TEST_P(OnADisk, TensorsComeByTurns) {
  const at::Tensor both = torch::arange(2000, at::kFloat), here = torch::full({3}, 7.0);
  const at::Tensor large = torch::ones({(33 << 20) / 4}), none = torch::empty({0});
  disk->take(both);
  disk->take(large);
  disk->send({both, large})->wait();
  const std::vector<at::Tensor> all{both.narrow(0, 0, 1000), large, here, none, both.narrow(0, 1000, 1000)};
  for (const bool changes : {false, true}) {
    const int64_t read_before = read(), written_before = written();
    std::vector<size_t> order;
    by_turns(all, changes, [&](const auto& some, const auto& numbers) {
      for (size_t i = 0; i < some.size(); ++i) {
        EXPECT_TRUE(some[i].is_same(all[numbers[i]]));
        order.push_back(numbers[i]);
        if (changes) at::Tensor(some[i]).add_(1);
      }
    });
    EXPECT_THAT(order, testing::ElementsAre(0, 2, 3, 4, 1));
    const int64_t bytes = 8192 + (33 << 20);
    EXPECT_EQ(read() - read_before, bytes);
    EXPECT_EQ(written() - written_before, changes ? bytes : 0);
    EXPECT_FALSE(disk->may_have_been_touched(both));
  }
  EXPECT_TRUE(both.equal(torch::arange(2000, at::kFloat) + 1));
  EXPECT_TRUE(large.equal(torch::full_like(large, 2)));
  EXPECT_TRUE(here.equal(torch::full({3}, 8.0)));
}

TEST_P(OnADisk, WhatIsNoWholeStorageStaysInMemory) {
  const at::Tensor whole = torch::ones({8, 2}), part = whole[3];
  disk->take(part);
  EXPECT_FALSE(disk->has(part));
  const at::Tensor other = torch::ones({8, 2}), its_part = other[3];
  disk->take(its_part, /*whole=*/false);
  EXPECT_TRUE(disk->has(other));
  disk->send({its_part})->wait();
  EXPECT_TRUE(other.equal(torch::ones({8, 2})));
  disk->take(at::Tensor());
  disk->take(torch::empty({0}));
  disk->bring({part, at::Tensor()})->wait();
  disk->send({whole})->wait();
  EXPECT_TRUE(whole.equal(torch::ones({8, 2})));
  EXPECT_EQ(disk->zeros({0, 3}, at::kHalf).numel(), 0);
}

// Room is used again, and begins with zeros again; what ends on its way does no harm.
TEST_P(OnADisk, TensorsEndAtAnyTime) {
  std::unique_ptr<Transfer> last;
  for (int round = 0; round < 4; ++round) {
    at::Tensor one = disk->zeros({5000}, at::kDouble), other = disk->zeros({100}, at::kHalf);
    EXPECT_EQ(one.count_nonzero().item<int64_t>() + other.count_nonzero().item<int64_t>(), 0);
    one.fill_(3);
    other.fill_(4);
    disk->bring({one, other})->wait();
    last = round % 2 == 0 ? disk->send({one}) : disk->bring({one});
  }
  last->wait();
  EXPECT_EQ(disk->zeros({9000}, at::kDouble).count_nonzero().item<int64_t>(), 0);
}

TEST_P(OnADisk, AFullDiskIsNamedAndLosesNothing) {
  at::Tensor first = torch::rand({1000});
  const at::Tensor copy = first.clone();
  disk->take(first);
  disk->send({first})->wait();
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  at::Tensor second = torch::rand({100'000});
  const at::Tensor of_second = second.clone();
  EXPECT_THAT(support::message_of<ResourceError>([&] { disk->take(second); }),
              AllOf(HasSubstr("the test: reserving room in '" + folder.string()), HasSubstr("stop testing")));
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(first.equal(copy));
  EXPECT_TRUE(second.equal(of_second));
  EXPECT_FALSE(disk->has(second));
  EXPECT_THAT(support::message_of<ConfigError>([&] { DiskMemory("/proc/nowhere", {}, wording); }),
              HasSubstr("the folder '/proc/nowhere' can't be made"));
}

// As of a disk that breaks: the values are in memory alone, and nobody drops them.
TEST_P(OnADisk, WhatCouldNotBeWrittenStaysInMemory) {
  const at::Tensor first = torch::ones({1000}), second = torch::ones({100'000});
  disk->take(first);
  disk->take(second);
  disk->drop({first, second});  // never written
  EXPECT_TRUE(second.equal(torch::ones({100'000})));
  disk->send({first, second})->wait();
  disk->bring({second})->wait();
  at::Tensor(second).add_(1);
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const auto going = disk->send({second});
  const std::string error = support::message_of<ResourceError>([&] { going->wait(); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(error, HasSubstr("the test: writing in"));
  disk->drop({second});
  EXPECT_TRUE(second.equal(torch::full({100'000}, 2.0)));
  disk->send({second})->wait();
  EXPECT_TRUE(second.equal(torch::full({100'000}, 2.0)));
  disk->bring({second})->wait();
  disk->write(second, torch::full({100'000}, 3.0));
  disk->drop({second});
  EXPECT_TRUE(second.equal(torch::full({100'000}, 3.0)));
}

TEST_P(OnADisk, OtherValuesLieBesideThem) {
  const auto values = drawn();
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    tensors.push_back(value.clone());
    disk->take(tensors.back());
  }
  const auto expect = [&](double times) {
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(tensors[i].equal(values[i] * times)) << kSizes[i];
  };
  EXPECT_FALSE(disk->are_copies(tensors)) << "they were never written";
  disk->send(tensors)->wait();
  disk->bring(tensors)->wait();
  EXPECT_TRUE(disk->are_copies(tensors));
  disk->make_room_beside(tensors);
  for (auto& tensor : tensors) tensor.mul_(2);
  const auto going = disk->send_beside(tensors);
  expect(1);
  going->wait();
  expect(1);
  disk->exchange(tensors);
  expect(2);
  disk->exchange(tensors);  // back
  expect(1);
  disk->write_beside(tensors[2], values[2] * 3)->wait();
  expect(1);
  disk->exchange({tensors[2]});
  EXPECT_TRUE(tensors[2].equal(values[2] * 3));
  disk->bring(tensors)->wait();
  EXPECT_TRUE(tensors[2].equal(values[2] * 3));
  disk->exchange(tensors);  // what came is dropped
  EXPECT_TRUE(tensors[2].equal(values[2]));
  EXPECT_TRUE(tensors[3].equal(values[3] * 2));
}

// Nobody looks at anything here: who reads where a value lies may make the system read what is next to it ahead.
TEST_P(OnADisk, ExchangingMovesNothing) {
  const at::Tensor tensor = torch::ones({100'000});
  disk->take(tensor);
  disk->make_room_beside({tensor});
  disk->send_beside({tensor})->wait();
  const int64_t read_before = read(), written_before = written();
  disk->exchange({tensor});
  EXPECT_EQ(read() + written(), read_before + written_before);
  EXPECT_FALSE(disk->may_have_been_touched(tensor));
}

// The file has no name, so nobody can take it away.
TEST_P(OnADisk, NothingIsLeftInTheFolder) {
  const at::Tensor tensor = disk->zeros({10'000}, at::kFloat);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
  disk->bring({tensor})->wait();
  disk->send({tensor})->wait();
  EXPECT_EQ(tensor.count_nonzero().item<int64_t>(), 0);
}

namespace {

/// @return the bytes that the ring has moved of 40,960 each way
int64_t moved_by_the_ring() {
  const int64_t before = counts::read(ResidencyCount::disk_bytes_by_ring);
  const auto disk = std::make_shared<DiskMemory>(support::scratch("ring"), DiskRequests{.bytes = 8192},
                                                 SpillFile::Wording{.user = "", .contents = "", .advice = ""});
  const at::Tensor tensor = torch::arange(10'000, at::kFloat), copy = tensor.clone();
  disk->take(tensor);
  disk->send({tensor})->wait();
  disk->bring({tensor})->wait();
  EXPECT_TRUE(tensor.equal(copy));
  return counts::read(ResidencyCount::disk_bytes_by_ring) - before;
}

}  // namespace

TEST(DirectIo, IsDoneByTheRing) { EXPECT_EQ(moved_by_the_ring(), 2 * 40'960); }

TEST(DirectIo, GoesByRequestsAsItIsTold) {
  const auto counted = [](const DiskRequests& requests) {
    const auto disk = std::make_shared<DiskMemory>(support::scratch("ring"), requests,
                                                   SpillFile::Wording{.user = "", .contents = "", .advice = ""});
    const at::Tensor tensor = torch::ones({32 * 1024});  // 32 blocks
    disk->take(tensor);
    counts::reset();
    disk->send({tensor})->wait();
    using enum ResidencyCount;
    return std::vector<int64_t>{counts::read(disk_shares), counts::read(disk_requests), counts::read(disk_submissions),
                                counts::read(disk_requests_most)};
  };
  const DiskRequests small{.bytes = 4096, .depth = 4, .refills_at_once = false};
  EXPECT_THAT(counted(small), testing::ElementsAre(1, 32, 8, 4));
  auto other = small;
  other.bytes = 8192;
  EXPECT_THAT(counted(other), testing::ElementsAre(1, 16, 4, 4));
  other = small;
  other.depth = 16;
  EXPECT_THAT(counted(other), testing::ElementsAre(1, 32, 2, 16));
  other = small;
  other.threads = 2;
  EXPECT_THAT(counted(other), testing::ElementsAre(2, 32, testing::Ge(8), 4));
  other = small;
  other.one_by_one = true;
  EXPECT_THAT(counted(other), testing::ElementsAre(1, 32, 32, 4));
}

TEST(DirectIo, IsDoneWithoutItWhereTheKernelForbidsIt) {
  support::without_io_uring([] { EXPECT_EQ(moved_by_the_ring(), 0); });
}
