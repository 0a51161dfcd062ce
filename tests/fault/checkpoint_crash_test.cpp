// Checkpoints of runs that are killed, whose disk fails, or whose power is cut, in any phase of a save: what is there
// afterwards loads, and training goes on from it as if nothing had been.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "faulty_disk.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"

using namespace accelerate;
using support::rank;
using support::faulty_disk::Fault;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

constexpr int64_t kRanks = 2, kLongest = 40;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

/// Dropout, batch norm, momentum and a schedule: what any of them loses shows in the losses.
struct Run {
  Run(bool sharded, const ProjectConfiguration& project)
      : accelerator((torch::manual_seed(3 + rank()), options_of(sharded, project))),
        net(nn::Linear(32, 48), nn::BatchNorm1d(48), nn::Dropout(0.2), nn::Linear(48, 1)),
        bare(net->parameters(), 0.01) {
    accelerator.register_for_checkpointing(steps);
  }
  static AcceleratorOptions options_of(bool sharded, const ProjectConfiguration& project) {
    AcceleratorState::reset();
    GradientState::reset();
    AcceleratorOptions options{.cpu = true, .project_config = project};
    if (sharded)
      options.fsdp_plugin = FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict};
    return options;
  }
  double step() {
    const auto loss = model(torch::rand({4, 32})).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step(), scheduler.step(), optimizer.zero_grad();
    ++steps;
    return loss.item<double>();
  }

  Accelerator accelerator;
  nn::Sequential net;
  torch::optim::AdamW bare;
  Prepared<nn::Sequential> model = accelerator.prepare(net);
  AcceleratedOptimizer optimizer = accelerator.prepare(bare);
  AcceleratedScheduler scheduler = accelerator.prepare(optim::linear_schedule_with_warmup(bare, 4, 1000));
  int64_t steps = 0;
};

fs::path losses_file(const fs::path& root) { return root.parent_path() / ("losses_" + std::to_string(rank())); }

/// Of an uninterrupted run.
std::vector<double> losses_of(const fs::path& root) {
  std::ifstream in(losses_file(root), std::ios::binary);
  std::vector<double> losses(kLongest + 8);
  in.read(reinterpret_cast<char*>(losses.data()), static_cast<std::streamsize>(losses.size() * sizeof(double)));
  return losses;
}

Fault fault_of(const std::string& way) {
  static const std::map<std::string, Fault> all{
      {"one", Fault::dies}, {"all", Fault::dies},      {"power", Fault::dies},    {"less", Fault::writes_less},
      {"eio", Fault::eio},  {"enospc", Fault::enospc}, {"flush", Fault::no_flush}};
  return all.at(way);
}

/// What a rank does: loads what is there, trains two steps, saves, and has bad luck.
void run_rank() {
  const fs::path root = variable("CRASH_ROOT");
  const auto way = variable("CRASH_WAY");
  const bool named = variable("CRASH_NAMED") == "1", behind = variable("CRASH_BEHIND") == "1";
  const bool is_victim = rank() == std::stoll(variable("CRASH_RANK"));
  std::ofstream(root.parent_path() / ("pid_" + std::to_string(rank()))) << ::getpid();
  Run run(variable("CRASH_SHARDED") == "1", {.project_dir = root,
                                             .automatic_checkpoint_naming = named,
                                             .total_limit = named ? std::optional<int64_t>(2) : std::nullopt});
  const fs::path folder = named ? fs::path() : root / "checkpoint";
  if (way == "first") {
    std::ofstream losses(losses_file(root), std::ios::binary);
    for (int64_t i = 0; i < kLongest + 8; ++i) {
      if (i == 2) run.accelerator.save_state(folder);
      const double loss = run.step();
      losses.write(reinterpret_cast<const char*>(&loss), sizeof loss);
    }
    return;
  }
  const auto losses = losses_of(root);
  const auto expect_goes_on = [&](const char* what, int64_t number) {
    for (int64_t i = 0; i < number; ++i) {
      const auto at = static_cast<size_t>(run.steps);
      EXPECT_EQ(run.step(), losses.at(at)) << what << ", step " << at;
    }
  };
  run.accelerator.load_state(folder);
  const int64_t loaded = run.steps;
  // The last one that was complete, or the one that was being written when the run before died.
  const fs::path steps_file = root.parent_path() / "complete";
  if (fs::exists(steps_file)) {
    int64_t complete = 0;
    std::ifstream(steps_file) >> complete;
    EXPECT_TRUE(loaded == complete || loaded == complete + 2) << loaded << " steps, after " << complete;
  }
  expect_goes_on("loaded", 2);
  run.accelerator.wait_for_everyone();
  if (rank() == 0) std::ofstream(steps_file) << loaded;
  const auto death = [&] {
    if (way != "one")
      for (int64_t other = 0; other < kRanks; ++other)
        if (other != rank()) {
          std::ifstream pid(root.parent_path() / ("pid_" + std::to_string(other)));
          int64_t number = 0;
          pid >> number;
          ::kill(static_cast<pid_t>(number), SIGKILL);
        }
    ::raise(SIGKILL);
  };
  support::faulty_disk::arm(root, root.parent_path() / "journal", is_victim ? fault_of(way) : Fault::none,
                            std::stoll(variable("CRASH_AT")), death);
  const auto save = [&]() -> std::string {
    try {
      run.accelerator.save_state(folder, {.behind_training = behind});
      if (behind) expect_goes_on("behind training", 2), run.accelerator.wait_for_checkpoint();
    } catch (const CheckpointError& error) {
      return error.what();
    } catch (const ResourceError& error) {
      return error.what();
    }
    return "";
  };
  try {
    const auto failure = save();
    const int64_t calls = support::faulty_disk::disarm();
    std::ofstream(root.parent_path() / ("calls_" + std::to_string(rank()))) << calls;
    if (is_victim && fault_of(way) == Fault::dies) {
      std::ofstream(steps_file) << loaded + 2;  // it has returned, so it is there
      death();
    }
    expect_goes_on("after the save", 1);
    run.accelerator.load_state(folder);
    if (way == "less") EXPECT_EQ(failure, "");
    if (!failure.empty()) EXPECT_THAT(failure, testing::HasSubstr(root.string()));
    // Of the last flush the disk may say that it has failed when the checkpoint has its name.
    if (const bool may_be_there = way == "flush" && !failure.empty(); !may_be_there || run.steps != loaded + 2)
      EXPECT_EQ(run.steps, failure.empty() ? loaded + 2 : loaded);
    run.accelerator.wait_for_everyone();
    if (rank() == 0) std::ofstream(steps_file) << run.steps;
    expect_goes_on("loaded again", 2);
  } catch (const CommError&) {
    if (way != "one" || is_victim) throw;
    std::_Exit(0);  // alone: what it says is other tests' subject
  }
}

void expect_all_right(const std::vector<support::RankResult>& ranks, bool may_die) {
  for (const auto& result : ranks)
    if (!(may_die && result.signal == SIGKILL))
      EXPECT_TRUE(result.exit_code == 0 && result.signal == 0) << result.signal << "\n" << result.output;
}

int64_t number_in(const fs::path& file) {
  std::ifstream in(file);
  int64_t number = 0;
  in >> number;
  return number;
}

}  // namespace

// ACCELERATE_TEST_KILLS: how many; all kinds come by turns.
TEST(CheckpointCrash, InAnyPhaseOfASave) {
  if (support::is_rank()) return run_rank();
  const auto wanted = variable("ACCELERATE_TEST_KILLS");
  const int64_t crashes = wanted.empty() ? 28 : std::stoll(wanted);
  const std::vector<std::string> ways{"one", "all", "power", "less", "eio", "enospc", "flush"};
  std::mt19937_64 random(20261130);
  std::map<std::string, int64_t> killed, taken_back;
  for (int64_t i = 0; i < crashes; ++i) {
    const auto& way = ways[static_cast<size_t>(i) % ways.size()];
    const int64_t form = i % 8;  // 7 ways and 8 forms: each with each
    const bool sharded = form & 1, named = form & 2, behind = form & 4;
    const auto base = support::scratch("form" + std::to_string(form));
    const fs::path root = base / "run";
    std::vector<std::pair<std::string, std::string>> env{{"CRASH_ROOT", root.string()},
                                                         {"CRASH_SHARDED", sharded ? "1" : "0"},
                                                         {"CRASH_NAMED", named ? "1" : "0"},
                                                         {"CRASH_BEHIND", behind ? "1" : "0"},
                                                         {"CRASH_RANK", std::to_string(random() % kRanks)}};
    const auto start = [&](const std::string& one, int64_t at) {
      auto all = env;
      all.emplace_back("CRASH_WAY", one), all.emplace_back("CRASH_AT", std::to_string(at));
      return support::run_test_in_ranks("CheckpointCrash.InAnyPhaseOfASave", {.world_size = kRanks, .env = all});
    };
    const auto victim = env.back().second;
    if (number_in(base / "complete") + 8 > kLongest) fs::remove_all(base);
    if (!fs::exists(root)) {
      fs::create_directories(root);
      expect_all_right(start("first", 0), false);
      expect_all_right(start("less", -1), false);  // counts the calls
    }
    const int64_t calls = std::max<int64_t>(1, number_in(base / ("calls_" + victim)));
    const bool dies = fault_of(way) == Fault::dies;
    // Beyond the last call: when save_state has returned.
    const auto at = static_cast<int64_t>(random() % static_cast<uint64_t>(dies ? calls + calls / 2 : calls));
    SCOPED_TRACE(testing::Message() << "number " << i << ": " << way << " at call " << at << " of " << calls
                                    << ", rank " << victim << (sharded ? ", sharded" : "") << (named ? ", named" : "")
                                    << (behind ? ", behind training" : ""));
    const auto ranks = start(way, at);
    expect_all_right(ranks, dies);
    for (const auto& result : ranks) killed[way] += result.signal == SIGKILL ? 1 : 0;
    if (way == "power") taken_back[way] += support::faulty_disk::cut_power(base / "journal", random());
    fs::remove(base / "journal");
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(killed["one"], 0);
  EXPECT_GT(killed["all"], 0);
  EXPECT_GT(taken_back["power"], 0);
  std::cout << crashes << " saves, killed ranks: " << killed["one"] << " alone, " << killed["all"] + killed["power"]
            << " with all others; " << taken_back["power"] << " changes lost with the power\n";
}

// 100 bits of each file, wherever they are.
RANKS_TEST(CheckpointCrash, AFlippedBitIsNamed, 1) {
  for (const bool sharded : {false, true}) {
    const auto root = support::scratch(sharded ? "sharded" : "plain");
    Run run(sharded, {.project_dir = root});
    run.step(), run.step();
    const auto folder = run.accelerator.save_state(root / "checkpoint");
    std::mt19937_64 random(7);
    int64_t files = 0;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (!entry.is_regular_file()) continue;
      ++files;
      const auto whole = support::text_of(entry.path());
      for (int i = 0; i < 100; ++i) {
        auto damaged = whole;
        const auto bit = random() % (8 * whole.size());
        damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
        support::write(entry.path(), damaged);
        EXPECT_THAT(support::message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
                    testing::HasSubstr(entry.path().filename().string()))
            << entry.path() << ", bit " << bit;
      }
      support::write(entry.path(), whole);
    }
    EXPECT_GE(files, 5);
    run.accelerator.load_state(folder);
    EXPECT_EQ(run.steps, 2);
  }
}
