// A launcher whose ranks save on signals: it waits for them, tells others by its exit code that there is a checkpoint,
// and on several machines the others go on from it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "program.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class SavingLaunch : public testing::Test {
 protected:
  SavingLaunch()
      : folder(support::scratch_dir() + "/" + testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder);
    fs::create_directories(folder);
  }
  /// `accelerate launch OPTIONS save_on_signal_training FOLDER …`, two ranks. @param save  milliseconds that it takes
  std::vector<std::string> words(std::vector<std::string> options, int save) const {
    options.insert(options.begin(), {accelerate_path(), "launch", "--cpu", "--grace_seconds", "4"});
    const auto program = fs::path(accelerate_path()).parent_path() / "save_on_signal_training";
    options.insert(options.end(), {program.string(), folder, std::to_string(save), "3"});
    return options;
  }
  bool saved(int number) const {
    return fs::exists(fs::path(folder) / "checkpoints" / ("checkpoint_" + std::to_string(number)) / "checkpoint.json");
  }

  const std::string folder;
};

const std::vector<std::string> kTwoRanks{"--num_processes", "2", "--max_restarts", "1"};

TEST_F(SavingLaunch, WaitsForRanksThatSaveBeyondItsGrace) {
  Program program(words(kTwoRanks, 6000));
  ASSERT_TRUE(program.wait_for("trains")) << program.errors();
  program.signal(SIGTERM);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 75) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("is saving a checkpoint, for which this launcher waits beyond"),
                                HasSubstr("stopped by SIGTERM; all ranks have ended with exit code 75"),
                                Not(HasSubstr("starting all processes again"))));
  EXPECT_TRUE(saved(0));
  const auto next = Program(words(kTwoRanks, 0)).wait();
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_THAT(next.out, HasSubstr("goes on after a step, on 2 processes"));
}

TEST_F(SavingLaunch, PassesOnWhatSlurmSendsBeforeTheTimeLimitAndDoesNotStartAgain) {
  Program program(words(kTwoRanks, 0));
  ASSERT_TRUE(program.wait_for("trains")) << program.errors();
  program.signal(SIGUSR1);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 75) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("stopped by SIGUSR1"), Not(HasSubstr("starting all processes again"))));
  EXPECT_TRUE(saved(0));
}

TEST_F(SavingLaunch, OtherMachinesGoOnFromTheCheckpoint) {
  const std::string port = std::to_string(support::free_port());
  const auto machine = [&](int number) {
    return words({"--num_machines", "1:2", "--num_processes", "2", "--rdzv_backend", "c10d", "--main_process_ip",
                  "127.0.0.1", "--main_process_port", port, "--rdzv_conf",
                  "local_addr=127.0.0." + std::to_string(number + 1) + ",is_host=" + (number == 0 ? "1" : "0") +
                      ",keep_alive_interval=0.5,keep_alive_max_attempt=8,join_timeout=60,close_timeout=8,"
                      "last_call_timeout=30"},
                 0);
  };
  Program stays(machine(0)), goes(machine(1));
  ASSERT_TRUE(stays.wait_for("trains") && goes.wait_for("trains")) << stays.errors();
  goes.signal(SIGTERM);
  const auto gone = goes.wait(), on = stays.wait();
  EXPECT_EQ(gone.exit_code, 75) << gone.err;
  EXPECT_EQ(on.exit_code, 0) << on.err;
  EXPECT_THAT(on.out, HasSubstr("goes on after a step, on 1 processes"));
  EXPECT_THAT(on.err, HasSubstr("(restart 0 of 0)"));
}

}  // namespace
