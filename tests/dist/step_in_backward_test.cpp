/// step_in_backward: whatever a program does between backward and step, its numbers are those without the setting, to
/// the bit; and steps are computed within backward where nothing keeps step() from taking them over.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "optim/counts.hpp"
#include "parallel/sharding/counts.hpp"
#include "ranks.hpp"
#include "residency/counters.hpp"
#include "residency/disk/direct_io.hpp"
#include "scratch.hpp"
#include "step_runs.hpp"
#include "utils/counts.hpp"
#include "variable.hpp"

namespace {

using namespace step_runs;
using residency::ResidencyCount;

}  // namespace

// Steps that have states from the first one on are all computed within backward; others but for the first.
RANKS_TEST(StepInBackward, TheStepIsTakenOverInEveryLayout, 1, 2, 3) {
  const std::vector<Setup> setups{
      {"FSDP, SGD", fsdp(), kSgd},
      {"FSDP, momentum", fsdp()},
      {"FSDP 2 kept, AdamW", fsdp({.fsdp_version = 2, .reshard_after_forward = false}), kAdamW},
      {"FSDP whole", fsdp({.sharding_strategy = ShardingStrategy::no_shard}), kAdamW},
      {"FSDP in bf16", fsdp({}, "bf16"), kAdamW},
      {"FSDP in fp16", fsdp({}, "fp16"), kSgd},
      {"ZeRO 0", zero_stage(0)},
      {"ZeRO 1, AdamW", zero_stage(1), kAdamW},
      {"ZeRO 2 in bf16", zero_stage(2, kUnclipped, "bf16")},
      {"ZeRO 3, clipped far above", zero_stage(3, R"(, "gradient_clipping": 1000)")},
      {"ZeRO 3 in fp16",
       zero_stage(3, kUnclipped + R"(, "fp16": {"enabled": "auto", "initial_scale_power": 4})", "fp16")},
  };
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : setups) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto found = same_as_plain(setup, several_steps);
      EXPECT_EQ(found.computed, (setup.optimizer.has_states ? kSteps - 1 : kSteps) * kUsed);
      EXPECT_EQ(found.taken, found.computed);
    }
  });
}

RANKS_TEST(StepInBackward, FiveRanks, 5) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    const auto found = same_as_plain({"", fsdp(), kSgd}, several_steps);
    EXPECT_EQ(found.taken, kSteps * kUsed);
  });
}

RANKS_TEST(StepInBackward, ReplicasStepWhenTheirAverageIsThere, 4) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    const Setup hybrid{"", fsdp({.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 2}), kSgd};
    EXPECT_EQ(same_as_plain(hybrid, several_steps).taken, kSteps * kUsed);
  });
}

// The new values lie beside the old ones: of parameters and of both moments, and of AMSGrad's.
RANKS_TEST(StepInBackward, KeepsAsManyBytesAsItSays, 1, 2) {
  int64_t parameters = 0;
  const auto found = same_as_plain({"", fsdp(), kAdamW}, [&](Run& run) {
    run.model->uses_spare = true;
    several_steps(run);
    for (const auto& parameter : run.stepped_on()) parameters += static_cast<int64_t>(parameter.nbytes());
  });
  EXPECT_EQ(found.bytes, parameters / 2 * 4) << "the program ran twice";
}

namespace {

constexpr const char* kOwnLimit = "clip by a norm that is reached";

/// Things that programs do between backward and step. true: step() takes over what backward has computed all the same.
const std::map<std::string, std::pair<bool, std::function<void(Run&, int64_t)>>> kHabits{
    {"look at everything",
     {true,
      [](Run& run, int64_t) {
        for (const auto& parameter : run.model->parameters())
          if (parameter.grad().defined()) run.see(parameter.grad());
        run.see_all();
      }}},
    {"scale a gradient", {false, [](Run& run, int64_t) { run.model->second->weight.mutable_grad().mul_(0.5); }}},
    {"write to shards' gradients past all counting",
     {false,
      [](Run& run, int64_t) {
        for (auto& piece : run.stepped_on())
          if (piece.numel() > 0 && piece.grad().defined()) piece.grad().data().clamp_(-1e-3, 1e-3);
      }}},
    {"write an element through a pointer",
     {false,
      [](Run& run, int64_t) {
        for (auto& piece : run.stepped_on())
          if (piece.numel() > 0 && piece.grad().defined()) piece.grad().data_ptr<float>()[piece.numel() - 1] += 1;
      }}},
    {"replace a gradient",
     {false,
      [](Run& run, int64_t) {
        auto& weight = run.model->first->weight;
        weight.mutable_grad() = torch::ones_like(weight);
      }}},
    {"replace a gradient by its equal",
     {true,
      [](Run& run, int64_t) {
        auto& weight = run.model->first->weight;
        const at::Tensor same = weight.grad().clone();
        weight.mutable_grad() = same;
      }}},
    {"write to a parameter",
     {false,
      [](Run& run, int64_t) {
        const at::NoGradGuard no_grad;
        run.model->second->weight.mul_(0.9);
      }}},
    {"write to a shard past all counting",
     {false,
      [](Run& run, int64_t) {
        for (auto& piece : run.stepped_on()) piece.data().mul_(0.9);
      }}},
    {"write to states",
     {false,
      [](Run& run, int64_t) {
        for (auto& [parameter, state] : run.opt.state())
          static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().mul_(0.5);
      }}},
    {"write to an element of a state",
     {false,
      [](Run& run, int64_t) {
        for (auto& [parameter, state] : run.opt.state()) {
          const auto& momentum = static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer();
          if (momentum.numel() > 0) momentum.narrow(0, momentum.numel() - 1, 1).add_(1);
        }
      }}},
    {"write to states past all counting",
     {false,
      [](Run& run, int64_t) {
        for (auto& [parameter, state] : run.opt.state())
          static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().data().mul_(0.5);
      }}},
    {"replace states by others",
     {false,
      [](Run& run, int64_t) {
        for (auto& [parameter, state] : run.opt.state()) {
          auto& momentum = static_cast<torch::optim::SGDParamState&>(*state);
          momentum.momentum_buffer(momentum.momentum_buffer() * 0.5);
        }
      }}},
    {"change the learning rate",
     {false,
      [](Run& run, int64_t) {
        for (auto& group : run.opt.param_groups()) group.options().set_lr(group.options().get_lr() * 0.5);
      }}},
    {"change it there and back",
     {true,
      [](Run& run, int64_t) {
        auto& options = run.opt.param_groups().front().options();
        options.set_lr(options.get_lr() * 2);
        options.set_lr(options.get_lr() / 2);
      }}},
    {kOwnLimit,
     {false, [](Run& run, int64_t) { run.see(run.accelerator.clip_grad_norm_(run.model->parameters(), 1e-3)); }}},
    {"clip by a norm that is not",
     {true, [](Run& run, int64_t) { run.see(run.accelerator.clip_grad_norm_(run.model->parameters(), 1000)); }}},
    {"clip by value",
     {false, [](Run& run, int64_t) { run.accelerator.clip_grad_value_(run.model->parameters(), 1e-3); }}},
    {"leave the step out", {false, [](Run& run, int64_t step) { step % 2 == 1 ? run.opt.zero_grad() : void(); }}},
    {"fill gradients with zeros", {false, [](Run& run, int64_t) { run.opt.zero_grad(/*set_to_none=*/false); }}},
    {"step twice", {true, [](Run& run, int64_t) { run.opt.step(); }}},
    {"freeze a layer",
     {true,
      [](Run& run, int64_t step) {
        for (auto& parameter : run.model->second->parameters()) parameter.requires_grad_(step != 1);
      }}},
    {"back once more", {true, [](Run& run, int64_t step) { run.accelerator.backward(run.loss(step, 1)); }}},
    {"save and load",
     {true,
      [](Run& run, int64_t step) {
        const std::filesystem::path scratch(support::scratch_dir());
        const auto folder = scratch / ("state" + std::to_string(step));
        run.accelerator.save_state(folder);
        if (step == 2) run.accelerator.load_state(scratch / "state1");
      }}},
};

}  // namespace

RANKS_TEST(StepInBackward, NoHabitOfAProgramChangesItsNumbers, 1, 2) {
  support::on_both_stores([&](const std::string& store) {
    for (const auto& [name, habit] : kHabits)
      for (const Setup& setup : {Setup{"FSDP", fsdp()}, Setup{"ZeRO 2", zero_stage(2)}}) {
        SCOPED_TRACE(store + ", " + setup.name + ", " + name);
        const auto& [takes_over, between] = habit;
        if (name == kOwnLimit && setup.options.deepspeed_plugin) continue;  // there the file's limit holds
        const auto found = same_as_plain(setup, with_each_step(between));
        EXPECT_GT(found.computed, 0);
        if (takes_over) EXPECT_GT(found.taken, 0);
        else EXPECT_LT(found.taken, found.computed);
      }
  });
}

// Not used anywhere, or by one rank only.
RANKS_TEST(StepInBackward, UnusedParametersStayAsTheyAre, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    for (const Setup& setup : {Setup{"FSDP", fsdp(), kSgd}, Setup{"ZeRO 2", zero_stage(2), kAdamW}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto found = same_as_plain(setup, [](Run& run) {
        for (int64_t step = 0; step < kSteps; ++step) {
          run.model->uses_spare = step % 2 == 1 && run.accelerator.process_index() == 0;
          run.backward(step);
          run.step();
        }
      });
      EXPECT_EQ(found.taken, setup.optimizer.has_states ? (kSteps - 1) * kUsed + 1 : kSteps * kUsed + 2);
    }
  });
}

// When backward comes to the first layer, the last one's step has been computed.
RANKS_TEST(StepInBackward, UnitsAreSteppedOnOneAfterTheOther, 1, 2) {
  const support::Variable sent("ACCELERATE_SHARED_MEMORY", "0");
  int64_t before_the_end = 0;
  run({"", fsdp(), kSgd}, Order::ahead, [&](Run& run) {
    run.backward(0);  // ranks learn the order
    run.step();
    const int64_t before = counts::read(OptimCount::steps_ahead);
    const at::Tensor loss = run.loss(1);
    const auto hook = run.model->first->weight.register_hook(
        [&](const at::Tensor&) { before_the_end = counts::read(OptimCount::steps_ahead) - before; });
    run.accelerator.backward(loss);
    run.model->first->weight.remove_hook(hook);
  });
  EXPECT_GE(before_the_end, 2);
}

RANKS_TEST(StepInBackward, AccumulationComputesTheLastStepOnly, 1, 2) {
  for (const int64_t number : {1, 2}) {
    auto options = zero_stage(number);
    options.deepspeed_plugin->hf_ds_config->set_value("gradient_accumulation_steps", int64_t{2});
    const auto found = same_as_plain({"", options, kSgd}, [](Run& run) {
      for (int64_t step = 0; step < kSteps; ++step)
        for (int64_t micro = 0; micro < 2; ++micro) {
          const auto scope = run.accumulate();
          run.accelerator.backward(run.loss(step, micro));
          run.step();
        }
    });
    EXPECT_EQ(found.computed, kSteps * kUsed) << "stage " << number;
    EXPECT_EQ(found.taken, found.computed) << "stage " << number;
  }
}

RANKS_TEST(StepInBackward, TheFilesClippingCountsAsTheProgramsOwn, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    const auto found = same_as_plain({"", zero_stage(2, R"(, "gradient_clipping": 0.05)"), kSgd}, several_steps);
    EXPECT_GT(found.computed, 0);
    EXPECT_LT(found.taken, found.computed) << "what is zero is zero when it has been clipped";
  });
}

// Each miss doubles the number of steps that are computed plainly after it.
RANKS_TEST(StepInBackward, ARunThatClipsEachStepComputesFewAhead, 1) {
  const auto found = same_as_plain({"", fsdp(), kSgd}, [](Run& run) {
    for (int64_t step = 0; step < 11; ++step) {
      run.backward(step);
      run.accelerator.clip_grad_norm_(run.model->parameters(), 1e-3);
      run.step();
    }
  });
  EXPECT_EQ(found.computed, 4 * kUsed) << "steps 0, 2, 5 and 10";
  EXPECT_EQ(found.taken, 0);
}

// With a loss's scale they are divided by it.
RANKS_TEST(StepInBackward, GradientsAreLeftAsAStepLeavesThem, 1, 2) {
  const auto found = same_as_plain({"", fsdp({}, "fp16"), kSgd}, [](Run& run) {
    for (int64_t step = 0; step < kSteps; ++step) {
      run.backward(step);
      run.opt.step();
      for (const auto& piece : run.stepped_on())
        if (piece.grad().defined()) run.see(piece.grad());
      run.opt.zero_grad();
    }
  });
  EXPECT_EQ(found.taken, kSteps * kUsed);
}

RANKS_TEST(StepInBackward, StepsThatOverflowHappenNowhere, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    const auto found = same_as_plain({"", fsdp({}, "fp16"), kMomentum}, [](Run& run) {
      for (int64_t step = 0; step < 2 * kSteps; ++step) {
        const bool bursts = step % 3 == 1 && run.accelerator.process_index() == 1;
        run.accelerator.backward(run.loss(step) * (bursts ? 1e30 : 1.0));
        run.step();
        run.see(torch::tensor(run.opt.step_was_skipped() ? 1.0 : 0.0));
      }
    });
    EXPECT_GT(found.taken, 0);
    EXPECT_LT(found.taken, found.computed);
  });
}

namespace {

/// Bytes between memory and disks.
struct Moved {
  int64_t read, written;
  static Moved now() {
    return {counts::read(ResidencyCount::disk_bytes_read), counts::read(ResidencyCount::disk_bytes_written)};
  }
  Moved since(const Moved& before) const { return {read - before.read, written - before.written}; }
};

/// Of a step that was taken over nothing is read or written in step(), but in backward. DeepSpeed looks for overflows
/// in bf16, too (check_grad_overflow), and reads the gradients, of which a part's are a block of the disk.
void expect_within_backward(Run& run, bool reads_gradients) {
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor loss = run.loss(step);
    const Moved before = Moved::now();
    const int64_t taken = counts::read(ShardingCount::groups_taken_over);
    run.accelerator.backward(loss);
    const Moved within = Moved::now().since(before), between = Moved::now();
    run.opt.step();
    const Moved in_step = Moved::now().since(between);
    if (counts::read(ShardingCount::groups_taken_over) > taken) {
      EXPECT_GT(within.read, 0) << step;
      EXPECT_GT(within.written, 0) << step;
      std::set<const void*> gradients;
      for (const auto& piece : run.stepped_on())
        if (piece.grad().defined() && piece.numel() > 0)
          gradients.insert(piece.grad().storage().unsafeGetStorageImpl());
      const auto blocks = reads_gradients ? static_cast<int64_t>(gradients.size()) : 0;
      EXPECT_EQ(in_step.read, blocks * residency::DiskRequests::kBlock) << step;
      EXPECT_EQ(in_step.written, 0) << step;
    }
    run.opt.zero_grad();
  }
}

}  // namespace

RANKS_TEST(StepInBackward, BytesOnADiskComeAndGoWithinBackward, 1, 2, 3) {
  const std::vector<Setup> setups{
      {"ZeRO 1", zero_on_disk(1)},         {"ZeRO 2, AdamW, bf16", zero_on_disk(2, kUnclipped, "bf16"), kAdamW},
      {"ZeRO 3", zero_on_disk(3), kAdamW}, {"ZeRO 3, bf16", zero_on_disk(3, kUnclipped, "bf16")},
      {"FSDP", fsdp_on_disk(), kAdamW},    {"FSDP, bf16", fsdp_on_disk("bf16")},
  };
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : setups) {
      if (support::world_size() > 2 && setup.name != "ZeRO 2, AdamW, bf16" && setup.name != "FSDP") continue;
      SCOPED_TRACE(store + ", " + setup.name);
      const bool reads = setup.options.deepspeed_plugin && setup.name.ends_with("bf16");
      const auto found = same_as_plain(setup, [reads](Run& run) { expect_within_backward(run, reads); });
      EXPECT_EQ(found.computed, (kSteps - 1) * kUsed) << "but the first step, which makes the states";
      EXPECT_EQ(found.taken, found.computed);
      EXPECT_GT(found.groups, 0);
      EXPECT_EQ(found.groups_taken, found.groups);
    }
  });
}

// In the order of the backward before; the first one of each is not awaited.
RANKS_TEST(StepInBackward, GroupsOnADiskComeAheadOfTheirStep, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    int64_t ahead = 0;
    const auto found = run({"", zero_on_disk(2)}, Order::ahead, [&](Run& run) {
      run.backward(0);
      run.step();
      const int64_t before = counts::read(ShardingCount::groups_read_ahead);
      for (int64_t step = 1; step < kSteps; ++step) {
        run.backward(step);
        run.step();
      }
      ahead = counts::read(ShardingCount::groups_read_ahead) - before;
    });
    EXPECT_GT(found.groups, 2 * (kSteps - 1));
    // Which group is complete first may differ from step to step where there are others' gradients to wait for.
    EXPECT_LE(ahead, found.groups - (kSteps - 1));
    if (support::world_size() == 1) EXPECT_EQ(ahead, found.groups - (kSteps - 1));
  });
}

RANKS_TEST(StepInBackward, NoHabitOfAProgramChangesItsNumbersOnADisk, 1, 2) {
  const std::set<std::string> taken_over{"change it there and back", "clip by a norm that is not", "step twice"};
  support::on_both_stores([&](const std::string& store) {
    // All that FSDP holds lies on a disk, so that its ranks never share memory.
    const Setup setup = store.back() == '0' ? Setup{"FSDP", fsdp_on_disk()} : Setup{"ZeRO 2", zero_on_disk(2)};
    for (const auto& [name, habit] : kHabits) {
      SCOPED_TRACE(store + ", " + setup.name + ", " + name);
      const auto& [takes_over, between] = habit;
      if (name == kOwnLimit && setup.options.deepspeed_plugin) continue;  // there the file's limit holds
      const auto found = same_as_plain(setup, with_each_step(between));
      EXPECT_GT(found.computed, 0);
      if (taken_over.contains(name)) EXPECT_GT(found.taken, 0);
      else if (!takes_over) EXPECT_LT(found.taken, found.computed);
    }
  });
}

RANKS_TEST(StepInBackward, ClippingAndOverflowsActOnADisk, 1, 2) {
  const auto bursting = [](Run& run) {
    for (int64_t step = 0; step < 2 * kSteps; ++step) {
      const bool bursts = step % 5 == 1 && run.accelerator.is_last_process();
      run.accelerator.backward(run.loss(step) * (bursts ? 1e30 : 1.0));
      run.opt.step();
      // At the end: the system reads what lies beside what is read from a file, too, and it counts as touched.
      if (step + 1 == 2 * kSteps)
        for (const auto& piece : run.stepped_on())
          if (piece.grad().defined()) run.see(piece.grad());
      run.opt.zero_grad();
      run.see(torch::tensor(run.opt.step_was_skipped() ? 1.0 : 0.0));
    }
  };
  const std::string scale = R"(, "fp16": {"enabled": "auto", "initial_scale_power": 4})";
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    for (const Setup& setup :
         {Setup{"FSDP", fsdp_on_disk("fp16")}, Setup{"ZeRO 2", zero_on_disk(2, kUnclipped + scale, "fp16")}}) {
      SCOPED_TRACE(setup.name);
      const auto found = same_as_plain(setup, bursting);
      EXPECT_GT(found.taken, 0);
      EXPECT_LT(found.taken, found.computed);
    }
    const auto clipped = same_as_plain({"", zero_on_disk(2, R"(, "gradient_clipping": 0.05)")}, several_steps);
    EXPECT_LT(clipped.taken, clipped.computed);
    const auto unreached = same_as_plain({"", zero_on_disk(2, R"(, "gradient_clipping": 1000)")}, several_steps);
    EXPECT_EQ(unreached.taken, unreached.computed) << "norms are read, and leave nothing touched";
    EXPECT_GT(unreached.taken, 0);
  });
}

RANKS_TEST(StepInBackward, OnADiskAccumulationComputesTheLastStepOnly, 1, 2) {
  auto options = zero_on_disk(2);
  options.deepspeed_plugin->hf_ds_config->set_value("gradient_accumulation_steps", int64_t{2});
  const auto found = same_as_plain({"", options}, [](Run& run) {
    for (int64_t step = 0; step < kSteps; ++step)
      for (int64_t micro = 0; micro < 2; ++micro) {
        const auto scope = run.accumulate();
        run.accelerator.backward(run.loss(step, micro));
        run.step();
      }
  });
  EXPECT_EQ(found.computed, (kSteps - 1) * kUsed);
  EXPECT_EQ(found.taken, found.computed);
}

// Masters have one place for new values: those of both.
RANKS_TEST(StepInBackward, TwoOptimizersOfOneGroupStepPlainlyOnADisk, 1, 2) {
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool ahead : {false, true}) {
    support::reset_states();
    counts::reset();
    auto options = fsdp_on_disk();
    options.fsdp_plugin->step_in_backward = ahead;
    Accelerator accelerator(options);
    Net model;
    torch::optim::AdamW first(model->first->parameters(), 0.2), others(model->second->parameters(), 0.05);
    auto [m, one, two] = accelerator.prepare(model, first, others);
    for (int64_t step = 0; step < kSteps; ++step) {
      accelerator.backward(loss_of(m(batch_of(step, 0, accelerator.process_index()))));
      one.step();
      if (step % 2 == 0) two.step();
      one.zero_grad();
      two.zero_grad();
    }
    ends.emplace_back();
    for (const auto& parameter : model->parameters()) ends.back().push_back(parameter.detach().clone());
    EXPECT_EQ(counts::read(ShardingCount::groups_taken_over), 0);
  }
  for (size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(ends[0][i].equal(ends[1][i])) << i;
}

// States that have no room beside them are stepped on plainly, and all ranks hear of it after the step.
RANKS_TEST(StepInBackward, AFullDiskIsNamedOnAllRanksAndLosesNothing, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    bool fills = false;
    std::string error;
    const auto program = [&](Run& run) {
      error.clear();
      rlimit before{};
      ::getrlimit(RLIMIT_FSIZE, &before);
      const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
      ::signal(SIGXFSZ, SIG_IGN);
      for (int64_t step = 0; step < kSteps; ++step) {
        const at::Tensor loss = run.loss(step);
        const bool full = fills && step == 1;
        if (full && run.accelerator.is_last_process()) ::setrlimit(RLIMIT_FSIZE, &small);
        run.accelerator.backward(loss);
        ::setrlimit(RLIMIT_FSIZE, &before);
        if (full) error = support::message_of<ResourceError>([&] { run.opt.step(); });
        else run.opt.step();
        run.opt.zero_grad();
      }
    };
    const Setup setup{"", zero_on_disk(2), kAdamW};
    const auto expected = run(setup, Order::plain, program);
    fills = true;
    const auto found = run(setup, Order::ahead, program);
    EXPECT_THAT(error, AllOf(HasSubstr("optimizer states on disk"), HasSubstr("the optimizer's states")));
    ASSERT_EQ(found.seen.size(), expected.seen.size());
    for (size_t i = 0; i < found.seen.size(); ++i) EXPECT_TRUE(found.seen[i].equal(expected.seen[i])) << i;
    EXPECT_GT(found.taken, 0);
    EXPECT_LT(found.taken, (kSteps - 1) * kUsed + (support::world_size() > 1 ? 1 : 0));
  });
}

RANKS_TEST(StepInBackward, TwoOptimizersStepEachForItself, 1, 2) {
  std::vector<std::vector<at::Tensor>> ends;
  for (const bool ahead : {false, true}) {
    support::reset_states();
    counts::reset();
    auto options = fsdp();
    options.fsdp_plugin->step_in_backward = ahead;
    Accelerator accelerator(options);
    Net model;
    torch::optim::SGD first(model->first->parameters(), 0.2);
    torch::optim::AdamW others(model->second->parameters(), 0.05);
    auto [m, one, two] = accelerator.prepare(model, first, others);
    for (int64_t step = 0; step < kSteps; ++step) {
      accelerator.backward(loss_of(m(batch_of(step, 0, accelerator.process_index()))));
      (step % 2 == 0 ? one : two).step();
      one.zero_grad();
      two.zero_grad();
    }
    ends.emplace_back();
    for (const auto& parameter : model->parameters()) ends.back().push_back(parameter.detach().clone());
    EXPECT_EQ(counts::read(OptimCount::steps_taken_over), ahead ? kSteps / 2 * 2 + 2 : 0);
  }
  for (size_t i = 0; i < ends[0].size(); ++i) EXPECT_TRUE(ends[0][i].equal(ends[1][i])) << i;
}

RANKS_TEST(StepInBackward, TheEnvironmentAsksForIt, 1) {
  const auto computed = [](const Setup& setup, const char* variable, const char* value) {
    const support::Variable asks(variable, value);
    return run(setup, Order::as_the_environment_says, several_steps).computed;
  };
  for (const auto& [setup, variable] :
       {std::pair(Setup{"FSDP", fsdp()}, "FSDP_STEP_IN_BACKWARD"),
        std::pair(Setup{"ZeRO", zero_stage(2)}, "ACCELERATE_DEEPSPEED_STEP_IN_BACKWARD")}) {
    EXPECT_GT(computed(setup, variable, "true"), 0) << setup.name;
    EXPECT_EQ(computed(setup, variable, "false"), 0) << setup.name;
    EXPECT_EQ(run(setup, Order::as_the_environment_says, several_steps).computed, 0) << setup.name << ", by itself";
  }
}

RANKS_TEST(StepInBackward, PluginsThatDifferInItAreTwo, 1) {
  auto plain = zero_stage(2), other = plain;
  Accelerator first(plain);
  other.deepspeed_plugin->step_in_backward = true;
  EXPECT_EQ(Accelerator(other).receipts()["deepspeed_plugin.step_in_backward"].value, "true");
}

RANKS_TEST(StepInBackward, OptimizersThatCanNotAreRefusedByName, 1, 2) {
  const auto refusal = [](const Setup& setup, bool in_16_bits = false) {
    return support::message_of<ConfigError>([&] {
      support::reset_states();
      auto options = setup.options;
      options.fsdp_plugin->step_in_backward = true;
      Accelerator accelerator(options);
      Net model;
      if (in_16_bits) model->to(at::kBFloat16);
      accelerator.prepare(model, setup.optimizer.make(model->parameters()));
    });
  };
  const Optimizer rms{[](const auto& parameters) { return std::make_shared<torch::optim::RMSprop>(parameters); }};
  EXPECT_THAT(refusal({"", fsdp(), rms}), AllOf(HasSubstr("RMSprop"), HasSubstr("no step of this library's kernels"),
                                                HasSubstr("leave step_in_backward out")));
  EXPECT_THAT(refusal({"", fsdp()}, /*in_16_bits=*/true), HasSubstr("neither fp32 nor fp64"));
}

// A dry run counts what a run keeps: another copy of a rank's parameters and of both moments.
TEST(StepInBackward, DryRunsCountWhatIsKept) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  const auto bytes_of_optimizer = [](bool ahead) {
    const auto report = two_dry_steps({.step_in_backward = ahead});
    return report.phase("step").at_end[MemoryUse::optimizer];
  };
  const int64_t plain = bytes_of_optimizer(false);
  EXPECT_GT(plain, 0);
  // `spare` has neither a step nor states.
  EXPECT_EQ(bytes_of_optimizer(true), plain / 2 * 5);
}

// On a disk new values cost no memory, but the group that is stepped on, and in 16 bits what is computed with.
TEST(StepInBackward, DryRunsCountWhatIsKeptOnADisk) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  const auto bytes_of_optimizer = [](const std::string& precision, bool ahead) {
    const auto report = dry_run({.num_processes = 2}, [&](const DryRunMark& mark) {
      auto options = zero_on_disk(2, kUnclipped, precision);
      options.cpu = false;  // the dry run has its own device
      options.deepspeed_plugin->step_in_backward = ahead;
      Accelerator accelerator(options);
      Net model;
      auto [m, opt] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 0.1));
      const auto dtype = model->first->weight.scalar_type();
      for (int64_t step = 0; step < 2; ++step) {
        accelerator.backward(m(torch::zeros({4, 5}, accelerator.device()).to(dtype)).sum());
        mark("backward");
        opt.step();
        opt.zero_grad();
        mark("step");
      }
    });
    return report.phase("backward").at_end[MemoryUse::optimizer];
  };
  EXPECT_EQ(bytes_of_optimizer("no", false), 0);
  EXPECT_EQ(bytes_of_optimizer("bf16", false), 0);
  const int64_t masters = bytes_of_optimizer("no", true), images = bytes_of_optimizer("bf16", true);
  EXPECT_GT(masters, 0) << "they lie in memory, and so do their new values";
  EXPECT_GT(images, 0);
  EXPECT_LT(images, masters) << "masters and states lie on the disk";
}
