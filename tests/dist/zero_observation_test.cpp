/// Requests of a DeepSpeed configuration to see a run: lines, records, tables and files; counts and bytes exactly, and
/// never how long something took.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "accelerate/accelerate.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/residency/recompute.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "parallel/zero/objects.hpp"
#include "ranks.hpp"
#include "residency/activations/checkpoint_rules.hpp"
#include "scratch.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate;
using support::text_of;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kMicroSteps = 2, kSteps = 2, kSamples = 4;

struct BlocksImpl : torch::nn::Module {
  explicit BlocksImpl(bool recomputes = false) : recomputes(recomputes) {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(5, 8));
    act = register_module("act", torch::nn::ReLU());
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!recomputes) return second(act(first(x)));
    return second(checkpoint([this](const at::Tensor& x) { return act(first(x)); }, {}, x));
  }
  bool recomputes;
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::ReLU act{nullptr};
};
TORCH_MODULE(Blocks);
constexpr int64_t kParameters = 5 * 8 + 8 + 8 * 3 + 3, kMacs = kSamples * (5 * 8 + 8 * 3);

DeepSpeedPlugin file_with(const std::string& more, int64_t stage = 2) {
  return {.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": )" +
                          std::to_string(stage) + "}, " + more + "}"};
}

/// @return what this rank printed
std::string printed_in_training(const DeepSpeedPlugin& plugin, bool recomputes = false,
                                const std::function<void(Accelerator&)>& at_the_end = nullptr) {
  testing::internal::CaptureStdout();
  {
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin});
    Blocks model(recomputes);
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
    for (int64_t step = 0; step < kSteps; ++step)
      for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
        const auto scope = accelerator.accumulate(m);
        accelerator.backward(m(torch::ones({kSamples, 5})).square().mean());
        opt.step();
        opt.zero_grad();
      }
    {
      const at::NoGradGuard evaluation;
      m(torch::ones({kSamples, 5}));
    }
    accelerator.end_training();
    if (at_the_end) at_the_end(accelerator);
  }
  return testing::internal::GetCapturedStdout();
}

int64_t count_of(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return std::distance(std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator());
}

std::filesystem::path folder_called(const std::string& name) {
  return std::filesystem::path(support::scratch_dir()) / (name + std::to_string(support::world_size()));
}

constexpr const char* kNumber = "[0-9]+\\.[0-9][0-9]";
std::string time_line(const std::string& ending) {
  std::string line = "\\[Rank 0\\] time \\(ms\\)";
  for (const char* name : {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"})
    line += std::string(" \\| ") + name + ending + ": " + kNumber;
  return line + "\n";
}

}  // namespace

RANKS_TEST(ZeroObservation, TimesOfEachStepAreLinesAndRecords, 1, 2) {
  support::on_both_stores([&](const std::string& store) {
    for (const int64_t stage : {0, 2, 3}) {
      SCOPED_TRACE(store + ", stage " + std::to_string(stage));
      support::reset_states();
      const auto folder = folder_called("times" + std::to_string(stage) + store.back());
      const auto text = printed_in_training(file_with(R"("wall_clock_breakdown": true, "csv_monitor": {"enabled": true,
            "job_name": "job", "output_path": ")" + folder.string() +
                                                          R"("})",
                                                      stage));
      const bool main = support::rank() == 0;
      EXPECT_EQ(count_of(text, time_line("")), main ? kSteps : 0) << text;
      EXPECT_EQ(count_of(text, time_line("_microstep")), main ? kSteps * kMicroSteps : 0) << text;
      if (!main) continue;
      const int64_t samples = kSamples * kMicroSteps * support::world_size();
      for (const std::string name : {"forward", "backward", "backward_inner", "backward_allreduce", "step"})
        EXPECT_THAT(text_of(folder / "job" / ("Train_Samples_elapsed_time_ms_" + name + ".csv")),
                    testing::MatchesRegex("step,elapsed_time_ms_" + name + "\r\n" + std::to_string(samples) +
                                          ",[-0-9.e]+\r\n" + std::to_string(2 * samples) + ",[-0-9.e]+\r\n"));
    }
  });
}

RANKS_TEST(ZeroObservation, MemoryIsPrintedAroundEachPhase, 1, 2) {
  const auto text = printed_in_training(file_with(R"("memory_breakdown": true)"));
  const bool main = support::rank() == 0;
  for (const auto& [phase, times] : {std::pair("forward", kSteps * kMicroSteps),
                                     std::pair("backward", kSteps * kMicroSteps), std::pair("step", kSteps)})
    for (const std::string when : {"before", "after"})
      EXPECT_EQ(count_of(text, "Engine " + when + " " + phase + "\nProcess Memory:  resident = " + kNumber +
                                   " GB, peak = " + kNumber + " GB\nCPU Virtual Memory:  used = " + kNumber +
                                   " GB, percent = [0-9]+\\.[0-9]%\n"),
                main ? times : 0)
          << text;
  EXPECT_EQ(count_of(text, "time \\(ms\\)"), 0);
}

/// By collectives of c10d, and by what stands for them in shared memory: the gradients of each micro-step are one
/// reduction of all parameters. By c10d's all tell each other which gradients they have, and the parameters are
/// gathered in the beginning and after each step.
RANKS_TEST(ZeroObservation, CollectivesAreCountedByOperationAndSize, 2) {
  constexpr int64_t kPiece = 64;  // elements: what a rank holds of a unit is filled up to as many
  const int64_t whole = (kParameters + 2 * kPiece - 1) / (2 * kPiece) * (2 * kPiece) * 4;  // bytes
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    const bool shared = store.back() == '1';
    std::map<std::pair<std::string, int64_t>, int64_t> counts;
    int64_t all = 0;
    const auto text = printed_in_training(file_with(R"("comms_logger": {"enabled": true, "verbose": true})"), false,
                                          [&](Accelerator&) {
                                            for (const auto& record : comm::comms_records()) {
                                              counts[{record.operation, record.bytes}] = record.count;
                                              all += record.count;
                                            }
                                          });
    const auto count = [&](const std::string& operation, int64_t bytes) { return counts[{operation, bytes}]; };
    EXPECT_EQ(count("reduce_scatter", whole), kSteps * kMicroSteps) << text;
    EXPECT_EQ(count("all_gather", whole / 2), shared ? 0 : 1 + kSteps) << text;
    constexpr int64_t kFlags = (4 + 4) * 4;  // bytes: a word for each parameter, and a digest
    EXPECT_EQ(count("all_reduce", kFlags), shared ? 0 : kSteps * kMicroSteps) << text;
    // What ranks tell each other in front of operations: by the back end at first, then in memory that they share.
    EXPECT_GT(count("all_gather", 128) + count("all_gather", 24), 0) << text;
    if (shared) {
      EXPECT_GT(count("barrier", 0), 0) << text;
    }
    if (support::rank() != 0) {
      EXPECT_EQ(text, "");
      return;
    }
    const std::string rest =
        std::string("msg size: [^|]+ \\| algbw \\(Gbps\\): ") + kNumber + " \\| busbw \\(Gbps\\): " + kNumber + "\n";
    // end_training() prints the table, and meets the others then.
    EXPECT_EQ(count_of(text, std::string("comm op: [a-z_]+ \\| time \\(ms\\): ") + kNumber + " \\| " + rest), all)
        << text;
    EXPECT_EQ(count_of(text, std::string("comm op: reduce_scatter \\| time \\(ms\\): ") + kNumber +
                                 " \\| msg size: " + std::to_string(whole) + " B "),
              kSteps * kMicroSteps);
    EXPECT_THAT(text, HasSubstr("Comm. Op            Message Size        Count               Total Latency(ms)   Avg "
                                "Latency(ms)     tput_avg (Gbps)     busbw_avg (Gbps)"));
    EXPECT_EQ(count_of(text, "\nreduce_scatter\n {20}" + std::to_string(whole) + " B {" +
                                 std::to_string(20 - std::to_string(whole).size() - 2) + "}4 "),
              1)
        << text;
  });
}

/// A collective's cost is the same on all ranks, and together with a rank's waiting it is all of that rank's time.
RANKS_TEST(ZeroObservation, StragglersAreTold, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    std::vector<double> comm;
    const auto text = printed_in_training(file_with(R"("comms_logger": {"enabled": true})"), false, [&](Accelerator&) {
      const auto all = comm::comms_records();
      const auto found = comm::straggler_records();
      EXPECT_EQ(comm::comms_records().size(), all.size()) << "what is exchanged for it does not count";
      EXPECT_EQ(found.empty(), all.empty());
      for (const auto& record : found) {
        const auto own = std::find_if(all.begin(), all.end(), [&](const auto& one) {
          return one.operation == record.operation && one.bytes == record.bytes;
        });
        ASSERT_NE(own, all.end());
        EXPECT_EQ(record.count, own->count);
        const auto parts = record.total_comm_ms + record.total_straggler_ms;
        EXPECT_TRUE(std::abs(parts - own->total_ms) <= 1e-4 * own->total_ms && record.total_straggler_ms >= 0);
        comm.push_back(record.total_comm_ms);
      }
      for (const auto& theirs : gather_object(std::vector<std::vector<double>>{comm})) EXPECT_EQ(theirs, comm);
      comm::log_summary(/*show_straggler=*/true);
    });
    EXPECT_EQ(count_of(text, "Breakdown with straggler effect\n-+\nComm. Op +Message Size +Count +Total comm lat"),
              support::rank() == 0 ? 1 : 0)
        << text;
  });
}

RANKS_TEST(ZeroObservation, OnlyNamedCollectivesAreCounted, 2) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    std::set<std::string> operations;
    const auto text = printed_in_training(
        file_with(R"("comms_logger": {"enabled": true, "prof_all": false, "prof_ops": ["reduce_scatter_tensor"]})"),
        false, [&](Accelerator&) {
          for (const auto& record : comm::comms_records()) operations.insert(record.operation);
          comm::log_summary();
          comm::reset_comms_log();
          EXPECT_TRUE(comm::comms_records().empty());
        });
    EXPECT_EQ(operations, std::set<std::string>{"reduce_scatter"});
    EXPECT_EQ(count_of(text, "comm op:"), 0) << "not verbose";
    EXPECT_EQ(count_of(text, "Comm. Op "), support::rank() == 0 ? 2 : 0) << "at the end, and when asked for";
  });
  support::reset_states();
  printed_in_training(file_with(R"("steps_per_print": 3)"), false,
                      [](Accelerator&) { EXPECT_TRUE(comm::comms_records().empty()) << "nobody asked"; });
}

RANKS_TEST(ZeroObservation, OperationsOfTheStepAreCountedByModule, 1, 2) {
  support::on_both_stores([&](const std::string& store) {
    for (const int64_t stage : {1, 2, 3}) {
      SCOPED_TRACE(store + ", stage " + std::to_string(stage));
      support::reset_states();
      const auto file = folder_called("flops" + std::to_string(stage) + store.back()) / "deep" / "profile.txt";
      const auto text = printed_in_training(
          file_with(R"("flops_profiler": {"enabled": true, "profile_step": 1, "top_modules": 2, "output_file": ")" +
                        file.string() + R"("})",
                    stage));
      EXPECT_THAT(text, Not(HasSubstr("Flops Profiler")));
      EXPECT_EQ(count_of(text, time_line("")), support::rank() == 0 ? kSteps : 0) << "it switches the times on";
      if (support::rank() != 0) continue;
      const auto found = text_of(file);
      EXPECT_THAT(found, HasSubstr("Profile Summary at step 1:\n"));
      EXPECT_EQ(count_of(found, "world size: +" + std::to_string(support::world_size()) + " +\n"), 1);
      EXPECT_EQ(count_of(found, "batch size per GPU: +4 +\n"), 1);
      EXPECT_EQ(count_of(found, "params per GPU: +75 +\n"), 1) << found;
      EXPECT_EQ(count_of(found, "fwd MACs per GPU: +" + std::to_string(kMacs) + " MACs *\n"), 1) << found;
      EXPECT_EQ(count_of(found, "fwd flops per GPU: +" + std::to_string(2 * kMacs + kSamples * 8) + " +\n"), 1)
          << found;
      EXPECT_THAT(found, HasSubstr("depth 1:\n    params      - {'Linear': '75', 'ReLU': '0'}\n    MACs        - "
                                   "{'Linear': '256 MACs', 'ReLU': '0 MACs'}\n"));
      EXPECT_EQ(count_of(found, "\nBlocks\\(\n  75 = 100% Params, 256 MACs = 100% MACs, "), 1) << found;
      EXPECT_EQ(count_of(found,
                         "\n  \\(first\\): Linear\\(48 = 64% Params, 160 MACs = 62\\.5% MACs, .*FLOPS, in_features=5, "
                         "out_features=8, bias=true\\)\n"),
                1)
          << found;
      EXPECT_EQ(count_of(found, "\n  \\(act\\): ReLU\\(0 = 0% Params, 0 MACs = 0% MACs, "), 1) << found;
      EXPECT_EQ(count_of(found, "\n  \\(second\\): Linear\\(27 = 36% Params, 96 MACs = 37\\.5% MACs, "), 1) << found;
    }
  });
}

RANKS_TEST(ZeroObservation, AProfileThatCantBeWrittenIsAnErrorOfAllRanksAtPrepare, 1, 2) {
  const auto error = support::message_of<ResourceError>(
      [] { printed_in_training(file_with(R"("flops_profiler": {"enabled": true, "output_file": "/dev/null/a/b"})")); });
  EXPECT_THAT(error, HasSubstr("flops_profiler: can't write to '/dev/null/a/b'"));
  EXPECT_EQ(error.find("on rank 0: ") == 0, support::rank() != 0) << error;
  testing::internal::GetCapturedStdout();
}

/// The file's place is gone when it is to be written.
RANKS_TEST(ZeroObservation, AProfileThatCantBeWrittenLaterEndsAllRanks, 1, 2) {
  const auto file = folder_called("late") / "profile.txt";
  Accelerator accelerator({.cpu = true,
                           .deepspeed_plugin = file_with(R"("flops_profiler": {"enabled": true, "profile_step": 0,
                             "output_file": ")" + file.string() +
                                                         R"("})")});
  Blocks model;
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
  if (support::rank() == 0) {
    std::filesystem::remove(file);
    std::filesystem::create_directories(file);
  }
  const auto error = support::message_of<Error>([&] {
    for (int64_t micro = 0; micro < 2 * kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      accelerator.backward(m(torch::ones({kSamples, 5})).square().mean());
      opt.step();
      opt.zero_grad();
    }
  });
  EXPECT_THAT(error, HasSubstr("flops_profiler: can't write to '" + file.string()));
  // A rank that fails stays until the others have heard of it.
  if (support::rank() != 0) support::say("late");
  else EXPECT_TRUE(support::heard("late", support::world_size() - 1, std::chrono::seconds(60)));
}

/// To standard output, once, and never where the run has no such step.
RANKS_TEST(ZeroObservation, TheProfileIsPrintedOnceAtItsStep, 1) {
  const auto at = [](const std::string& members) {
    support::reset_states();
    return printed_in_training(file_with(R"("flops_profiler": {"enabled": true, )" + members + "}"));
  };
  const auto first = at(R"("profile_step": 0, "detailed": false, "module_depth": 0, "recompute_fwd_factor": 1.0)");
  EXPECT_EQ(count_of(first, "Profile Summary at step 0:"), 1);
  EXPECT_THAT(first, Not(HasSubstr("(first): Linear(")));
  EXPECT_THAT(first, HasSubstr("depth 0:\n    params      - {'Blocks': '75'}\n"));
  EXPECT_THAT(first, Not(HasSubstr("depth 1:")));
  EXPECT_THAT(first, HasSubstr("bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency: "));
  EXPECT_THAT(at(R"("profile_step": 1)"), HasSubstr("bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency: "));
  EXPECT_THAT(at(R"("profile_step": 2)"), Not(HasSubstr("Profile Summary")));
}

/// Each run of what is recomputed is timed: in the forward, and again in backward.
RANKS_TEST(ZeroObservation, RecomputedLayersAreTimed, 1, 2) {
  const std::string profile = R"("activation_checkpointing": {"profile": true})";
  for (const int64_t stage : {2, 3}) {
    support::reset_states();
    std::string effect;
    std::string text;
    const auto warnings = support::warnings_of([&] {
      text = printed_in_training(file_with(profile, stage), /*recomputes=*/true, [&](Accelerator& accelerator) {
        effect = accelerator.receipts()["deepspeed_plugin.activation_checkpointing.profile"].effect;
      });
    });
    const int64_t times = support::rank() == 0 ? kSteps * kMicroSteps : 0;
    EXPECT_EQ(count_of(text, std::string("\\[Rank 0\\] time \\(ms\\) \\| fwd: ") + kNumber + "\n"), times) << text;
    EXPECT_EQ(count_of(text, std::string("\\[Rank 0\\] time \\(ms\\) \\| backward: ") + kNumber + "\n"), times) << text;
    EXPECT_EQ(effect, "holds");
    EXPECT_THAT(warnings, Not(HasSubstr("no layer is recomputed")));
  }
  support::reset_states();
  EXPECT_EQ(printed_in_training(file_with(R"("steps_per_print": 3)"), /*recomputes=*/true), "")
      << "nobody asks any more";
}

/// Whether a model recomputes shows in its first step.
RANKS_TEST(ZeroObservation, KeysOfRecomputationAreNamedWhereNothingIsRecomputed, 1, 2) {
  std::string effect, text;
  const auto warnings = support::warnings_of([&] {
    text = printed_in_training(file_with(R"("activation_checkpointing": {"profile": true, "cpu_checkpointing": false,
                                 "number_checkpoints": 3})"),
                               false, [&](Accelerator& accelerator) {
                                 effect =
                                     accelerator.receipts()["deepspeed_plugin.activation_checkpointing.profile"].effect;
                               });
  });
  EXPECT_EQ(text, "");
  EXPECT_THAT(effect, HasSubstr("no layer is recomputed"));
  EXPECT_EQ(count_of(warnings, "activation_checkpointing.profile; no layer is recomputed"),
            support::rank() == 0 ? 1 : 0)
      << warnings;
  if (support::rank() == 0)
    EXPECT_THAT(warnings,
                HasSubstr("activation_checkpointing.cpu_checkpointing, activation_checkpointing.number_checkpoints;"));
}

/// Their work on a GPU is tested there (gpu.offload).
TEST(ZeroObservation, RulesOfRecomputedLayersAreTheFiles) {
  const auto rules_of = [](const std::string& members) {
    const auto settings = zero::read_settings(
        DeepSpeedConfig(R"({"train_micro_batch_size_per_gpu": 1, "activation_checkpointing": {)" + members + "}}"),
        {.cuda = true});
    const auto rules = zero::checkpoint_rules_of(settings);
    return residency::checkpoint_rules();
  };
  EXPECT_TRUE(rules_of(R"("cpu_checkpointing": true)")->inputs_on_host);
  EXPECT_FALSE(rules_of(R"("cpu_checkpointing": true)")->synchronize);
  EXPECT_TRUE(rules_of(R"("synchronize_checkpoint_boundary": true)")->synchronize);
  EXPECT_TRUE(rules_of(R"("profile": true)")->timed);
  EXPECT_EQ(rules_of(R"("number_checkpoints": 2)"), nullptr);
}
