/// step_at_once: optimizers step within backward, in place, with the numbers of the plain order; gradients are freed;
/// and all that would act otherwise is an error by name, on all ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "step_runs.hpp"

namespace {

using namespace step_runs;

const std::string kBf16 = kUnclipped + R"(, "bf16": {"enabled": "auto", "check_grad_overflow": false})";

Setup rms_prop() {
  return {"FSDP, RMSprop", fsdp(), {[](const auto& parameters) {
            return std::make_shared<torch::optim::RMSprop>(parameters, torch::optim::RMSpropOptions(0.01));
          }}};
}

Result same_at_once(const Setup& setup, const Program& program = several_steps) {
  return same_as_plain(setup, program, Order::at_once);
}

/// The error of what happens between a backward and its step, in a run that has stepped before.
std::string error_between(const Setup& setup, const std::function<void(Run&)>& between) {
  std::string error;
  run(setup, Order::at_once, [&](Run& run) {
    run.backward(0);
    run.step();
    run.backward(1);
    error = support::message_of<ConfigError>([&] { between(run); });
    run.opt.step();
  });
  return error;
}

std::string refusal(const AcceleratorOptions& given, const std::function<void(Accelerator&, Net&)>& prepare) {
  return support::message_of<ConfigError>([&] {
    support::reset_states();
    auto options = given;
    if (options.fsdp_plugin) options.fsdp_plugin->step_at_once = true;
    if (options.deepspeed_plugin) options.deepspeed_plugin->step_at_once = true;
    Accelerator accelerator(options);
    Net model;
    prepare(accelerator, model);
  });
}
void prepare_sgd(Accelerator& accelerator, Net& model) {
  accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.1));
}

}  // namespace

RANKS_TEST(StepAtOnce, NumbersAreThoseOfThePlainOrder, 1, 2, 3) {
  const std::vector<Setup> setups{
      {"FSDP, SGD", fsdp(), kSgd},
      {"FSDP, momentum", fsdp()},
      {"FSDP 2 kept, AdamW", fsdp({.fsdp_version = 2, .reshard_after_forward = false}), kAdamW},
      {"FSDP whole", fsdp({.sharding_strategy = ShardingStrategy::no_shard}), kAdamW},
      {"FSDP on the host", fsdp({.cpu_offload = true}), kAdamW},
      {"FSDP in bf16", fsdp({}, "bf16"), kAdamW},
      {"FSDP in 8 bits", fsdp({.quantized_weights = true}), kSgd},
      rms_prop(),
      {"ZeRO 0", zero_stage(0)},
      {"ZeRO 1, AdamW", zero_stage(1), kAdamW},
      {"ZeRO 2 in bf16", zero_stage(2, kBf16, "bf16")},
      {"ZeRO 3", zero_stage(3), kSgd},
  };
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : setups) {
      if (setup.options.fsdp_plugin && setup.options.fsdp_plugin->quantized_weights && support::world_size() == 1)
        continue;  // nothing travels
      SCOPED_TRACE(store + ", " + setup.name);
      const auto found = same_at_once(setup);
      EXPECT_EQ(found.at_once, kSteps * kUsed);
      EXPECT_EQ(found.bytes, 0);
    }
  });
}

RANKS_TEST(StepAtOnce, FiveRanks, 5) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    EXPECT_EQ(same_at_once({"", fsdp(), kSgd}).at_once, kSteps * kUsed);
  });
}

RANKS_TEST(StepAtOnce, ReplicasStepWhenTheirAverageIsThere, 4) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    const Setup hybrid{"", fsdp({.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 2}), kSgd};
    EXPECT_EQ(same_at_once(hybrid).at_once, kSteps * kUsed);
  });
}

// Micro-steps that accumulate step on nothing; what they alone have given waits for step().
RANKS_TEST(StepAtOnce, TheLastMicroStepSteps, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    auto in_file = zero_stage(2);
    in_file.deepspeed_plugin->hf_ds_config->set_value("gradient_accumulation_steps", int64_t{2});
    auto by_program = fsdp();
    by_program.gradient_accumulation_steps = 2;
    for (const Setup& setup : {Setup{"FSDP", by_program, kSgd}, Setup{"ZeRO 2", in_file, kSgd}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto found = same_at_once(setup, [](Run& run) {
        for (int64_t step = 0; step < kSteps; ++step)
          for (int64_t micro = 0; micro < 2; ++micro) {
            const auto scope = run.accumulate();
            run.model->uses_spare = micro == 0;
            run.accelerator.backward(run.loss(step, micro));
            run.step();
          }
      });
      EXPECT_GE(found.at_once, kSteps * kUsed);
    }
  });
}

// A forward that no backward follows ends the group: step() steps on what micro-steps have left, once, and a second one
// finds nothing.
RANKS_TEST(StepAtOnce, WhatStepHasToTakeIsGoneToo, 1, 2) {
  support::on_both_stores([&](const std::string& store) {
    auto in_file = zero_stage(3);
    in_file.deepspeed_plugin->hf_ds_config->set_value("gradient_accumulation_steps", int64_t{2});
    auto by_program = fsdp();
    by_program.gradient_accumulation_steps = 2;
    for (const Setup& setup : {Setup{"FSDP", by_program, kSgd}, Setup{"ZeRO 3", in_file, kSgd}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto program = [](bool again) {
        return [again](Run& run) {
          {
            const auto scope = run.accumulate();
            run.backward(0);
            run.step();
          }
          const auto scope = run.accumulate();
          run.loss(1);
          run.opt.step();
          if (again) run.opt.step();
        };
      };
      const auto expected = run(setup, Order::plain, program(false)), found = run(setup, Order::at_once, program(true));
      ASSERT_EQ(found.seen.size(), expected.seen.size());
      for (size_t i = 0; i < found.seen.size(); ++i) EXPECT_TRUE(found.seen[i].equal(expected.seen[i])) << i;
    }
  });
}

// Not used anywhere, or by one rank only.
RANKS_TEST(StepAtOnce, UnusedParametersStayAsTheyAre, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    for (const Setup& setup : {Setup{"FSDP", fsdp(), kSgd}, Setup{"ZeRO 2", zero_stage(2), kAdamW}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto found = same_at_once(setup, [](Run& run) {
        for (int64_t step = 0; step < kSteps; ++step) {
          run.model->uses_spare = step % 2 == 1 && run.accelerator.process_index() == 0;
          run.backward(step);
          run.step();
        }
      });
      EXPECT_EQ(found.at_once, kSteps * kUsed + kSteps / 2);
    }
  });
}

// When backward comes to the first layer, the last one has its new values, and its gradients are gone.
RANKS_TEST(StepAtOnce, UnitsAreSteppedOnOneAfterTheOther, 1, 2) {
  const support::Variable sent("ACCELERATE_SHARED_MEMORY", "0");
  run({"", fsdp(), kSgd}, Order::at_once, [&](Run& run) {
    run.backward(0);  // ranks learn the order
    run.step();
    const auto stepped = [] { return counts::read(OptimCount::steps_at_once); };
    const auto with_gradients = [&] {
      const auto all = run.stepped_on();
      return std::count_if(all.begin(), all.end(), [](const auto& piece) { return piece.grad().defined(); });
    };
    const int64_t before = stepped();
    int64_t within = 0, left = -1;
    const at::Tensor loss = run.loss(1);
    const auto hook = run.model->first->weight.register_hook([&](const at::Tensor&) {
      within = stepped() - before;
      left = with_gradients();
    });
    run.accelerator.backward(loss);
    run.model->first->weight.remove_hook(hook);
    EXPECT_GE(within, 2);
    EXPECT_LT(left, kUsed - within + 1);
    EXPECT_EQ(with_gradients(), 0);
    for (const auto& parameter : run.model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    run.step();
  });
}

// Between backward and step a program sees what the step has left, the same on all ranks, and can write to it.
RANKS_TEST(StepAtOnce, WritesBeforeStepComeAfterIt, 1, 2, 3) {
  const auto program = [](bool writes_before) {
    return [writes_before](Run& run) {
      for (int64_t step = 0; step < kSteps; ++step) {
        const auto write = [&] {
          const at::NoGradGuard no_grad;
          run.model->second->weight.mul_(0.9);
          for (const auto& parameter : run.model->parameters()) run.see(parameter);
        };
        run.backward(step);
        if (writes_before) write();
        run.step();
        if (!writes_before) write();
      }
    };
  };
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : {Setup{"FSDP", fsdp(), kSgd}, Setup{"FSDP in bf16", fsdp({}, "bf16"), kSgd},
                               Setup{"ZeRO 2", zero_stage(2), kSgd}, Setup{"ZeRO 3", zero_stage(3), kSgd}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto expected = run(setup, Order::plain, program(false)), found = run(setup, Order::at_once, program(true));
      ASSERT_EQ(found.seen.size(), expected.seen.size());
      for (size_t i = 0; i < found.seen.size(); ++i) EXPECT_TRUE(found.seen[i].equal(expected.seen[i])) << i;
    }
  });
}

// A checkpoint that is saved between the two has the step's values.
RANKS_TEST(StepAtOnce, ACheckpointBetweenHasTheStep, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : {Setup{"FSDP", fsdp(), kAdamW}, Setup{"FSDP in bf16", fsdp({}, "bf16"), kSgd},
                               Setup{"ZeRO 2", zero_stage(2), kAdamW}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      const auto folder = support::scratch_of_job("between");
      same_at_once(setup, [&](Run& run) {
        run.backward(0);
        run.step();
        run.backward(1);
        const bool taken = counts::read(OptimCount::steps_at_once) > 0;
        if (!taken) run.opt.step();
        run.accelerator.save_state(folder);
        if (taken) run.opt.step();
        run.opt.zero_grad();
        run.backward(2);
        run.step();
        run.accelerator.load_state(folder);
        run.see_all();
        run.backward(3);
        run.step();
      });
    }
  });
}

// A write between forward and backward is there when the step comes.
RANKS_TEST(StepAtOnce, WritesBeforeBackwardAreSteppedOn, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : {Setup{"FSDP", fsdp(), kSgd}, Setup{"FSDP in bf16", fsdp({}, "bf16"), kSgd}}) {
      SCOPED_TRACE(store + ", " + setup.name);
      same_at_once(setup, [](Run& run) {
        for (int64_t step = 0; step < kSteps; ++step) {
          const at::Tensor loss = run.loss(step);
          {
            const at::NoGradGuard no_grad;
            run.model->third->bias.mul_(0.5);  // which backward has no need of
          }
          run.accelerator.backward(loss);
          run.step();
        }
      });
    }
  });
}

RANKS_TEST(StepAtOnce, WhatWouldActOtherwiseIsAnError, 1, 2, 3) {
  const std::map<std::string, std::pair<std::string, std::function<void(Run&)>>> errors{
      {"clip by norm", {"gradients", [](Run& run) { run.accelerator.clip_grad_norm_(run.model->parameters(), 0.1); }}},
      {"clip by value",
       {"gradients", [](Run& run) { run.accelerator.clip_grad_value_(run.model->parameters(), 0.1); }}},
      {"forward", {"forward", [](Run& run) { run.loss(2); }}},
      {"evaluation",
       {"forward",
        [](Run& run) {
          const at::NoGradGuard no_grad;
          run.loss(2);
        }}},
      {"clear gradients", {"zero_grad", [](Run& run) { run.opt.zero_grad(); }}}};
  support::on_both_stores([&](const std::string& store) {
    for (const Setup& setup : {Setup{"FSDP", fsdp(), kSgd}, Setup{"ZeRO 2", zero_stage(2), kSgd}})
      for (const auto& [name, error] : errors) {
        if (name == "clip by norm" && setup.options.deepspeed_plugin) continue;  // it tells the norm of the last step
        SCOPED_TRACE(store + ", " + setup.name + ", " + name);
        EXPECT_THAT(error_between(setup, error.second),
                    AllOf(testing::StartsWith(error.first + ":"), HasSubstr("step_at_once"), HasSubstr("step()")));
      }
  });
}

RANKS_TEST(StepAtOnce, ASecondBackwardIsAnError, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    std::string error;
    run({"", fsdp(), kSgd}, Order::at_once, [&](Run& run) {
      const at::Tensor one = run.loss(0), other = run.loss(1);
      run.accelerator.backward(one);
      error = support::message_of<ConfigError>([&] { run.accelerator.backward(other); });
      run.opt.step();
    });
    EXPECT_THAT(error, AllOf(HasSubstr("backward:"), HasSubstr("step_at_once")));
  });
}

RANKS_TEST(StepAtOnce, RatesThatChangeBeforeStepAreAnError, 1, 2) {
  std::string error;
  run({"", fsdp(), kSgd}, Order::at_once, [&](Run& run) {
    run.backward(0);
    run.opt.param_groups()[0].options().set_lr(0.01);
    error = support::message_of<ConfigError>([&] { run.opt.step(); });
    run.opt.step();
    run.opt.zero_grad();
    run.backward(1);
    run.opt.step();  // they may change after it
  });
  EXPECT_THAT(error, AllOf(HasSubstr("learning rates"), HasSubstr("step_at_once")));
}

// Ranks may have come unequally far.
RANKS_TEST(StepAtOnce, ABackwardThatThrowsLeavesNothingToGoOnWith, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    std::string error;
    run({"", fsdp(), kSgd}, Order::at_once, [&](Run& run) {
      run.backward(0);
      run.step();
      const at::Tensor loss = run.loss(1);
      const auto hook = run.model->first->weight.register_hook(
          [](const at::Tensor&) { throw std::runtime_error("no gradient to be had"); });
      EXPECT_ANY_THROW(run.accelerator.backward(loss));
      run.model->first->weight.remove_hook(hook);
      error = support::message_of<ConfigError>([&] { run.loss(2); });
    });
    EXPECT_THAT(error, AllOf(HasSubstr("thrown"), HasSubstr("step_at_once")));
  });
}

RANKS_TEST(StepAtOnce, WhatCanNotIsRefusedByName, 1, 2) {
  EXPECT_THAT(refusal(fsdp({}, "fp16"), prepare_sgd), AllOf(HasSubstr("step_at_once"), HasSubstr("loss scaling")));
  EXPECT_THAT(refusal(zero_stage(2, kUnclipped + R"(, "bf16": {"enabled": true})", "bf16"), prepare_sgd),
              AllOf(HasSubstr("step_at_once"), HasSubstr("check_grad_overflow")));
  EXPECT_THAT(refusal(zero_stage(2, ""), prepare_sgd),
              AllOf(HasSubstr("step_at_once"), HasSubstr("gradient_clipping 1")));
  EXPECT_THAT(refusal(zero_stage(2, kUnclipped),
                      [](Accelerator& accelerator, Net& model) {
                        accelerator.prepare(model, torch::optim::SGD(model->first->parameters(), 0.1),
                                            torch::optim::SGD(model->second->parameters(), 0.1));
                      }),
              AllOf(HasSubstr("step_at_once"), HasSubstr("two optimizers")));
  EXPECT_THAT(
      refusal(fsdp(), [](Accelerator& accelerator,
                         Net& model) { accelerator.prepare(model, torch::optim::LBFGS(model->parameters(), 0.1)); }),
      AllOf(HasSubstr("step_at_once"), HasSubstr("LBFGS")));
  EXPECT_THAT(refusal(fsdp_on_disk(), prepare_sgd), AllOf(HasSubstr("step_at_once"), HasSubstr("offload_folder")));
  EXPECT_THAT(refusal(zero_on_disk(2), prepare_sgd), AllOf(HasSubstr("step_at_once"), HasSubstr("nvme")));
  auto all_used = zero_stage(2);
  all_used.deepspeed_plugin->hf_ds_config->set_value("zero_optimization.ignore_unused_parameters", false);
  EXPECT_THAT(refusal(all_used, prepare_sgd), AllOf(HasSubstr("step_at_once"), HasSubstr("ignore_unused_parameters")));
}

RANKS_TEST(StepAtOnce, TheEnvironmentAsksForIt, 1) {
  const auto stepped = [](const Setup& setup, const char* variable, const char* value) {
    const support::Variable asks(variable, value);
    return run(setup, Order::as_the_environment_says, several_steps).at_once;
  };
  for (const auto& [setup, variable] : {std::pair(Setup{"FSDP", fsdp()}, "FSDP_STEP_AT_ONCE"),
                                        std::pair(Setup{"ZeRO", zero_stage(2)}, "ACCELERATE_DEEPSPEED_STEP_AT_ONCE")}) {
    EXPECT_EQ(stepped(setup, variable, "true"), kSteps * kUsed) << setup.name;
    EXPECT_EQ(stepped(setup, variable, "false"), 0) << setup.name;
    EXPECT_EQ(run(setup, Order::as_the_environment_says, several_steps).at_once, 0) << setup.name << ", by itself";
  }
}

RANKS_TEST(StepAtOnce, PluginsThatDifferInItAreTwo, 1) {
  auto plain = zero_stage(2), other = plain;
  Accelerator first(plain);
  other.deepspeed_plugin->step_at_once = true;
  EXPECT_EQ(Accelerator(other).receipts()["deepspeed_plugin.step_at_once"].value, "true");
}

// Gradients of one unit at a time: without it all of a rank's pieces have theirs when backward ends.
TEST(StepAtOnce, DryRunsCountNoGradientsAfterBackward) {
  if (support::is_rank()) GTEST_SKIP() << "runs in one process only";
  const auto gradients = [](bool at_once) {
    const auto report = two_dry_steps({.step_at_once = at_once});
    return report.phase("backward").at_end[MemoryUse::gradients];
  };
  EXPECT_GT(gradients(false), 0);
  EXPECT_EQ(gradients(true), 0);
}
