// The other ranks learn, and soon enough, that one dies, throws, leaves, stops or never comes.
#include <accelerate/accelerate.hpp>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "ranks.hpp"

using namespace accelerate;
using support::rank;
using support::world_size;
using testing::AnyOf;
using testing::HasSubstr;

namespace {

/// Trains until a CommError comes, at most 400 steps. `fault(step)` runs in each step between forward and backward.
/// Nobody waits for the group's timeout, which comes after the deadline of the ranks.
/// @return the error's text, or none
std::string train(Accelerator& accelerator, const std::function<void(int64_t)>& fault) {
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::ReLU(), torch::nn::BatchNorm1d(64),
                            torch::nn::Linear(64, 2));
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.01));
  try {
    for (int64_t step = 0; step < 400; ++step) {
      const auto loss = model(torch::randn({8, 16})).pow(2).mean();
      fault(step);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  } catch (const CommError& error) {
    return error.what();
  }
  return {};
}

/// Runs a case in ranks where `victim` may end in any way; all others must pass.
std::vector<support::RankResult> others_pass(const std::string& test, int64_t victim,
                                             const support::RankOptions& options) {
  auto results = support::run_test_in_ranks(test, options);
  for (size_t r = 0; r < results.size(); ++r) {
    if (static_cast<int64_t>(r) == victim) continue;
    EXPECT_EQ(results[r].exit_code, 0) << "rank " << r << "\n" << results[r].output;
  }
  return results;
}

constexpr auto kDeadline = std::chrono::seconds(120);
constexpr auto kLong = std::chrono::seconds(60);  // for what comes at once where nothing else runs

void die_at_step_three(int64_t victim) {
  Accelerator accelerator;
  const auto trained = train(accelerator, [&](int64_t step) {
    if (rank() == victim && step == 3) ::raise(SIGKILL);
  });
  EXPECT_THAT(trained, HasSubstr("rank " + std::to_string(victim))) << trained;
  EXPECT_THAT(trained, AnyOf(HasSubstr("gone"), HasSubstr("failed"))) << trained;
}

}  // namespace

TEST(RankFault, KilledInTheMiddleOfAStep) {
  if (support::is_rank()) return die_at_step_three(2);
  EXPECT_EQ(others_pass("RankFault.KilledInTheMiddleOfAStep", 2, {.world_size = 3, .deadline = kDeadline})[2].signal,
            SIGKILL);
}

TEST(RankFault, RankZeroKilledInTheMiddleOfAStep) {
  if (support::is_rank()) return die_at_step_three(0);
  EXPECT_EQ(
      others_pass("RankFault.RankZeroKilledInTheMiddleOfAStep", 0, {.world_size = 3, .deadline = kDeadline})[0].signal,
      SIGKILL);
}

// An exception that ends the scope of an Accelerator inside record() is announced with its text.
RANKS_TEST(RankFault, RecordTellsTheOthersWhy, 2) {
  std::string error;
  const int code = record([&] {
    Accelerator accelerator;
    error = train(accelerator, [](int64_t step) {
      if (rank() == 1 && step == 3) throw std::runtime_error("the disk is full");
    });
  });
  EXPECT_EQ(code, rank() == 1 ? 1 : 0);
  if (rank() == 1) {
    EXPECT_TRUE(support::heard("why", 1, kLong));
  } else {
    EXPECT_THAT(error, HasSubstr("rank 1 failed: the disk is full"));
    support::say("why");
  }
}

// Where the body catches it, the others are told when the body ends.
RANKS_TEST(RankFault, RecordTellsTheOthersWhatItsBodyCaught, 2) {
  std::string error;
  record([&] {
    try {
      Accelerator accelerator;
      error = train(accelerator, [](int64_t step) {
        if (rank() == 1 && step == 3) throw std::runtime_error("the disk is full");
      });
    } catch (const std::runtime_error&) {
    }
  });
  if (rank() == 1) {
    EXPECT_TRUE(support::heard("that it failed", 1, kLong));
  } else {
    EXPECT_THAT(error, HasSubstr("rank 1 failed: an exception ended its training"));
    support::say("that it failed");
  }
}

// The process that throws lives on until the others have heard, so that nothing but the announcement can tell them.
RANKS_TEST(RankFault, ThrowsAndLivesOn, 3) {
  std::string error;
  try {
    Accelerator accelerator;
    error = train(accelerator, [](int64_t step) {
      if (rank() == 1 && step == 3) throw std::runtime_error("the disk is full");
    });
  } catch (const std::runtime_error&) {
    EXPECT_EQ(rank(), 1);
    EXPECT_TRUE(support::heard("rank 1 failed", 2, kLong));
    return;
  }
  EXPECT_THAT(error, HasSubstr("rank 1 failed")) << error;
  // Whatever is called next fails at once.
  EXPECT_THROW(gather(torch::ones({1})), CommError);
  support::say("rank 1 failed");
}

RANKS_TEST(RankFault, ThrowsWhileOthersWaitInACollective, 2) {
  if (rank() == 0) {
    try {
      const Accelerator accelerator;
      throw std::runtime_error("the tokenizer has no vocabulary");
    } catch (const std::runtime_error&) {
      EXPECT_TRUE(support::heard("rank 0 failed", 1, kLong));  // alive until then
    }
    return;
  }
  const Accelerator accelerator;
  try {
    gather_object(std::vector<std::string>{"x"});
    FAIL() << "nothing was thrown";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 failed"));
  }
  support::say("rank 0 failed");
}

RANKS_TEST(RankFault, LeavesEarlyWithoutAnError, 3) {
  Accelerator accelerator;
  bool left = false;
  const auto trained = [&] {
    struct Leave {};
    try {
      return train(accelerator, [](int64_t step) {
        if (rank() == 1 && step == 3) throw Leave{};
      });
    } catch (const Leave&) {
      left = true;
      return std::string();
    }
  }();
  if (left) return;
  EXPECT_THAT(trained, AnyOf(HasSubstr("rank 1 has left"), HasSubstr("rank 1 has gone"))) << trained;
}

RANKS_TEST(RankFault, StoppedProcessIsNamed, 3) {
  Accelerator accelerator({.kwargs_handlers = {InitProcessGroupKwargs{.timeout = std::chrono::seconds(6)}}});
  const auto pids = gather_object(std::vector<int64_t>{::getpid()});
  const auto trained = train(accelerator, [](int64_t step) {
    if (rank() == 1 && step == 3) ::raise(SIGSTOP);
  });
  if (rank() == 1) return;  // continued by rank 0
  EXPECT_THAT(trained, HasSubstr("rank 1 has gone or is stopped")) << trained;
  // Rank 0 lets it go on, but only when rank 2 has looked for it too.
  if (rank() == 2) support::say("rank 1 is stopped");
  if (rank() != 0) return;
  support::heard("rank 1 is stopped", 1, kLong);
  ::kill(static_cast<pid_t>(pids[1]), SIGCONT);
}

RANKS_TEST(RankFault, OneSampleOnThreeRanksAndNoneAtAll, 3) {
  Accelerator accelerator;
  const std::vector<torch::Tensor> one{torch::full({2}, 7.0)};
  torch::nn::Linear net(2, 1);
  auto [model, optimizer, loader, empty] =
      accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.01), data::DataLoader(one, {.batch_size = 4}),
                          data::DataLoader(std::vector<torch::Tensor>{}, {.batch_size = 4}));
  int64_t steps = 0;
  for (auto& batch : loader) {
    accelerator.backward(model(batch).mean());
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_TRUE(accelerator.gather_for_metrics(batch).equal(torch::full({1, 2}, 7.0)))
        << "the copies that fill the batch don't count";
    ++steps;
  }
  EXPECT_EQ(steps, 1);
  for ([[maybe_unused]] auto& batch : empty) ++steps;
  EXPECT_EQ(steps, 1);
  // Without completing batches only one rank has anything to do.
  accelerator.join_uneven_inputs(
      model,
      [&] {
        for (auto& batch : loader) {
          accelerator.backward(model(batch).mean());
          ++steps;
        }
      },
      false);
  EXPECT_EQ(accelerator.reduce(torch::tensor(steps), "sum").item<int64_t>(), 4);
}

namespace {

/// One process that believes to be `rank` of two, with a group timeout of two seconds.
support::RankResult alone_of_two(const std::string& rank, uint16_t port) {
  return support::run_program(
      {"--gtest_also_run_disabled_tests", "--gtest_filter=RankFault.DISABLED_JoinPrintsTheError"},
      {.world_size = 1,
       .deadline = kDeadline,
       .env = {{"RANK", rank}, {"LOCAL_RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", std::to_string(port)}}})[0];
}

}  // namespace

// The program of the next test's processes.
TEST(RankFault, DISABLED_JoinPrintsTheError) {
  try {
    const PartialState state({.process_group = {.timeout = std::chrono::seconds(2)}});
  } catch (const Error& error) {
    std::printf("kind %d: %s\n", static_cast<int>(error.kind()), error.what());
  }
}

TEST(RankFault, RendezvousSaysWhatIsWrong) {
  if (support::is_rank()) return;
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(listener, 8), 0);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  const auto busy = ntohs(address.sin_port);

  auto output = alone_of_two("0", busy).output;
  EXPECT_THAT(output, HasSubstr("kind 0: rendezvous: can't listen on 127.0.0.1:" + std::to_string(busy)));
  EXPECT_THAT(output, HasSubstr("--main_process_port"));
  ::close(listener);

  output = alone_of_two("0", support::free_port()).output;
  EXPECT_THAT(output, HasSubstr("kind 3: rendezvous on 127.0.0.1:"));
  EXPECT_THAT(output, HasSubstr("rank(s) 1 of 2 did not check in within 2 s"));

  output = alone_of_two("1", support::free_port()).output;
  EXPECT_THAT(output, HasSubstr("kind 3: rendezvous: rank 1 can't reach rank 0's store"));
}

TEST(RankFault, ContradictoryEnvironment) {
  if (support::is_rank()) {
    try {
      const PartialState state;
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("RANK=5, WORLD_SIZE=2"));
    }
    ::setenv("WORLD_SIZE", "two", 1);
    EXPECT_THROW(PartialState(), ConfigError);
    return;
  }
  support::expect_ranks_pass("RankFault.ContradictoryEnvironment",
                             {.world_size = 1, .env = {{"RANK", "5"}, {"WORLD_SIZE", "2"}}});
}
