// Disks that are full, or fail, while save_state writes: the system's calls are this program's own.
#include <accelerate/accelerate.hpp>

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"

namespace {

/// What the disk does from now on.
struct Disk {
  std::atomic<int64_t> says_free{-1};  ///< bytes; negative: what is so
  std::atomic<int64_t> takes{-1};      ///< so many bytes more, and then no space is left; negative: all
  std::atomic<int64_t> flushes{-1};    ///< so many times more, and then once it fails; negative: always
  std::atomic<int64_t> flushed{0};
} disk;

bool is_file(int handle) {
  struct stat facts {};
  return handle > 2 && ::fstat(handle, &facts) == 0 && S_ISREG(facts.st_mode);
}

}  // namespace

extern "C" int statvfs(const char* path, struct statvfs* facts) noexcept {
  static const auto real = reinterpret_cast<int (*)(const char*, struct statvfs*)>(::dlsym(RTLD_NEXT, "statvfs"));
  const int result = real(path, facts);
  if (disk.says_free >= 0) {
    facts->f_frsize = 1;
    facts->f_bfree = facts->f_bavail = static_cast<fsblkcnt_t>(disk.says_free);
  }
  return result;
}
extern "C" ssize_t pwrite(int handle, const void* bytes, size_t count, off_t at) {
  if (disk.takes >= 0 && is_file(handle)) {
    if (disk.takes == 0) return errno = ENOSPC, -1;
    count = std::min(count, static_cast<size_t>(disk.takes.load()));
    disk.takes -= static_cast<int64_t>(count);
  }
  return ::syscall(SYS_pwrite64, handle, bytes, count, at);
}
extern "C" int fsync(int handle) {
  ++disk.flushed;
  if (disk.flushes >= 0 && disk.flushes-- == 0) return errno = EIO, -1;
  return static_cast<int>(::syscall(SYS_fsync, handle));
}

using namespace accelerate;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

struct Run {
  explicit Run(bool sharded) : accelerator(options_of(sharded)), net(nn::Linear(50, 40), nn::Linear(40, 1)) {
    hook = accelerator.register_save_state_pre_hook([this](const fs::path& folder) {
      ++hooks;
      if (accelerator.is_main_process()) std::ofstream(folder / "notes.txt") << "mine";
    });
  }
  static AcceleratorOptions options_of(bool sharded) {
    AcceleratorState::reset();
    GradientState::reset();
    AcceleratorOptions options{.cpu = true};
    if (sharded)
      options.fsdp_plugin = FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict};
    return options;
  }
  double step() {
    const auto loss = model(torch::ones({2, 50})).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step(), optimizer.zero_grad();
    return loss.item<double>();
  }
  /// A checkpoint of now in the folder is whole, and training goes on from it.
  void expect_saves(const fs::path& folder) {
    accelerator.save_state(folder);
    const std::vector<double> next{step(), step()};
    accelerator.load_state(folder);
    EXPECT_EQ((std::vector<double>{step(), step()}), next);
  }

  Accelerator accelerator;
  nn::Sequential net;
  torch::optim::SGD sgd{net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.5)};
  Prepared<nn::Sequential> model = accelerator.prepare(net);
  AcceleratedOptimizer optimizer = accelerator.prepare(sgd);
  Scope hook;
  int64_t hooks = 0;
};

bool is_last() { return support::rank() + 1 == support::world_size(); }
constexpr int64_t kOfTheLargest = 50 * 40, kParameters = kOfTheLargest + 40 + 40 + 1;

fs::path folder_of(const std::string& name) { return support::scratch_of_job(name) / "checkpoint"; }
bool is_anything_left(const fs::path& folder) {
  return fs::exists(folder.parent_path()) && !fs::is_empty(folder.parent_path());
}

}  // namespace

RANKS_TEST(FullDisk, WhatItTakesIsComparedBeforeAnythingIsWritten, 1, 2) {
  for (const bool sharded : {false, true}) {
    const auto folder = folder_of(sharded ? "sharded" : "plain");
    Run run(sharded);
    run.step();
    constexpr int64_t kBytes = 2 * 4 * kParameters;  // weights and momentum
    // A rank may have no element of a small tensor, and then does not know that there is a momentum of it.
    const int64_t known = sharded ? 4 * kParameters + 4 * kOfTheLargest : kBytes;
    disk.says_free = known - 1;
    EXPECT_THAT(message_of<ResourceError>([&] { run.accelerator.save_state(folder); }),
                AllOf(HasSubstr("takes at least " + (sharded ? "" : std::to_string(kBytes) + " bytes")),
                      HasSubstr("has " + std::to_string(known - 1) + " bytes free")));
    run.accelerator.wait_for_everyone();
    EXPECT_FALSE(is_anything_left(folder));
    EXPECT_EQ(run.hooks, 0);
    disk.says_free = kBytes;
    run.expect_saves(folder);
    // A hook may write less than the models are.
    if (!sharded) {
      disk.says_free = kBytes / 2;
      const auto less = run.accelerator.register_save_state_pre_hook(
          [](const std::vector<ModelRef>&, Accelerator::ModelWeights& weights, const fs::path&) { weights.clear(); });
      run.accelerator.save_state(folder);
    }
    disk.says_free = -1;
  }
}

RANKS_TEST(FullDisk, ThatIsFullInTheMiddleLosesNothing, 1, 2) {
  for (const bool sharded : {false, true}) {
    const auto folder = folder_of(sharded ? "sharded" : "plain");
    Run run(sharded);
    run.step();
    for (const int64_t bytes : {0, 100, 3000}) {
      SCOPED_TRACE(bytes);
      if (!sharded ? support::rank() == 0 : is_last()) disk.takes = bytes;
      disk.says_free = 1 << 20;
      EXPECT_THAT(message_of<Error>([&] { run.accelerator.save_state(folder); }),
                  AllOf(HasSubstr("No space left on device"), HasSubstr("more bytes to it"),
                        HasSubstr("its disk has 1048576 bytes free")));
      disk.takes = disk.says_free = -1;
      run.accelerator.wait_for_everyone();
      EXPECT_FALSE(is_anything_left(folder));
      run.step();
    }
    run.expect_saves(folder);
    // With an older one there, that one stays.
    run.accelerator.save_state(folder);
    const double next = run.step();
    if (!sharded ? support::rank() == 0 : is_last()) disk.takes = 100;
    EXPECT_THROW(run.accelerator.save_state(folder), Error);
    disk.takes = -1;
    run.accelerator.load_state(folder);
    EXPECT_EQ(run.step(), next);
  }
}

// Each time that something is flushed it may fail: then save_state() says so, and an older checkpoint is there yet, or
// the new one is.
RANKS_TEST(FullDisk, NoFlushThatFailsIsPassedOver, 1, 2) {
  const auto folder = folder_of("flushed");
  Run run(/*sharded=*/true);
  run.step();
  run.accelerator.save_state(folder);
  const int64_t before = disk.flushed;
  run.accelerator.save_state(folder);  // in the place of the older one
  const int64_t times = disk.flushed - before;
  EXPECT_GT(times, support::rank() == 0 ? 12 : 1);
  for (int64_t rank = 0; rank < support::world_size(); ++rank) {
    std::vector<int64_t> most{rank == support::rank() ? times : 0};
    for (const auto n : gather_object(most)) most[0] = std::max(most[0], n);
    for (int64_t n = 0; n < most[0]; ++n) {
      SCOPED_TRACE(testing::Message() << "flush " << n << " of rank " << rank);
      if (rank == support::rank()) disk.flushes = n;
      const auto message = message_of<Error>([&] { run.accelerator.save_state(folder); });
      disk.flushes = -1;
      EXPECT_THAT(message, HasSubstr("can't flush it to the disk: Input/output error"));
      run.accelerator.load_state(folder);
    }
  }
  run.expect_saves(folder);
}
