/// DeepSpeed's nvme and FSDP's offload_folder: optimizer states and parameters lie on a disk, and training is as in
/// memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <utility>

#include "accelerate/accelerate.hpp"
#include "accelerate/residency.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "parallel/sharding/counts.hpp"
#include "ranks.hpp"
#include "residency/counters.hpp"
#include "residency/disk/disk_memory.hpp"
#include "scratch.hpp"
#include "variable.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;
using parallel::ShardingCount;
using residency::ResidencyCount;
using testing::AllOf;
using testing::HasSubstr;

enum class On { nothing, states, parameters, both };

std::string section(On on, const std::string& folder, const std::string& more) {
  std::string text;
  const std::string device = R"({"device": "nvme", "nvme_path": ")" + folder + "\"";
  if (on == On::states || on == On::both) text += R"(, "offload_optimizer": )" + device + more + "}";
  if (on == On::parameters || on == On::both) text += R"(, "offload_param": )" + device + R"(, "max_in_cpu": 0})";
  return text;
}

DeepSpeedPlugin plugin(int64_t number, On on, const std::string& more = "") {
  const std::string scale = R"(, "fp16": {"enabled": "auto", "initial_scale_power": 4})";
  return {.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
      "zero_force_ds_cpu_optimizer": false, "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": )" +
                          std::to_string(number) + section(on, support::scratch("nvme").string(), more) + "}" + scale +
                          "}"};
}

struct Trained {
  std::vector<at::Tensor> weights;
  int64_t read = 0, written = 0;
};

std::vector<at::Tensor> masters_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> masters;
  for (const auto& parameter : model.parameters()) masters.push_back(safe_get_full_fp32_param(parameter));
  return masters;
}

template <class Optimizer>
Trained trained(const std::string& precision, const DeepSpeedPlugin& by, Optimizer&& make, int64_t steps = kSteps) {
  support::reset_states();
  Accelerator accelerator({.mixed_precision = precision, .cpu = true, .deepspeed_plugin = by});
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, make(model->parameters()));
  const auto dtype = m->first->weight.scalar_type();
  Trained result;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t read = counts::read(ResidencyCount::disk_bytes_read);
    const int64_t written = counts::read(ResidencyCount::disk_bytes_written);
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()).to(dtype))));
      opt.step();
      opt.zero_grad();
    }
    result.read = counts::read(ResidencyCount::disk_bytes_read) - read;
    result.written = counts::read(ResidencyCount::disk_bytes_written) - written;
  }
  result.weights = masters_of(*m);
  return result;
}

torch::optim::AdamW adamw(const std::vector<at::Tensor>& parameters) { return torch::optim::AdamW(parameters, 0.01); }

void expect_same_bits(const Trained& found, const Trained& expected) {
  ASSERT_EQ(found.weights.size(), expected.weights.size());
  for (size_t i = 0; i < found.weights.size(); ++i)
    EXPECT_TRUE(found.weights[i].equal(expected.weights[i])) << "parameter " << i;
}

/// Whether all do, or none. @return how many there are
int64_t moments_on_disk(torch::optim::Optimizer& optimizer, bool expected) {
  int64_t looked = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    const auto& moment = static_cast<const torch::optim::AdamWParamState&>(*state).exp_avg();
    if (moment.numel() == 0) continue;
    EXPECT_EQ(residency::DiskMemory::of(moment) != nullptr, expected);
    ++looked;
  }
  return looked;
}

}  // namespace

RANKS_TEST(ZeroDisk, StatesOnADiskTrainAsInMemory, 1, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t number = 1; number <= 3; ++number)
      for (const std::string precision : {"no", "bf16", "fp16"}) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number) + ", " + precision);
        const auto expected = trained(precision, plugin(number, On::nothing), with_momentum);
        EXPECT_EQ(expected.read + expected.written, 0);
        for (const std::string more :
             {"", R"(, "pipeline_read": true)", R"(, "pipeline_read": true, "pipeline_write": true)"}) {
          SCOPED_TRACE(more);
          const auto found = trained(precision, plugin(number, On::states, more), with_momentum);
          expect_same_bits(found, expected);
          EXPECT_GT(found.read, 0);
          EXPECT_GT(found.written, 0);
        }
        expect_same_bits(trained(precision, plugin(number, On::states), adamw),
                         trained(precision, plugin(number, On::nothing), adamw));
      }
  });
}

// Ranks gather by sockets then, whatever memory they share.
RANKS_TEST(ZeroDisk, ParametersOnADiskTrainAsInMemory, 1, 2, 3) {
  for (const std::string precision : {"no", "bf16", "fp16"}) {
    SCOPED_TRACE(precision);
    ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
    const auto expected = trained(precision, plugin(3, On::nothing), with_momentum);
    const auto expected_adam = trained(precision, plugin(3, On::nothing), adamw);
    ::unsetenv("ACCELERATE_SHARED_MEMORY");
    for (const On on : {On::parameters, On::both}) {
      const auto found = trained(precision, plugin(3, on), with_momentum);
      expect_same_bits(found, expected);
      EXPECT_GT(found.read, 0);
      EXPECT_GT(found.written, 0);
      expect_same_bits(trained(precision, plugin(3, on), adamw), expected_adam);
    }
  }
}

// Groups of at most so many elements; with one in memory nothing is read ahead.
RANKS_TEST(ZeroDisk, GroupsComeAheadOfTheirStep, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    const auto counted = [](const std::string& states, int64_t elements) {
      const DeepSpeedPlugin by{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4,
          "gradient_accumulation_steps": 2, "zero_force_ds_cpu_optimizer": false, "zero_optimization": {"stage": 3,
          "stage3_param_persistence_threshold": 0, "sub_group_size": )" +
                                               std::to_string(elements) +
                                               section(On::states, support::scratch("nvme").string(), states) + "}}"};
      counts::reset();
      trained("no", by, adamw);
      return std::pair(counts::read(ShardingCount::groups_from_disk), counts::read(ShardingCount::groups_read_ahead));
    };
    EXPECT_EQ(counted("", 1'000'000), std::pair(kSteps, int64_t{0}));
    const auto [groups, none_ahead] = counted("", 40);
    EXPECT_GT(groups, 2 * kSteps);
    EXPECT_EQ(none_ahead, 0);
    EXPECT_EQ(counted(R"(, "pipeline_read": true)", 40), std::pair(groups, groups - kSteps)) << "but each step's first";
    EXPECT_EQ(counted(R"(, "pipeline_write": true, "buffer_count": 2)", 40), std::pair(groups, int64_t{0}));
  });
}

// The last groups of a step are on their way when the next one comes: nobody waits for the disk.
RANKS_TEST(ZeroDisk, GroupsGoBehindTheirStep, 1) {
  const auto counted = [](const std::string& states) {
    counts::reset();
    trained("no",
            DeepSpeedPlugin{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "zero_force_ds_cpu_optimizer": false, "zero_optimization": {"stage": 3, "sub_group_size": 40,
            "stage3_param_persistence_threshold": 0)" +
                                            section(On::states, support::scratch("nvme").string(), states) + "}}"},
            adamw);
    return counts::read(ShardingCount::groups_written_behind);
  };
  EXPECT_EQ(counted(""), 0);
  EXPECT_GT(counted(R"(, "pipeline_write": true)"), 0);
}

namespace {

DeepSpeedPlugin with_parameters(const std::string& parameters, const std::string& top = "") {
  return {.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, )" + top +
                          R"("zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
      "stage3_max_reuse_distance": 0, "offload_param": {"device": "nvme", "nvme_path": ")" +
                          support::scratch("nvme").string() + "\", " + parameters + "}}}"};
}

}  // namespace

// There are 147 elements in three units.
RANKS_TEST(ZeroDisk, SoManyElementsStayInMemory, 1, 2) {
  const auto on_disk = [](int64_t elements) {
    counts::reset();
    trained("no", with_parameters(R"("max_in_cpu": )" + std::to_string(elements)), adamw, 1);
    return counts::read(ShardingCount::parts_on_disk);
  };
  const int64_t all = on_disk(0);
  EXPECT_GT(all, 1);
  EXPECT_EQ(on_disk(1'000'000), 0);
  const int64_t some = on_disk(147 / 2 / support::world_size());
  EXPECT_GT(some, 0);
  EXPECT_LT(some, all);
}

RANKS_TEST(ZeroDisk, BuffersBoundWhatIsReadAhead, 1, 2) {
  const auto ahead = [](const std::string& buffers) {
    residency::reset_stats();
    trained("no", with_parameters(R"("max_in_cpu": 0, )" + buffers), adamw);
    return residency::stats().prefetch_hits;
  };
  EXPECT_GT(ahead(R"("buffer_count": 5, "buffer_size": 1e8)"), 0);
  EXPECT_EQ(ahead(R"("buffer_count": 0)"), 0);
  EXPECT_EQ(ahead(R"("buffer_size": 0)"), 0);
}

RANKS_TEST(ZeroDisk, RequestsAreAsTheFileSays, 1) {
  using enum ResidencyCount;
  struct Wide : torch::nn::Module {
    torch::nn::Linear weight = register_module("weight", torch::nn::Linear(64, 512));  // 32 blocks, and its bias
    at::Tensor forward(const at::Tensor& x) { return weight(x); }
  };
  const auto counted = [](const std::string& aio) {
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true, .deepspeed_plugin = with_parameters(R"("max_in_cpu": 0)", R"("aio": {)" + aio + "}, ")});
    auto model = std::make_shared<Wide>();
    auto [m, opt] = accelerator.prepare(model, adamw(model->parameters()));
    counts::reset();
    const at::NoGradGuard no_grad;
    m(torch::ones({1, 64}));
    return std::vector<int64_t>{counts::read(disk_requests), counts::read(disk_submissions), counts::read(disk_shares),
                                counts::read(disk_requests_most)};
  };
  const std::string base = R"("block_size": 4096, "queue_depth": 4, "overlap_events": false)";
  EXPECT_THAT(counted(base), testing::ElementsAre(33, 9, 1, 4));
  EXPECT_EQ(counted(R"("block_size": 8192, "queue_depth": 4, "overlap_events": false)")[0], 17);
  EXPECT_EQ(counted(R"("block_size": 4096, "queue_depth": 16, "overlap_events": false)")[1], 3);
  EXPECT_EQ(counted(base + R"(, "intra_op_parallelism": 2)")[2], 2);
  EXPECT_EQ(counted(base + R"(, "single_submit": true)")[1], 33);
}

// They begin with values that other runs have written, and leave such for them.
RANKS_TEST(ZeroDisk, CheckpointsGoOnInMemoryAndBack, 2) {
  support::on_both_stores([](const std::string& store) {
    for (const std::string precision : {"no", "bf16"})
      for (const int64_t number : {1, 3}) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number) + ", " + precision);
        const On most = number == 3 && store.back() == '0' ? On::both : On::states;
        const auto expected = trained(precision, plugin(number, On::nothing), adamw);
        for (const auto& [first, second] :
             {std::pair(most, On::nothing), std::pair(On::nothing, most), std::pair(most, most)}) {
          std::vector<at::Tensor> weights;
          for (const bool goes_on : {false, true}) {
            support::reset_states();
            Accelerator accelerator({.mixed_precision = precision,
                                     .cpu = true,
                                     .deepspeed_plugin = plugin(number, goes_on ? second : first)});
            ThreeLayers model;
            auto [m, opt] = accelerator.prepare(model, adamw(model->parameters()));
            const auto folder = support::scratch("state");
            if (goes_on) {
              accelerator.load_state(folder);
              EXPECT_GT(moments_on_disk(opt.optimizer(), second != On::nothing), 0);
            }
            const auto dtype = m->first->weight.scalar_type();
            for (int64_t step = goes_on ? kSteps / 2 : 0; step < (goes_on ? kSteps : kSteps / 2); ++step)
              for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
                const auto scope = accelerator.accumulate(m);
                accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()).to(dtype))));
                opt.step();
                opt.zero_grad();
              }
            if (!goes_on) accelerator.save_state(folder);
            else weights = masters_of(*m);
          }
          expect_same_bits({.weights = weights}, expected);
        }
      }
  });
}

// A disk that is full for one rank is an error of all, when the step is complete; the next one finds room again.
RANKS_TEST(ZeroDisk, AFullDiskIsNamedOnAllRanksAndLosesNothing, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    const auto expected = trained("no", plugin(2, On::nothing), adamw, 3);
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin(2, On::states)});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, adamw(model->parameters()));
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
    ::signal(SIGXFSZ, SIG_IGN);
    for (int64_t step = 0; step < 3; ++step)
      for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
        const auto scope = accelerator.accumulate(m);
        accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()))));
        const bool full = step == 0 && micro + 1 == kMicroSteps;
        if (full && support::rank() == support::world_size() - 1) ::setrlimit(RLIMIT_FSIZE, &small);
        const std::string error = full ? support::message_of<ResourceError>([&] { opt.step(); }) : (opt.step(), "");
        ::setrlimit(RLIMIT_FSIZE, &before);
        if (full) EXPECT_THAT(error, AllOf(HasSubstr("optimizer states on disk"), HasSubstr("the optimizer's states")));
        opt.zero_grad();
      }
    expect_same_bits({.weights = masters_of(*m)}, expected);
  });
}

// A program does with values on a disk what it does with values in memory.
RANKS_TEST(ZeroDisk, WritesAndReadsBetweenStepsAreSeen, 1, 2, 3) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  for (const std::string precision : {"no", "bf16"}) {
    std::vector<std::vector<at::Tensor>> results;
    for (const On on : {On::nothing, On::states, On::both}) {
      support::reset_states();
      Accelerator accelerator({.mixed_precision = precision, .cpu = true, .deepspeed_plugin = plugin(3, on)});
      ThreeLayers model;
      auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
      const auto dtype = m->first->weight.scalar_type();
      std::vector<at::Tensor> seen;
      for (int64_t step = 0; step < kSteps; ++step) {
        for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
          const auto scope = accelerator.accumulate(m);
          accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()).to(dtype))));
          opt.step();
          opt.zero_grad();
        }
        const at::NoGradGuard no_grad;
        if (step == 0) m->second->weight.mul_(0.5);
        if (step == 1) {
          const auto summoned = residency::summon(model);
          m->third->bias.fill_(0.25);
        }
        if (step == 2) safe_set_full_fp32_param(m->first->bias, torch::full({8}, 0.125));
        seen.push_back(m->second->weight.to(at::kFloat).clone());
        seen.push_back(safe_get_full_fp32_param(m->third->weight).clone());
        seen.push_back(safe_get_full_optimizer_state(m->first->weight, "momentum_buffer").clone());
      }
      results.push_back(seen);
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(results[1][i].equal(results[0][i])) << precision << ", states, " << i;
      EXPECT_TRUE(results[2][i].equal(results[0][i])) << precision << ", both, " << i;
    }
  }
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

namespace {

/// What a program has in hand between backward and step.
struct Hand {
  Accelerator& accelerator;
  ThreeLayers& model;
  AcceleratedOptimizer& opt;
  std::vector<at::Tensor> seen = {};

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const auto& group : opt.param_groups())
      for (const auto& piece : group.params())
        if (piece.grad().defined() && piece.numel() > 0) all.push_back(piece.grad());
    return all;
  }
  void see(const at::Tensor& tensor) { seen.push_back(tensor.detach().to(at::kFloat).clone()); }
};
using Habit = std::function<void(Hand&, int64_t step)>;

AcceleratorOptions by_file(const std::string& precision, bool on_disk, const std::string& clipping = kUnclipped) {
  auto by = plugin(2, on_disk ? On::states : On::nothing);
  by.hf_ds_config->set_value("gradient_clipping", clipping == kUnclipped ? 0.0 : 0.05);
  return {.mixed_precision = precision, .cpu = true, .deepspeed_plugin = std::move(by)};
}
AcceleratorOptions in_folder(const std::string& precision, bool on_disk) {
  FullyShardedDataParallelPlugin by{.auto_wrap_policy = AutoWrapPolicy::size_based_wrap, .min_num_params = 20};
  if (on_disk) by.offload_folder = support::scratch("shards");
  AcceleratorOptions options{.mixed_precision = precision, .cpu = true, .fsdp_plugin = std::move(by)};
  if (precision == "fp16") options.kwargs_handlers.emplace_back(GradScalerKwargs{.init_scale = 64});
  options.gradient_accumulation_steps = kMicroSteps;
  return options;
}

std::vector<at::Tensor> seen_by(const AcceleratorOptions& options, const Habit& before_step,
                                const Habit& after_step = {}) {
  support::reset_states();
  Accelerator accelerator(options);
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
  Hand hand{.accelerator = accelerator, .model = model, .opt = opt};
  for (int64_t step = 0; step < kSteps; ++step)
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      const auto batch = batch_of(step, micro, accelerator.process_index());
      const bool casts = options.deepspeed_plugin.has_value();
      accelerator.backward(loss_of(m(casts ? batch.to(m->first->weight.scalar_type()) : batch)));
      const bool is_last = micro + 1 == kMicroSteps;
      if (is_last) before_step(hand, step);
      opt.step();
      if (is_last && after_step) after_step(hand, step);
      opt.zero_grad();
    }
  for (const auto& parameter : model->parameters()) hand.see(parameter);
  return hand.seen;
}

void expect_alike(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << "seen as number " << i;
}

void see_gradients(Hand& hand, int64_t) {
  for (const auto& gradient : hand.gradients()) hand.see(gradient);
}

}  // namespace

// Sums over micro-steps, too. Nobody has looked, so no page of them is in memory.
RANKS_TEST(ZeroDisk, GradientsLieOnTheDiskFromBackwardToStep, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    for (const auto& options : {by_file("no", true), by_file("bf16", true), in_folder("no", true)}) {
      int64_t looked = 0;
      seen_by(options, [&](Hand& hand, int64_t) {
        for (const auto& gradient : hand.gradients()) {
          const auto disk = residency::DiskMemory::of(gradient);
          ASSERT_TRUE(disk != nullptr);
          EXPECT_FALSE(disk->may_have_been_touched(gradient));
          ++looked;
        }
      });
      EXPECT_GT(looked, 0);
    }
  });
}

RANKS_TEST(ZeroDisk, WhatProgramsDoWithGradientsActs, 1, 2) {
  const std::map<std::string, std::pair<Habit, Habit>> habits{
      {"look", {see_gradients, see_gradients}},
      {"look at whole ones",
       {[](Hand& hand, int64_t) {
          for (const auto& parameter : hand.model->parameters())
            if (parameter.grad().defined()) hand.see(parameter.grad());
        },
        {}}},
      {"scale one", {[](Hand& hand, int64_t) { hand.model->second->weight.mutable_grad().mul_(0.5); }, see_gradients}},
      {"write past all counting",
       {[](Hand& hand, int64_t) {
          for (auto& gradient : hand.gradients()) gradient.data().clamp_(-1e-3, 1e-3);
        },
        see_gradients}},
      {"replace one",
       {[](Hand& hand, int64_t) {
          auto& weight = hand.model->first->weight;
          weight.mutable_grad() = torch::ones_like(weight);
        },
        {}}},
      {"fill with zeros", {[](Hand& hand, int64_t) { hand.opt.zero_grad(/*set_to_none=*/false); }, see_gradients}},
      {"clear", {[](Hand& hand, int64_t step) { step % 2 == 1 ? hand.opt.zero_grad() : void(); }, {}}},
      {"tell the norm",
       {[](Hand& hand, int64_t) { hand.see(hand.accelerator.clip_grad_norm_(hand.model->parameters(), 1000)); },
        see_gradients}},
      {"clip to a norm",
       {[](Hand& hand, int64_t) { hand.see(hand.accelerator.clip_grad_norm_(hand.model->parameters(), 0.01)); },
        see_gradients}},
      {"clip by value",
       {[](Hand& hand, int64_t) { hand.accelerator.clip_grad_value_(hand.model->parameters(), 1e-3); }, see_gradients}},
      {"unscale", {[](Hand& hand, int64_t) { hand.accelerator.unscale_gradients(); }, see_gradients}}};
  const auto alike = [&](const std::string& what, const AcceleratorOptions& on_disk, const AcceleratorOptions& here) {
    for (const auto& [name, habit] : habits) {
      SCOPED_TRACE(what + ", " + name);
      expect_alike(seen_by(on_disk, habit.first, habit.second), seen_by(here, habit.first, habit.second));
    }
  };
  for (const std::string precision : {"no", "fp16"}) {
    alike("shared memory, " + precision, by_file(precision, true), by_file(precision, false));
    const support::Variable sent("ACCELERATE_SHARED_MEMORY", "0");
    alike("a folder, " + precision, in_folder(precision, true), in_folder(precision, false));
  }
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store + ", the file clips");
    for (const std::string precision : {"no", "bf16", "fp16"})
      expect_alike(seen_by(by_file(precision, true, "clips"), see_gradients, see_gradients),
                   seen_by(by_file(precision, false, "clips"), see_gradients, see_gradients));
  });
}

// Neither norms nor a look for overflows leave pages of them in memory; a divided gradient is written.
RANKS_TEST(ZeroDisk, GradientsAreLookedAtByTurns, 1, 2) {
  const support::Variable sent("ACCELERATE_SHARED_MEMORY", "0");
  const auto are_untouched = [](Hand& hand, int64_t) {
    for (const auto& gradient : hand.gradients())
      EXPECT_FALSE(residency::DiskMemory::of(gradient)->may_have_been_touched(gradient));
  };
  for (const std::string precision : {"no", "fp16"}) {
    SCOPED_TRACE(precision);
    seen_by(in_folder(precision, true), [&](Hand& hand, int64_t step) {
      for (const double limit : {1000.0, 0.01}) {
        hand.accelerator.clip_grad_norm_(hand.model->parameters(), limit);
        are_untouched(hand, step);
      }
      hand.accelerator.clip_grad_value_(hand.model->parameters(), 1e-3);
      are_untouched(hand, step);
    });
    seen_by(by_file(precision, true, "clips"), are_untouched, are_untouched);
  }
}

TEST(ZeroDisk, WrongFoldersAndNumbersAreNamed) {
  const auto message = [](const std::string& states) {
    return support::message_of<ConfigError>([&] {
      support::reset_states();
      Accelerator accelerator({.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, "offload_optimizer": {
        "device": "nvme", )" + states + "}}}"}});
      ThreeLayers model;
      accelerator.prepare(model, adamw(model->parameters()));
    });
  };
  EXPECT_THAT(message(R"("nvme_path": "/proc/nowhere")"), HasSubstr("the folder '/proc/nowhere' can't be made"));
  EXPECT_THAT(message(R"("nvme_path": "/tmp", "pipeline_read": true, "buffer_count": 1)"),
              HasSubstr("buffer_count' is 1, expected at least 2"));
}

// As in memory by sockets, by which ranks gather then.
RANKS_TEST(FsdpDisk, AFolderTrainsAsMemory, 1, 2, 3) {
  const auto trained_by = [](const std::string& precision, int64_t version, const std::string& folder) {
    support::reset_states();
    if (!folder.empty()) ::setenv("FSDP_OFFLOAD_FOLDER", folder.c_str(), 1);
    Accelerator accelerator(
        {.mixed_precision = precision,
         .cpu = true,
         .fsdp_plugin = FullyShardedDataParallelPlugin{
             .fsdp_version = version, .auto_wrap_policy = AutoWrapPolicy::size_based_wrap, .min_num_params = 20}});
    ::unsetenv("FSDP_OFFLOAD_FOLDER");
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    for (int64_t step = 0; step < kSteps; ++step) {
      accelerator.backward(loss_of(m(batch_of(step, 0, accelerator.process_index()))));
      opt.step();
      opt.zero_grad();
    }
    std::vector<at::Tensor> weights;
    for (const auto& [name, weight] : accelerator.get_state_dict(m)) weights.push_back(weight.clone());
    const Receipt receipt = accelerator.receipts()["fsdp_plugin.offload_folder"];
    EXPECT_EQ(receipt.state == ReceiptState::acted, !folder.empty()) << receipt.effect;
    return Trained{.weights = weights, .written = counts::read(ResidencyCount::disk_bytes_written)};
  };
  for (const std::string precision : {"no", "bf16"})
    for (const int64_t version : {1, 2}) {
      SCOPED_TRACE(precision + ", version " + std::to_string(version));
      ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
      const auto expected = trained_by(precision, version, "");
      ::unsetenv("ACCELERATE_SHARED_MEMORY");
      const auto found = trained_by(precision, version, support::scratch("shards").string());
      expect_same_bits(found, expected);
      EXPECT_GT(found.written, 0);
    }
}
