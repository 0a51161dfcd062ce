/// The programs where there is a GPU.
#include <gmock/gmock.h>

#include <filesystem>
#include <optional>
#include <regex>

#include "gpu.hpp"
#include "launch/monitor/gpus.hpp"
#include "program.hpp"
#include "scratch.hpp"

namespace gpu_test {
namespace {

using cli_test::milliseconds;
using cli_test::Program;
using testing::HasSubstr;
using testing::Not;

class GpuPrograms : public GpuTest {};

TEST_F(GpuPrograms, EnvNamesTheGpu) {
  const auto result = Program({cli_test::accelerate_path(), "env"}).wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("GPU"));
  if (!rehearsal()) {
    EXPECT_THAT(result.out, Not(HasSubstr("GPU: none")));
  }
}

TEST_F(GpuPrograms, TestPasses) {
  const auto result = Program({cli_test::accelerate_path(), "test"}).wait(milliseconds(180000));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("training: as one process"));
  EXPECT_THAT(result.out, Not(HasSubstr("FAILED")));
}

/// Cases of this program, started as users' programs are: they find the device by themselves.
TEST_F(GpuPrograms, LaunchedProgramsTrainOnTheGpu) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<std::string> arguments{cli_test::accelerate_path(), "launch", "--num_processes", "1"};
  Program::Options options;
  if (!on_cuda()) {
    arguments.emplace_back("--cpu");
    options.env.emplace_back("ACCELERATE_GPU_REHEARSAL=cpu");
  }
  arguments.insert(arguments.end(), {self,
                                     "--gtest_filter=GpuPlacement.PrepareMovesModelBatchesAndOptimizerState:"
                                     "GpuSharding.OneRankTrainsAsWithoutIt:GpuGroupOfOne.DataParallel*"});
  const auto result = Program(arguments, options).wait(milliseconds(180000));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("3 tests from 3 test suites ran"));
}

TEST_F(GpuPrograms, TheMonitorShowsTheGpuOfARank) {
  std::vector<std::string> arguments{cli_test::accelerate_path(), "launch", "--num_processes", "1", "--monitor",
                                     "--monitor_seconds",         "0.5"};
  if (!on_cuda()) arguments.emplace_back("--cpu");
  arguments.insert(arguments.end(), {"/bin/sleep", "4"});
  const auto result = Program(arguments).wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank  state"));
  // "0: 12 %, 1.5 GiB of 139.8 GiB"
  EXPECT_EQ(std::regex_search(result.err, std::regex("[0-9]: .*[KMG]iB of [0-9.]+ GiB")), on_gpu()) << result.err;
}

/// The launcher's monitor knows a rank's GPU without LibTorch: bytes that this process takes are seen there.
TEST_F(GpuPrograms, TheMonitorSeesTheMemoryInUse) {
  NEEDS_CUDA("no driver to ask");
  accelerate::launcher::Gpus gpus;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto names = accelerate::launcher::gpu_names(visible ? visible : "", 1);
  if (names.at(0).starts_with("MIG")) GTEST_SKIP() << "the driver's library counts whole GPUs only";
  torch::empty({1}, device());  // the context is there
  const auto look = [&]() -> std::optional<accelerate::launcher::GpuUse> { return gpus.look(names).at(0); };
  const auto before = look();
  ASSERT_TRUE(before.has_value());
  constexpr int64_t kBytes = int64_t{4} << 30;
  const auto block = torch::empty({kBytes}, at::TensorOptions().dtype(at::kByte).device(device()));
  const auto after = look();
  EXPECT_GE(after->used_bytes - before->used_bytes, kBytes * 9 / 10);
  EXPECT_NE(after->name, "");  // by which the most that it could do is known
  const auto total = static_cast<int64_t>(at::accelerator::getMemoryInfo(device().index()).second);
  EXPECT_NEAR(static_cast<double>(after->total_bytes), static_cast<double>(total), 0.05 * static_cast<double>(total));
}

}  // namespace
}  // namespace gpu_test
