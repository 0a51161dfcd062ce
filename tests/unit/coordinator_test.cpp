#include "launch/machines/coordinator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace {

using namespace accelerate::launcher;
using namespace std::chrono_literals;
using testing::HasSubstr;

/// Machines and a clock, both invented.
struct Job {
  explicit Job(Coordinator::Settings settings) : coordinator(settings, now) {}
  Node& add(int64_t local_world_size = 2, int64_t machine_rank = -1) {
    Node node;
    node.id = static_cast<int64_t>(nodes.size()) + 1;
    node.host = "host" + std::to_string(node.id);
    node.local_world_size = local_world_size;
    node.machine_rank = machine_rank;
    nodes.push_back(node);
    return nodes.back();
  }
  Node& of(size_t index) { return nodes[index]; }
  /// All that are not silent live on; members that wait for the round begin to run.
  const Decision& step(std::chrono::milliseconds later = 100ms, const std::set<size_t>& silent = {}) {
    now += later;
    for (size_t i = 0; i < nodes.size(); ++i)
      if (!silent.contains(i)) ++nodes[i].beat;
    coordinator.step(nodes, now);
    if (coordinator.decision().phase == "running")
      for (const auto& member : coordinator.decision().members)
        if (auto& node = nodes[static_cast<size_t>(member.id - 1)]; node.state == "joining")
          node.state = "running", node.round = coordinator.decision().round;
    return coordinator.decision();
  }
  void all_end(const std::string& how) {
    for (auto& node : nodes)
      if (node.state == "running") node.state = how;
  }
  void all_join() {
    for (auto& node : nodes)
      if (node.state != "left") node.state = "joining";
  }
  Coordinator::Clock::time_point now{};
  std::vector<Node> nodes;
  Coordinator coordinator;
};

std::vector<int64_t> ids(const Decision& decision) {
  std::vector<int64_t> result;
  for (const auto& member : decision.members) result.push_back(member.id);
  return result;
}

TEST(Coordinator, RanksCountThroughMachinesOfDifferentSizesAndRoles) {
  Job job({.min_machines = 3, .max_machines = 3});
  job.add(2).role = "a";
  job.add(1).role = "b";
  EXPECT_EQ(job.step().phase, "forming");
  job.add(3).role = "a";
  const auto& d = job.step();
  ASSERT_EQ(d.phase, "running");
  EXPECT_EQ(d.world_size, 6);
  EXPECT_EQ(d.members[2].first_rank, 3);
  EXPECT_EQ(d.members[2].first_role_rank, 2);
  EXPECT_EQ(d.members[2].role_world_size, 5);
  EXPECT_EQ(d.members[1].first_role_rank, 0);
}

TEST(Coordinator, FixedRanksOrderTheMachinesAndOneOfTwoWithTheSameWaits) {
  Job job({.min_machines = 2, .max_machines = 2, .fixed_ranks = true, .join_timeout = 1min});
  job.add(1, 1);
  job.add(1, 1);
  EXPECT_EQ(job.step().phase, "forming");
  job.add(1, 0);
  EXPECT_EQ(ids(job.step()), (std::vector<int64_t>{3, 1}));
}

TEST(Coordinator, LeastNumberWaitsForTheLastCall) {
  Job job({.min_machines = 1, .max_machines = 3, .last_call = 5s});
  job.add();
  EXPECT_EQ(job.step().phase, "forming");
  job.add();
  EXPECT_EQ(job.step(4s).phase, "forming");
  EXPECT_EQ(ids(job.step(2s)), (std::vector<int64_t>{1, 2}));
}

TEST(Coordinator, MostMachinesStartAtOnceAndFurtherOnesWait) {
  Job job({.min_machines = 1, .max_machines = 2, .last_call = 60s});
  for (int i = 0; i < 3; ++i) job.add();
  EXPECT_EQ(ids(job.step()), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(job.step().phase, "running");
}

TEST(Coordinator, LateMachineMakesANewRoundThatIsNoRestart) {
  Job job({.min_machines = 1, .max_machines = 2, .last_call = 1s});
  job.add();
  job.step();
  job.step(2s);
  job.add();
  EXPECT_EQ(job.step().phase, "ending");
  EXPECT_EQ(job.step().phase, "ending");  // until the ranks of the first have ended
  job.of(0).state = "stopped";
  EXPECT_EQ(job.step().phase, "forming");
  job.all_join();
  const auto& d = job.step();
  EXPECT_EQ(d.round, 2);
  EXPECT_EQ(d.restarts, 0);
  EXPECT_EQ(d.world_size, 4);
}

TEST(Coordinator, FailureEndsTheRoundForAllAndCounts) {
  Job job({.min_machines = 2, .max_machines = 2, .max_restarts = 1});
  job.add();
  job.add();
  job.step();
  job.of(1).state = "failing";
  EXPECT_EQ(job.step().phase, "ending");
  job.of(1).state = "failed";
  EXPECT_EQ(job.step().phase, "ending");
  job.of(0).state = "stopped";
  EXPECT_EQ(job.step().restarts, 1);
  job.all_join();
  EXPECT_EQ(job.step().round, 2);
  job.of(0).state = "failed";
  job.of(0).code = 5;
  job.of(0).text = "rank 0 of 4 ended with exit code 5";
  job.step();
  job.of(1).state = "stopped";
  const auto& d = job.step();
  EXPECT_EQ(d.phase, "closed");
  EXPECT_EQ(d.code, 5);
  EXPECT_THAT(d.why, HasSubstr("rank 0 of 4"));
}

TEST(Coordinator, SilenceIsALossAndTheCauseOfWhatFailsElsewhere) {
  Job job({.min_machines = 2, .max_machines = 2, .lost_after = 10s});
  job.add();
  job.add();
  job.step();
  EXPECT_EQ(job.step(9s, {1}).phase, "running");
  job.of(0).state = "failed";
  job.of(0).code = 1;
  EXPECT_EQ(job.step(500ms, {1}).phase, "ending");
  const auto& d = job.step(1s, {1});
  EXPECT_EQ(d.phase, "closed");
  EXPECT_EQ(d.code, 69);
  EXPECT_THAT(d.why, HasSubstr("host2"));
}

TEST(Coordinator, RoundAfterALossDoesNotWaitForALastCall) {
  Job job({.min_machines = 1, .max_machines = 2, .max_restarts = 1, .last_call = 60s, .lost_after = 10s});
  job.add();
  job.add();
  job.step();
  job.of(1).state = "left";
  EXPECT_EQ(job.step().phase, "ending");
  job.all_end("stopped");
  job.step();
  job.all_join();
  const auto& d = job.step();
  EXPECT_EQ(ids(d), (std::vector<int64_t>{1}));
  EXPECT_EQ(d.restarts, 1);
}

/// Two machines that run, of which all ranks have saved because of a signal.
Job saved(Coordinator::Settings settings, const std::string& second) {
  settings.max_machines = 2;
  settings.last_call = 60s;
  Job job(settings);
  job.add();
  job.add();
  job.step();
  for (auto& node : job.nodes) node.state = "failed", node.code = 75;
  job.of(1).state = second;
  return job;
}

TEST(Coordinator, RoundAfterAMachineThatHadToGoWhenAllHadSavedIsNoRestart) {
  Job job = saved({.min_machines = 1}, "left");
  EXPECT_EQ(job.step().phase, "forming");
  job.all_join();
  const auto& d = job.step();
  EXPECT_EQ(ids(d), (std::vector<int64_t>{1}));
  EXPECT_EQ(d.restarts, 0);
}

TEST(Coordinator, RanksThatSavedForAMachineThatCameHaveNotFailed) {
  Job job({.min_machines = 1, .max_machines = 2, .last_call = 1s});
  job.add();
  job.step();
  job.step(2s);
  job.add();
  EXPECT_EQ(job.step().phase, "ending");
  job.of(0).state = "failed";
  job.of(0).code = 75;
  EXPECT_EQ(job.step().phase, "forming");
  job.all_join();
  EXPECT_EQ(job.step().restarts, 0);
}

TEST(Coordinator, WithoutEnoughMachinesRanksThatSavedEndTheJobWithTheirCode) {
  Job left = saved({.min_machines = 2}, "left");
  EXPECT_EQ(left.step().phase, "closed");
  EXPECT_EQ(left.step().code, 75);
  Job nobody_left = saved({.min_machines = 1}, "failed");
  EXPECT_EQ(nobody_left.step().code, 75);
  Job again = saved({.min_machines = 1, .max_restarts = 1}, "failed");
  EXPECT_EQ(again.step().restarts, 1) << "or a program that always ends so would be started for ever";
}

TEST(Coordinator, AllDoneIsTheEndAndNobodyDisturbsMachinesThatAreDone) {
  Job job({.min_machines = 2, .max_machines = 3, .last_call = 0s});
  job.add();
  job.add();
  job.step();
  job.of(0).state = "done";
  job.add();
  EXPECT_EQ(job.step().phase, "running");
  job.of(1).state = "done";
  EXPECT_EQ(job.step().phase, "closed");
  EXPECT_EQ(job.step().code, 0);
}

TEST(Coordinator, TooFewAreAnErrorThatNamesTheMissing) {
  Job job({.min_machines = 3, .max_machines = 3, .fixed_ranks = true, .join_timeout = 5s});
  job.add(1, 1);
  job.step();
  const auto& d = job.step(6s);
  EXPECT_EQ(d.code, 71);
  EXPECT_THAT(d.why, HasSubstr("only 1 of 3 machines came within 5 s; missing: machine rank 0, 2"));
}

}  // namespace
