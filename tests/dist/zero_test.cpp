/// DeepSpeed's stages: what each keeps, gathers and refuses, against one plain process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>

#include "accelerate/accelerate.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/zero_handles.hpp"
#include "accelerate/residency.hpp"
#include "both_stores.hpp"
#include "comm/dry_process_group.hpp"
#include "comm/group.hpp"
#include "message_of.hpp"
#include "parallel/engines.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/shard_store.hpp"
#include "parallel/zero/objects.hpp"
#include "parallel/zero/translate.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "utils/counts.hpp"
#include "utils/log.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;
using support::text_of;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// The weights that one process has which sees all ranks' batches. @param limit  of the norm of gradients; 0: none
std::vector<at::Tensor> trained_alone(int64_t ranks, double limit) {
  ThreeLayers model;
  auto optimizer = with_momentum(model->parameters());
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < kMicroSteps; ++micro)
      for (int64_t rank = 0; rank < ranks; ++rank)
        (loss_of(model(batch_of(step, micro, rank))) / static_cast<double>(ranks * kMicroSteps)).backward();
    if (limit > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), limit);
    optimizer.step();
  }
  return model->parameters();
}

}  // namespace

// SGD, which shows wrong scales that Adam hides.
RANKS_TEST(Zero, EveryStageTrainsAsOneProcess, 1, 2, 3, 5) {
  for (const double limit : {0.0, 0.05}) {
    const auto expected = trained_alone(support::world_size(), limit);
    support::on_both_stores([&](const std::string& store) {
      for (int64_t number = 0; number <= 3; ++number) {
        SCOPED_TRACE(store + ", stage " + std::to_string(number));
        support::reset_states();
        Accelerator accelerator(
            {.cpu = true, .deepspeed_plugin = stage(number, R"(, "gradient_clipping": )" + std::to_string(limit))});
        ThreeLayers model;
        auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
        EXPECT_EQ(accelerator.distributed_type(), DistributedType::DEEPSPEED);
        EXPECT_EQ(accelerator.gradient_accumulation_steps(), kMicroSteps) << "the file's";
        train(accelerator, m, opt);
        // Sums over ranks come in another order.
        expect_equal(m->parameters(), expected, 1e-5);
      }
    });
  }
}

// DeepSpeed makes its fp32 masters of 16-bit parameters.
RANKS_TEST(Zero, MastersBeginAsTheRoundedParameters, 1, 2) {
  support::on_both_stores([](const std::string& store) {
    for (int64_t number = 0; number <= 3; ++number) {
      SCOPED_TRACE(store + ", stage " + std::to_string(number));
      support::reset_states();
      Accelerator accelerator({.mixed_precision = "bf16", .cpu = true, .deepspeed_plugin = stage(number, kUnclipped)});
      ThreeLayers model;
      const auto exact = model->first->weight.detach().clone();
      auto optimizer = torch::optim::SGD(model->parameters(), 0.0);  // moves nothing
      auto [m, opt] = accelerator.prepare(model, optimizer);
      EXPECT_EQ(m->first->weight.scalar_type(), at::kBFloat16);
      const auto output = m(batch_of(0, 0, 0).to(at::kBFloat16));
      EXPECT_EQ(output.scalar_type(), at::kBFloat16) << "nothing is converted but parameters";
      int64_t elements = 0;
      for (const auto& group : opt.param_groups())
        for (const auto& piece : group.params()) {
          EXPECT_EQ(piece.scalar_type(), at::kFloat) << "what is stepped on";
          EXPECT_TRUE(piece.equal(piece.to(at::kBFloat16).to(at::kFloat)));
          elements += piece.numel();
        }
      EXPECT_GT(elements, 0);
      EXPECT_TRUE(m->first->weight.to(at::kFloat).equal(exact.to(at::kBFloat16).to(at::kFloat)));
    }
  });
}

/// Accelerate's guide "FSDP vs DeepSpeed", on models that are loaded in bf16: what ranks keep, compute with, and step
/// in.
RANKS_TEST(Zero, PrecisionsAreThoseOfTheGuidesTable, 1, 2) {
  constexpr auto kLow = at::kBFloat16, kHigh = at::kFloat;
  struct Row {
    const char *framework, *mixed_precision;
    at::ScalarType local, training, optimizer;
  };
  for (const Row& row : {Row{"FSDP", "no", kLow, kLow, kLow}, Row{"FSDP", "bf16", kHigh, kLow, kHigh},
                         Row{"DeepSpeed", "bf16", kHigh, kLow, kHigh}})
    support::on_both_stores([&](const std::string& store) {
      SCOPED_TRACE(std::string(row.framework) + ", " + row.mixed_precision + ", " + store);
      support::reset_states();
      AcceleratorOptions options{.mixed_precision = row.mixed_precision, .cpu = true};
      if (row.framework == std::string("FSDP")) options.fsdp_plugin = FullyShardedDataParallelPlugin{};
      else options.deepspeed_plugin = stage(3, kUnclipped);
      Accelerator accelerator(options);
      ThreeLayers model;
      model->to(kLow);
      auto [m, opt] = accelerator.prepare(model, torch::optim::AdamW(model->parameters()));
      EXPECT_EQ(m->first->weight.scalar_type(), row.training);
      accelerator.backward(loss_of(m(batch_of(0, 0, accelerator.process_index()).to(kLow)).to(kHigh)));
      opt.step();
      int64_t elements = 0;
      for (const auto& group : opt.param_groups())
        for (const auto& piece : group.params()) {
          EXPECT_EQ(piece.scalar_type(), row.local);
          const auto found = opt.state().find(piece.unsafeGetTensorImpl());
          if (found == opt.state().end()) continue;
          elements += piece.numel();
          EXPECT_EQ(static_cast<torch::optim::AdamWParamState&>(*found->second).exp_avg().scalar_type(), row.optimizer);
        }
      EXPECT_GT(elements, 0);
    });
}

RANKS_TEST(Zero, StagesOneAndTwoGatherOncePerStep, 2, 3) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  const auto fetched = [](int64_t number, const std::string& more) {
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true,
         .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
      "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": )" +
                                                             std::to_string(number) + more + "}}"}});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    train(accelerator, m, opt, 2);
    residency::reset_stats();
    train(accelerator, m, opt, 1);
    const auto stats = residency::stats();
    return stats.faults + stats.prefetch_hits;
  };
  // Units have at most 70 elements: the first layer, the second one's weight, and its bias with the third layer.
  for (const int64_t number : {1, 2}) {
    EXPECT_EQ(fetched(number, R"(, "allgather_bucket_size": 70)"), 3) << "stage " << number;
    EXPECT_EQ(fetched(number, R"(, "reduce_bucket_size": 70)"), 3) << "stage " << number;
    EXPECT_EQ(fetched(number, ""), 1) << "stage " << number;
  }
  // Weights come for each forward, and again where backward needs them; biases come once.
  const std::string go = R"(, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": )";
  const int64_t gone = fetched(3, go + "10");
  EXPECT_GE(gone, 1 + 4 * kMicroSteps);
  EXPECT_GE(fetched(3, go + "0"), 3 * kMicroSteps) << "biases come with their weights";
  EXPECT_EQ(fetched(3, go + "64"), 1) << "all are small";
  EXPECT_LT(fetched(3, go + R"(64, "stage3_model_persistence_threshold": 100)"), gone);
  EXPECT_LT(fetched(3, R"(, "stage3_param_persistence_threshold": 10)"), gone) << "kept from forward to backward";
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

// By sockets, of three layers that all come and go.
RANKS_TEST(Zero, StageThreesNumbersDecideWhatIsFetchedAhead, 2) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  const auto after = [](const std::string& more) {
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
      "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3,
      "stage3_param_persistence_threshold": 0)" + more + "}}"}});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    train(accelerator, m, opt, 2);
    residency::reset_stats();
    train(accelerator, m, opt, 1);
    return residency::stats();
  };
  EXPECT_GT(after("").prefetch_hits, 0);
  for (const char* off : {R"(, "overlap_comm": false)", R"(, "stage3_prefetch_bucket_size": 0)",
                          R"(, "stage3_allgather_sequential": true)"})
    EXPECT_EQ(after(off).prefetch_hits, 0) << off;
  const auto fetched = [&](const std::string& more) {
    const auto stats = after(more);
    return stats.faults + stats.prefetch_hits;
  };
  EXPECT_GT(fetched(R"(, "stage3_max_live_parameters": 0)"), fetched("")) << "nothing has room beside what is used";
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

namespace {

/// How many units came at stage 3, where each may go.
template <class Model> int64_t fetched_in_a_forward_of(const std::string& more) {
  support::reset_states();
  Accelerator accelerator({.cpu = true,
                           .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
    "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0)" +
                                                                               more + "}}"}});
  auto model = std::make_shared<Model>();
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.1));
  residency::reset_stats();
  const at::NoGradGuard no_grad;
  m(torch::ones({2, 6}));
  const auto stats = residency::stats();
  return stats.faults + stats.prefetch_hits;
}

}  // namespace

// Weights of the second and third layers come with one fetch where they are one unit.
RANKS_TEST(Zero, LeafModulesAndSmallOnesComeAsAWhole, 2) {
  struct PairImpl : torch::nn::Module {
    PairImpl() {
      a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
      b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    }
    at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(a(x))); }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  struct TwoPairsImpl : torch::nn::Module {
    TwoPairsImpl() {
      first = register_module("first", std::make_shared<PairImpl>());
      second = register_module("second", std::make_shared<PairImpl>());
    }
    at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
    std::shared_ptr<PairImpl> first, second;
  };
  const auto fetched = fetched_in_a_forward_of<TwoPairsImpl>;
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  EXPECT_EQ(fetched(""), 4);
  EXPECT_EQ(fetched(R"(, "leaf_module": {"classes": ["my_package.layers.Pair"]})"), 2);
  EXPECT_EQ(fetched(R"(, "leaf_module": {"names": ["second"]})"), 3);
  EXPECT_EQ(fetched(R"(, "leaf_module": {"name_suffixes": ["rst"]})"), 3);
  // 72 elements in three modules, and 144 in all seven.
  EXPECT_EQ(fetched(R"(, "stage3_module_granularity_threshold": 25)"), 1);
  EXPECT_EQ(fetched(R"(, "stage3_module_granularity_threshold": 24)"), 1);
  EXPECT_EQ(fetched(R"(, "stage3_module_granularity_threshold": 20)"), 4);
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

// A tenth of a model is less than one of the eight pieces that it at least travels in.
RANKS_TEST(Zero, SmallBlocksComeAtOnceWhereTheyAreFetchedAhead, 2) {
  struct PairsImpl : torch::nn::Module {
    PairsImpl() {
      for (int i = 0; i < 10; ++i) {
        const torch::nn::LinearOptions options = torch::nn::LinearOptions(6, 6).bias(false);
        pairs.push_back(register_module("p" + std::to_string(i),
                                        torch::nn::Sequential(torch::nn::Linear(options), torch::nn::Linear(options))));
      }
    }
    at::Tensor forward(at::Tensor x) {
      for (auto& pair : pairs) x = pair->forward(x);
      return x;
    }
    std::vector<torch::nn::Sequential> pairs;
  };
  const auto fetched = fetched_in_a_forward_of<PairsImpl>;
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  EXPECT_EQ(fetched(""), 10);
  EXPECT_EQ(fetched(R"(, "stage3_prefetch_bucket_size": 72)"), 10);
  EXPECT_EQ(fetched(R"(, "stage3_prefetch_bucket_size": 71)"), 20);
  EXPECT_EQ(fetched(R"(, "stage3_max_live_parameters": 71)"), 20);
  EXPECT_EQ(fetched(R"(, "overlap_comm": false)"), 20);
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

RANKS_TEST(Zero, NoSyncIsRefusedWhereGradientsAreSplit, 2) {
  for (int64_t number = 0; number <= 3; ++number) {
    SCOPED_TRACE(number);
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(number)});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    auto& prepared = m;
    if (number < 2) EXPECT_NO_THROW((void)accelerator.no_sync(prepared));
    else
      EXPECT_THAT(support::message_of<ConfigError>([&] { (void)accelerator.no_sync(prepared); }),
                  AllOf(HasSubstr("no_sync"), HasSubstr("stage " + std::to_string(number)), HasSubstr("accumulate()")));
  }
}

// The file's limit holds, whatever the program says; without one it is 1, as DeepSpeed's since 0.19.3.
RANKS_TEST(Zero, TheFilesLimitClips, 1, 2) {
  const auto norm_of_step = [](const std::string& more, double asked, std::string& warnings) {
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(2, more)});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 1.0));
    const auto before = torch::nn::utils::parameters_to_vector(m->parameters()).clone();
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      accelerator.backward(1000 * loss_of(m(batch_of(0, micro, accelerator.process_index()))));
      if (accelerator.sync_gradients())
        warnings = support::warnings_of(
            [&] { EXPECT_GT(accelerator.clip_grad_norm_(m->parameters(), asked).template item<double>(), 100); });
      opt.step();
    }
    // A rate of 1: the way that was gone is the gradient.
    return (torch::nn::utils::parameters_to_vector(m->parameters()) - before).norm().item<double>();
  };
  std::string warnings;
  EXPECT_NEAR(norm_of_step(R"(, "gradient_clipping": 0.25)", 0.25, warnings), 0.25, 1e-4);
  EXPECT_THAT(warnings, Not(HasSubstr("max_norm")));
  EXPECT_NEAR(norm_of_step(R"(, "gradient_clipping": 0.25)", 5.0, warnings), 0.25, 1e-4);
  EXPECT_THAT(warnings, AllOf(HasSubstr("max_norm is 5"), HasSubstr("gradient_clipping is 0.25")));
  EXPECT_NEAR(norm_of_step("", 1.0, warnings), 1, 1e-4);
  EXPECT_GT(norm_of_step(kUnclipped, 1.0, warnings), 100);
  EXPECT_THAT(warnings, HasSubstr("(off)"));
}

RANKS_TEST(Zero, TheFilesOptimizerAndScheduleComeForTheDummies, 1, 2) {
  support::reset_states();
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3,
      "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                  "warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"}}})"}});
  ThreeLayers model;
  const DummyOptim dummy(model->parameters(), 0.01, 0.1);
  auto [m, opt, schedule] = accelerator.prepare(
      model, dummy,
      DummyScheduler{.optimizer = dummy, .total_num_steps = 8 * support::world_size(), .warmup_num_steps = 4});
  const auto& options = static_cast<const torch::optim::AdamWOptions&>(opt.param_groups()[0].options());
  EXPECT_EQ(options.betas(), std::make_tuple(0.8, 0.9));
  EXPECT_EQ(options.weight_decay(), 0.1);
  std::vector<double> rates;
  for (int64_t step = 0; step < 8; ++step)
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()))));
      if (accelerator.sync_gradients()) rates.push_back(opt.param_groups()[0].options().get_lr());
      opt.step();
      schedule.step();
      opt.zero_grad();
    }
  // One step of the schedule for each of the optimizer, on any number of ranks. DeepSpeed's first two steps are taken
  // with the first rate.
  EXPECT_THAT(rates,
              testing::Pointwise(testing::DoubleNear(1e-12), {0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.0075, 0.005}));
}

TEST(Zero, AccumulationIsTheProgramsUnlessTheFileSays) {
  const auto steps = [](DeepSpeedPlugin plugin) {
    support::reset_states();
    Accelerator accelerator({.gradient_accumulation_steps = 3, .cpu = true, .deepspeed_plugin = std::move(plugin)});
    ThreeLayers model;
    const data::DataLoader loader(std::vector<float>(8), {.batch_size = 2});
    accelerator.prepare(model, with_momentum(model->parameters()), loader);
    const auto effective = accelerator.receipts()["deepspeed_plugin.gradient_accumulation_steps"].value;
    EXPECT_EQ(effective, std::to_string(accelerator.gradient_accumulation_steps()));
    return accelerator.gradient_accumulation_steps();
  };
  EXPECT_EQ(steps({}), 3);
  EXPECT_EQ(steps({.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto",
                                       "zero_optimization": {}})"}),
            3);
  EXPECT_EQ(steps(stage(2)), 2);
  EXPECT_EQ(steps({.gradient_accumulation_steps = int64_t{4}}), 4);
  EXPECT_EQ(steps({.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {}})"}), 1)
      << "the reference writes 1 into a file that lacks it";
}

TEST(Zero, StandInsWithoutAConfigurationAreNamed) {
  support::reset_states();
  Accelerator accelerator({.cpu = true});
  ThreeLayers model;
  EXPECT_THAT(support::message_of<ConfigError>([&] { accelerator.prepare(model, DummyOptim(model->parameters())); }),
              AllOf(HasSubstr("DummyOptim"), HasSubstr("deepspeed_plugin")));
}

TEST(Zero, WhatDecidesTwiceIsRefused) {
  const auto refusal = [](AcceleratorOptions options) {
    support::reset_states();
    options.cpu = true;
    options.deepspeed_plugin = stage(2);
    return support::message_of<ConfigError>([&] { Accelerator accelerator(options); });
  };
  EXPECT_THAT(refusal({.fsdp_plugin = FullyShardedDataParallelPlugin{}}),
              AllOf(HasSubstr("deepspeed_plugin"), HasSubstr("fsdp_plugin")));
  EXPECT_THAT(refusal({.kwargs_handlers = {GradScalerKwargs{.init_scale = 8}}}),
              AllOf(HasSubstr("GradScalerKwargs"), HasSubstr("fp16")));
  EXPECT_THAT(refusal({.kwargs_handlers = {AutocastKwargs{}}}), HasSubstr("AutocastKwargs"));
  EXPECT_THAT(refusal({.mixed_precision = "fp8"}), HasSubstr("mixed_precision is fp8"));
  EXPECT_THAT(refusal({.parallelism_config = ParallelismConfig{.dp_replicate_size = 2}}),
              AllOf(HasSubstr("dp_replicate_size"), HasSubstr("HYBRID_SHARD")));
  EXPECT_THAT(refusal({.kwargs_handlers = {DistributedDataParallelKwargs{.static_graph = true}}}),
              HasSubstr("static_graph"));
}

RANKS_TEST(Zero, WholeWeightsOfStageThreeMustBeAskedFor, 2) {
  for (const bool asked : {false, true}) {
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.zero_stage = 3, .zero3_save_16bit_model = asked}});
    ThreeLayers model;
    auto m = accelerator.prepare(model, data::DataLoader(std::vector<float>(8), {.batch_size = 2}));
    const auto& prepared = std::get<0>(m);
    if (asked) EXPECT_EQ(accelerator.get_state_dict(prepared).size(), accelerator.is_main_process() ? 6 : 0);
    else
      EXPECT_THAT(support::message_of<ConfigError>([&] { accelerator.get_state_dict(prepared); }),
                  HasSubstr("zero3_save_16bit_model"));
  }
}

namespace {

DeepSpeedPlugin all_are_used(int64_t number) {
  return {.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"ignore_unused_parameters": false, "stage": )" +
                          std::to_string(number) + "}}"};
}

}  // namespace

/// Asked for, not by default; the line is rank 0's.
RANKS_TEST(Zero, ModelsThatAreNotSplitFromTheStartAreTold, 1, 2) {
  const auto said = [](std::optional<bool> asked, bool deferred) {
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.zero_stage = 3, .zero3_init_flag = asked}});
    ThreeLayers model{nullptr};
    const auto make = [&] { model = ThreeLayers(); };
    if (deferred) {
      const auto empty = init_empty_weights();
      make();
    } else {
      make();
    }
    return support::warnings_of(
        [&] { accelerator.prepare(model, data::DataLoader(std::vector<float>(8), {.batch_size = 2})); });
  };
  const std::string line = "make it within accelerate::init_empty_weights()";
  EXPECT_EQ(said(true, false).find(line) != std::string::npos, support::rank() == 0);
  EXPECT_THAT(said(true, true), Not(HasSubstr(line)));
  EXPECT_THAT(said({}, false), Not(HasSubstr(line)));
}

RANKS_TEST(Zero, UnusedParametersAreNamedWhereAskedFor, 1, 2) {
  for (int64_t number = 0; number <= 3; ++number) {
    SCOPED_TRACE(number);
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = all_are_used(number)});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
    accelerator.backward(loss_of(m(batch_of(0, 0, accelerator.process_index()))));
    opt.step();
    opt.zero_grad();
    accelerator.backward(m->first->weight.square().sum());
    EXPECT_THAT(support::message_of<ConfigError>([&, &opt = opt] { opt.step(); }),
                AllOf(HasSubstr("second.weight"), HasSubstr("third.bias"), Not(HasSubstr("first.weight")),
                      HasSubstr("ignore_unused_parameters")));
  }
}

// Each of several optimizers asks for its own parameters' gradients; a call that is no step asks for none.
RANKS_TEST(Zero, UnusedParametersAreThoseOfTheOptimizerThatSteps, 1, 2) {
  for (int64_t number = 0; number <= 3; ++number) {
    SCOPED_TRACE(number);
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = all_are_used(number)});
    ThreeLayers model;
    const auto parameters = model->parameters();
    auto [m, first, rest] =
        accelerator.prepare(model, with_momentum({parameters[0], parameters[1]}),
                            with_momentum(std::vector<at::Tensor>(parameters.begin() + 2, parameters.end())));
    const auto backward = [&, &m = m] {
      accelerator.backward(loss_of(m(batch_of(0, 0, accelerator.process_index()))));
    };
    backward();
    first.step();
    first.zero_grad();
    EXPECT_NO_THROW(rest.step()) << "the first one's gradients are gone";
    rest.zero_grad();
    const auto folder = support::scratch_dir() + "/" + std::to_string(number);
    accelerator.save_state(folder);
    EXPECT_NO_THROW(accelerator.load_state(folder));
    accelerator.backward(m->first->weight.square().sum() + m->first->bias.sum());
    EXPECT_NO_THROW(first.step());
    EXPECT_THAT(support::message_of<ConfigError>([&, &rest = rest] { rest.step(); }),
                AllOf(HasSubstr("second.weight"), HasSubstr("third.bias"), Not(HasSubstr("first."))));
  }
}

TEST(Zero, TheLaunchersVariablesAskForIt) {
  support::reset_states();
  const support::Variable use("ACCELERATE_USE_DEEPSPEED", "true"), stage_asked("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3");
  {
    Accelerator accelerator({.cpu = true});
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::DEEPSPEED);
    EXPECT_EQ(std::string(to_string(accelerator.distributed_type())), "DEEPSPEED");
    EXPECT_EQ(accelerator.receipts()["deepspeed_plugin.zero_optimization.stage"].value, "3");
    Accelerator second({.cpu = true});
    EXPECT_EQ(second.distributed_type(), DistributedType::DEEPSPEED);
  }
  support::reset_states();
  EXPECT_THAT(support::message_of<ConfigError>(
                  [] { Accelerator accelerator({.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.zero_stage = 5}}); }),
              HasSubstr("zero_stage is 5"));
}

/// Not of what the program says, and not where the group is there already.
TEST(Zero, TheGroupsTimeoutIsDeepSpeeds) {
  const auto timeout_of = [](DeepSpeedPlugin plugin, const std::vector<KwargsHandler>& handlers = {}) {
    AcceleratorState::reset(/*reset_partial_state=*/true);
    GradientState::reset();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = std::move(plugin), .kwargs_handlers = handlers});
    return accelerator.receipts()["InitProcessGroupKwargs.timeout"].value;
  };
  const auto is = [](int64_t minutes) { return HasSubstr(std::to_string(minutes * 60)); };
  EXPECT_THAT(timeout_of(stage(2)), is(10));
  auto old = stage(2);
  old.as_of_version = "0.19.5";
  EXPECT_THAT(timeout_of(old), is(30));
  ::setenv("DEEPSPEED_TIMEOUT", "7", 1);
  EXPECT_THAT(timeout_of(stage(2)), is(7));
  EXPECT_THAT(timeout_of(stage(2), {InitProcessGroupKwargs{.timeout = std::chrono::minutes(3)}}), is(3));
  ::setenv("DEEPSPEED_TIMEOUT", "0", 1);
  EXPECT_THAT(support::message_of<ConfigError>([&] { timeout_of(stage(2)); }), HasSubstr("DEEPSPEED_TIMEOUT is 0"));
  ::unsetenv("DEEPSPEED_TIMEOUT");
  AcceleratorState::reset(/*reset_partial_state=*/true);
}

struct OptimizerOfTheFile {
  const char* section;
  std::function<std::unique_ptr<torch::optim::Optimizer>(ThreeLayers&)> alone;
};
/// The optimizers that ask for more than their pieces.
std::vector<OptimizerOfTheFile> muon_and_lamb() {
  return {
      {R"({"type": "Muon", "params": {"lr": 0.05, "momentum": 0.9, "adam_lr": 0.01, "weight_decay": 0.1}})",
       [](ThreeLayers& model) {
         optim::MuonOptions matrices(true), rest(false);
         matrices.lr(0.05).momentum(0.9).weight_decay(0.1);
         rest.lr(0.01).weight_decay(0.1);
         std::vector<std::pair<std::string, at::Tensor>> named;
         for (const auto& item : model->named_parameters()) named.emplace_back(item.key(), item.value());
         return std::make_unique<optim::Muon>(optim::muon_groups(named, matrices, rest), matrices);
       }},
      {R"({"type": "Lamb", "params": {"lr": 0.02, "max_coeff": 0.5, "weight_decay": 0.1}})", [](ThreeLayers& model) {
         return std::make_unique<optim::Lamb>(model->parameters(),
                                              optim::LambOptions(0.02).max_coeff(0.5).weight_decay(0.1));
       }}};
}

/// Trains masters as `make` does, alone, with what all ranks' batches give in `type`.
std::vector<at::Tensor> masters_alone(const OptimizerOfTheFile& kind, at::ScalarType type) {
  ThreeLayers masters, computes;
  computes->to(type);
  {
    const at::NoGradGuard no_grad;
    for (const auto& master : masters->parameters()) master.copy_(master.to(type));
  }
  const auto optimizer = kind.alone(masters);
  const auto many = static_cast<double>(support::world_size() * kMicroSteps);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < masters->parameters().size(); ++i) {
        computes->parameters()[i].copy_(masters->parameters()[i]);
        masters->parameters()[i].mutable_grad() = at::zeros_like(masters->parameters()[i]);
      }
    }
    for (int64_t micro = 0; micro < kMicroSteps; ++micro)
      for (int64_t rank = 0; rank < support::world_size(); ++rank) {
        computes->zero_grad();
        loss_of(computes(batch_of(step, micro, rank).to(type)).to(at::kFloat)).backward();
        for (size_t i = 0; i < masters->parameters().size(); ++i)
          masters->parameters()[i].mutable_grad().add_(computes->parameters()[i].grad().to(at::kFloat), 1 / many);
      }
    optimizer->step();
  }
  return masters->parameters();
}

RANKS_TEST(Zero, MuonAndLambOfTheFileStepAsAlone, 1, 2, 3) {
  for (const auto& kind : muon_and_lamb()) {
    const auto alone = masters_alone(kind, at::kFloat);
    support::on_both_stores([&](const std::string& store) {
      for (const int64_t number : {0, 2, 3}) {
        SCOPED_TRACE(std::string(kind.section) + " at stage " + std::to_string(number) + ", " + store);
        support::reset_states();
        Accelerator accelerator(
            {.cpu = true,
             .deepspeed_plugin = stage(
                 number, kUnclipped + R"(, "zero_allow_untested_optimizer": true, "optimizer": )" + kind.section)});
        ThreeLayers model;
        auto [m, opt] = accelerator.prepare(model, DummyOptim(model->parameters()));
        train(accelerator, m, opt);
        std::vector<at::Tensor> ours;
        for (const auto& parameter : m->parameters()) ours.push_back(parameter.detach().clone());
        // Newton-Schulz computes in bf16, and turns the last bits of averages into some of its own.
        expect_equal(ours, alone, 2e-3);
        int64_t states = 0;
        for (const auto& [parameter, state] : opt.state())
          if (const auto* of_muon = dynamic_cast<const optim::MuonParamState*>(state.get())) {
            if (of_muon->momentum_buffer().defined()) states += of_muon->momentum_buffer().numel();
          } else {
            states += static_cast<const optim::LambParamState&>(*state).exp_avg().numel();
          }
        int64_t elements = 0;
        for (const auto& parameter : alone)
          if (parameter.dim() > 1 || std::string(kind.section).find("Lamb") != std::string::npos)
            elements += parameter.numel();
        const auto on_all_ranks = accelerator.reduce(torch::tensor(states), "sum").item<int64_t>();
        EXPECT_EQ(on_all_ranks, elements * (number == 0 ? support::world_size() : 1)) << "each rank has its pieces'";
      }
    });
  }
}

/// Ranks send each other their pieces of matrices, and pieces of what was made of these, and nothing else: each matrix
/// is whole on one rank only, the largest ones on different ranks.
RANKS_TEST(Zero, MatricesForMuonAreSharedOut, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    for (const int64_t number : {2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(number) + ", " + store);
      support::reset_states();
      Accelerator accelerator({.cpu = true,
                               .deepspeed_plugin = stage(number, kUnclipped + R"(,
          "comms_logger": {"enabled": true}, "zero_allow_untested_optimizer": true, "optimizer": )" +
                                                                     muon_and_lamb().front().section)});
      ThreeLayers model;
      const std::vector<int64_t> largest_first{2, 0, 4};  // the weights' numbers, by their sizes
      std::vector<int64_t> numels;
      for (const int64_t i : largest_first) numels.push_back(model->parameters()[static_cast<size_t>(i)].numel());
      ASSERT_TRUE(std::is_sorted(numels.rbegin(), numels.rend()));
      auto [m, opt] = accelerator.prepare(model, DummyOptim(model->parameters()));
      train(accelerator, m, opt);
      int64_t sent = 0;
      for (const auto& record : comm::comms_records())
        if (record.operation == "send") sent += record.bytes * record.count;
      std::vector<int64_t> pieces;  // of this rank, in the order of the parameters
      for (const auto& piece : opt.param_groups().front().params()) pieces.push_back(piece.numel());
      ASSERT_EQ(pieces.size(), 3U);
      const std::vector<size_t> in_groups{1, 0, 2};  // where the largest, the next and the smallest are there
      const auto pieces_of_all = gather_object(std::vector<std::vector<int64_t>>{pieces});
      int64_t expected = 0;
      for (size_t i = 0; i < numels.size(); ++i) {
        const auto maker = i % static_cast<size_t>(support::world_size());
        expected += 2 * (numels[i] - pieces_of_all[maker][in_groups[i]]) * 4 * kSteps;
      }
      EXPECT_EQ(accelerator.reduce(torch::tensor(sent), "sum").item<int64_t>(), expected);
    }
  });
}

/// Their steps are on masters in fp32, as others' are.
RANKS_TEST(Zero, MuonAndLambOfTheFileHaveMasters, 1, 2, 3) {
  for (const auto& kind : muon_and_lamb())
    for (const char* precision : {"bf16", "fp16"}) {
      const auto type = precision[0] == 'b' ? at::kBFloat16 : at::kHalf;
      const auto alone = masters_alone(kind, type);
      support::on_both_stores([&](const std::string& store) {
        for (const int64_t number : {0, 1, 2, 3}) {
          SCOPED_TRACE(std::string(kind.section) + " in " + precision + " at stage " + std::to_string(number) + ", " +
                       store);
          support::reset_states();
          Accelerator accelerator(
              {.mixed_precision = precision,
               .cpu = true,
               .deepspeed_plugin = stage(number, kUnclipped + R"(, "fp16": {"enabled": "auto", "loss_scale": 64},
                  "zero_allow_untested_optimizer": true, "optimizer": )" +
                                                     kind.section)});
          ThreeLayers model;
          auto [m, opt] = accelerator.prepare(model, DummyOptim(model->parameters()));
          for (int64_t step = 0; step < kSteps; ++step)
            for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
              const auto scope = accelerator.accumulate(m);
              const auto batch = batch_of(step, micro, accelerator.process_index());
              accelerator.backward(loss_of(m(batch.to(type)).to(at::kFloat)));
              opt.step();
              opt.zero_grad();
            }
          std::vector<at::Tensor> ours;
          for (const auto& parameter : m->parameters()) ours.push_back(safe_get_full_fp32_param(parameter));
          // A gradient may be a unit of its 16 bits off; a step in 16 bits would be off by that of the parameter.
          expect_equal(ours, alone, type == at::kHalf ? 5e-3 : 2e-2);
          EXPECT_FALSE(at::equal(ours[0], ours[0].to(type).to(at::kFloat))) << "masters have more than 16 bits";
        }
      });
    }
}

namespace {

/// As users write one, by LibTorch's operators.
struct OfAUser : torch::optim::SGD {
  OfAUser(const std::vector<at::Tensor>& parameters, std::set<at::ScalarType>& types)
      : SGD(parameters, torch::optim::SGDOptions(0.1)), found(types) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = closure ? closure() : at::Tensor();
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined() && parameter.numel() > 0) {
          found.insert(parameter.grad().scalar_type());
          parameter.sub_(parameter.grad() * 0.1);
        }
    return loss;
  }
  std::set<at::ScalarType>& found;
};
struct OfAUserOnPieces : OfAUser, optim::ElementWise {
  using OfAUser::OfAUser;
};

template <class Optimizer>
std::set<at::ScalarType> types_of_gradients(int64_t number, const std::string& more, bool with_closure) {
  support::reset_states();
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(number, kUnclipped + more)});
  ThreeLayers model;
  std::set<at::ScalarType> found;
  auto [m, opt] = accelerator.prepare(model, std::make_shared<Optimizer>(model->parameters(), found));
  accelerator.set_sync_gradients(true);
  auto compute = [&, m = m, opt = opt]() mutable {
    opt.zero_grad();
    const at::Tensor loss = loss_of(m(batch_of(0, 0, accelerator.process_index()).to(at::kBFloat16)).to(at::kFloat));
    accelerator.backward(loss);
    return loss;
  };
  if (with_closure) {
    opt.step(compute);
  } else {
    compute();
    opt.step();
  }
  return found;
}

}  // namespace

// Gradients have 16 bits until the step, and masters have more: a product with a rate must not have 16 bits.
RANKS_TEST(Zero, OptimizersOfUsersGetGradientsInTheirMastersDtype, 1, 2) {
  const std::string checked = R"(, "bf16": {"enabled": true})",
                    unchecked = R"(, "bf16": {"enabled": true, "check_grad_overflow": false})";
  support::on_both_stores([&](const std::string& store) {
    for (const int64_t number : {0, 1, 2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(number) + ", " + store);
      const std::set wide{at::kFloat};
      EXPECT_EQ(types_of_gradients<OfAUser>(number, checked, false), wide);
      EXPECT_EQ(types_of_gradients<OfAUser>(number, unchecked, false), wide);
      EXPECT_EQ(types_of_gradients<OfAUser>(number, unchecked, true), wide);
      EXPECT_EQ(types_of_gradients<OfAUserOnPieces>(number, checked, false), wide);
      EXPECT_EQ(types_of_gradients<OfAUserOnPieces>(number, unchecked, false), wide);
    }
  });
}

/// As an average of losses that are so many times larger.
RANKS_TEST(Zero, GradientsMayBeSummed, 1, 2, 3) {
  support::on_both_stores([&](const std::string& store) {
    for (const int64_t number : {0, 1, 2}) {
      SCOPED_TRACE("stage " + std::to_string(number) + ", " + store);
      support::reset_states();
      Accelerator accelerator(
          {.cpu = true, .deepspeed_plugin = stage(number, kUnclipped + R"(, "gradient_allreduce_op": "sum")")});
      ThreeLayers model, alone;
      auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.02));
      train(accelerator, m, opt, 1);
      torch::optim::SGD sgd(alone->parameters(), 0.02);
      for (int64_t micro = 0; micro < kMicroSteps; ++micro)
        for (int64_t rank = 0; rank < support::world_size(); ++rank)
          (loss_of(alone(batch_of(0, micro, rank))) / static_cast<double>(kMicroSteps)).backward();
      sgd.step();
      std::vector<at::Tensor> ours;
      for (const auto& parameter : m->parameters()) ours.push_back(parameter.detach().clone());
      expect_equal(ours, alone->parameters(), 1e-6);
    }
  });
}

/// By samples of all ranks, on the main process alone.
RANKS_TEST(Zero, TheFilesMonitorsRecordEachStep, 1, 2) {
  const std::filesystem::path folder =
      std::filesystem::path(support::scratch_dir()) / ("monitors" + std::to_string(support::world_size()));
  const std::string path = folder.string();
  {
    Accelerator accelerator(
        {.cpu = true,
         .deepspeed_plugin = stage(2, R"(, "fp16": {"enabled": true, "initial_scale_power": 4, "auto_cast": true},
           "csv_monitor": {"enabled": true, "output_path": ")" +
                                          path + R"(", "job_name": "csv"},
           "tensorboard": {"enabled": true, "output_path": ")" +
                                          path + R"(", "job_name": "events"})")});
    ThreeLayers model;
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
    train(accelerator, m, opt, 2);
    accelerator.end_training();
  }
  if (support::rank() != 0) return;
  const int64_t samples = 4 * kMicroSteps * support::world_size();
  const auto lines = [&](const std::string& header, const std::string& value) {
    return "step," + header + "\r\n" + std::to_string(samples) + "," + value + "\r\n" + std::to_string(2 * samples) +
           "," + value + "\r\n";
  };
  EXPECT_EQ(text_of(folder / "csv/Train_Samples_lr.csv"), lines("lr", "0.25"));
  EXPECT_EQ(text_of(folder / "csv/Train_Samples_loss_scale.csv"), lines("loss_scale", "16"));
  EXPECT_THAT(text_of(folder / "csv/Train_Samples_train_loss.csv"), testing::StartsWith("step,train_loss\r\n"));
  std::string events;
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder / "events"))
    if (file.is_regular_file()) events += text_of(file.path());
  EXPECT_THAT(events, AllOf(HasSubstr("Train/Samples/lr"), HasSubstr("Train/Samples/loss_scale"),
                            HasSubstr("Train/Samples/train_loss")));
}

/// One that the fused kernels don't know, since it might step otherwise.
struct OwnSgd : torch::optim::SGD, optim::ElementWise {
  using torch::optim::SGD::SGD;
};

/// Each optimizer's step is as long as the file's limit, though the loss scale is doubled by the first one's: what the
/// second one's gradients are too large by is the old one. By kernels and without them.
RANKS_TEST(Zero, EachOptimizerIsClippedByTheScaleOfItsOwnGradients, 1, 2) {
  constexpr double kLimit = 0.1;
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    Accelerator accelerator(
        {.cpu = true,
         .deepspeed_plugin = stage(2, R"(, "gradient_clipping": 0.1, "fp16": {"enabled": true, "auto_cast": true,
           "initial_scale_power": 6, "loss_scale_window": 1})")});
    ThreeLayers model;
    const auto all = model->parameters();
    torch::optim::SGD fused({all[0], all[1]}, torch::optim::SGDOptions(1));
    OwnSgd own({all[2], all[3], all[4], all[5]}, torch::optim::SGDOptions(1));
    auto [m, first, second] = accelerator.prepare(model, fused, own);
    const auto masters = [&, &m = m] {
      std::vector<at::Tensor> values;
      for (const auto& parameter : m->parameters()) values.push_back(safe_get_full_fp32_param(parameter).clone());
      return values;
    };
    auto before = masters();
    const double scale = accelerator.scaler()->get_scale();
    for (int64_t step = 0; step < 4; ++step) {
      for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
        const auto scope = accelerator.accumulate(m);
        accelerator.backward(100 * loss_of(m(batch_of(step, micro, accelerator.process_index())).to(at::kFloat)));
        first.step(), second.step();
        first.zero_grad(), second.zero_grad();
      }
      const auto after = masters();
      const auto moved = [&](size_t from, size_t to) {
        double squares = 0;
        for (size_t i = from; i < to; ++i) squares += (after[i] - before[i]).square().sum().item<double>();
        return std::sqrt(squares);
      };
      EXPECT_NEAR(moved(0, 2), kLimit, 1e-3 * kLimit) << "step " << step;
      EXPECT_NEAR(moved(2, 6), kLimit, 1e-3 * kLimit) << "step " << step;
      before = after;
    }
    EXPECT_GT(accelerator.scaler()->get_scale(), scale);
  });
}

/// As plain fp32, but for what autocast and the wire round: Linear's gradients travel in half as many bytes.
RANKS_TEST(Zero, AutocastOfTheFile, 1, 2) {
  const auto plain = trained_alone(support::world_size(), 0);
  support::on_both_stores([&](const std::string& store) {
    for (const char* dtype : {"bfloat16", "float16"}) {
      SCOPED_TRACE(std::string(dtype) + ", " + store);
      std::vector<int64_t> bytes;
      for (const char* modules : {R"(["torch.nn.Linear"])", "[]"}) {
        support::reset_states();
        Accelerator accelerator({.cpu = true,
                                 .deepspeed_plugin = stage(2, kUnclipped + R"(, "torch_autocast": {"enabled": true,
              "lower_precision_safe_modules": )" + modules + R"(, "dtype": ")" +
                                                                  dtype + "\"}")});
        EXPECT_EQ(accelerator.scaler() != nullptr, std::string(dtype) == "float16");
        ThreeLayers model;
        auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
        counts::reset();
        train(accelerator, m, opt);
        bytes.push_back(counts::read(parallel::ShardingCount::gradient_wire_bytes));
        std::vector<at::Tensor> ours;
        for (const auto& parameter : m->parameters()) {
          EXPECT_EQ(parameter.scalar_type(), at::kFloat);
          ours.push_back(parameter.detach().clone());
        }
        expect_equal(ours, plain, 3e-2);  // 8 bits of bf16, in products of each of a few steps
      }
      EXPECT_EQ(2 * bytes[0], bytes[1]);
    }
  });
  support::reset_states();
  EXPECT_THAT(
      support::message_of<ConfigError>([] {
        Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(2, R"(, "torch_autocast": {"enabled": true,
                       "lower_precision_safe_modules": ["torch.nn.Linnear"]})")});
        accelerator.prepare(ThreeLayers());
      }),
      HasSubstr("did you mean Linear?"));
}

/// The arguments that wandb and comet are given; what their own code does with them is the trackers' tests.
TEST(Zero, TheFilesTrackersGetTheirArguments) {
  const auto settings = zero::read_settings(DeepSpeedConfig(R"({"train_micro_batch_size_per_gpu": 1,
    "wandb": {"enabled": true, "team": "us", "group": "g", "project": "p"},
    "comet": {"enabled": true, "samples_log_interval": 7, "workspace": "w", "api_key": "k", "mode": "create",
              "experiment_key": "e"}})"));
  const auto monitors = zero::monitors_of(settings);
  using Arguments = std::map<std::string, std::variant<bool, std::string>>;
  ASSERT_EQ(monitors.size(), 2u);
  EXPECT_EQ(monitors[0].tracker, "wandb");
  EXPECT_EQ(monitors[0].project_name, "p");
  EXPECT_EQ(monitors[0].arguments, (Arguments{{"entity", "us"}, {"group", "g"}}));
  EXPECT_EQ(monitors[1].tracker, "comet_ml");
  EXPECT_EQ(monitors[1].project_name, "deepspeed");
  EXPECT_EQ(monitors[1].every, 7);
  EXPECT_EQ(monitors[1].arguments,
            (Arguments{{"api_key", "k"}, {"experiment_key", "e"}, {"mode", "create"}, {"workspace", "w"}}));
  for (const auto& entry : settings.effective) EXPECT_THAT(entry.value, Not(testing::StrEq("k"))) << entry.key;
}

TEST(Zero, TheFilesLogLevelHolds) {
  const auto says = [](const std::string& level) {
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = stage(1, R"(, "log_level": ")" + level + "\"")});
    return std::pair(logs::enabled("accelerate.parallel", LogLevel::info),
                     logs::enabled("accelerate.parallel", LogLevel::warning));
  };
  EXPECT_EQ(says("debug"), std::pair(true, true));
  EXPECT_EQ(says("error"), std::pair(false, false));
  EXPECT_EQ(says("warning"), std::pair(false, true));
  logs::set_level("accelerate", LogLevel::notset);
}

namespace {

/// Buffers of the model itself and of a module in it, in another dtype than either training or fp32 for one of them.
struct WithBuffersImpl : torch::nn::Module {
  explicit WithBuffersImpl(at::ScalarType of_bias) {
    layer = register_module("layer", torch::nn::Linear(4, 4));
    router = register_module("router", std::make_shared<torch::nn::Module>());
    register_buffer("scale", torch::full({4}, 1.0009765625));
    register_buffer("table", torch::arange(4));
    router->register_buffer("gate_bias", torch::full({4}, 5.0).to(of_bias));
  }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
  std::shared_ptr<torch::nn::Module> router;
};
TORCH_MODULE(WithBuffers);

/// The dtypes of scale, table and router.gate_bias in training. @param of_bias  as the model has it
std::array<at::ScalarType, 3> buffer_dtypes(int64_t number, const std::string& more,
                                            at::ScalarType of_bias = at::kFloat,
                                            const std::optional<std::string>& version = std::nullopt) {
  support::reset_states();
  auto plugin = stage(number, more);
  plugin.as_of_version = version;
  Accelerator accelerator({.cpu = true, .deepspeed_plugin = plugin});
  WithBuffers model(of_bias);
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
  const auto buffers = m->named_buffers();
  return {buffers["scale"].scalar_type(), buffers["table"].scalar_type(), buffers["router.gate_bias"].scalar_type()};
}

}  // namespace

RANKS_TEST(Zero, BuffersAreCastAsTheFileSays, 1, 2) {
  using Dtypes = std::array<at::ScalarType, 3>;
  constexpr auto fp32 = at::kFloat, fp16 = at::kHalf, bf16 = at::kBFloat16, whole = at::kLong;
  const auto types = [](const std::string& members) { return R"(, "data_types": {)" + members + "}"; };
  const std::string all = R"("buffer_dtype": "bf16")", keep = R"("keep_in_fp32_modules": ["gate*bias"])";
  for (const int64_t number : {0, 1, 3})
    for (const std::string precision : {"fp16", "bf16"}) {
      SCOPED_TRACE(precision + ", stage " + std::to_string(number));
      const std::string low = ", \"" + precision + R"(": {"enabled": true})";
      const auto compute = precision == "fp16" ? fp16 : bf16;
      EXPECT_EQ(buffer_dtypes(number, low, fp16), (Dtypes{fp32, whole, fp16})) << "as the model has them";
      EXPECT_EQ(buffer_dtypes(number, low, fp32, "0.19.1"), (Dtypes{compute, whole, compute})) << "until 0.19.2";
      EXPECT_EQ(buffer_dtypes(number, low + types(all)), (Dtypes{bf16, whole, bf16}));
      EXPECT_EQ(buffer_dtypes(number, low + types(all + ", " + keep)), (Dtypes{bf16, whole, fp32}));
      EXPECT_EQ(buffer_dtypes(number, low + types(keep), fp16), (Dtypes{fp32, whole, fp32})) << "made wider, too";
      EXPECT_EQ(buffer_dtypes(number, low + types(all + R"(, "keep_in_fp32_modules": "auto")")),
                (Dtypes{bf16, whole, bf16}));
    }
  EXPECT_EQ(buffer_dtypes(1, types(all)), (Dtypes{fp32, whole, fp32})) << "as DeepSpeed, which casts fp32 nowhere";
  const auto said = support::warnings_of([&] {
    buffer_dtypes(1, R"(, "bf16": {"enabled": true})" + types(R"("keep_in_fp32_modules": ["gaet", "^scale$"])"));
  });
  EXPECT_EQ(said.find("'gaet', which matches no buffer") != std::string::npos, support::rank() == 0) << said;
  EXPECT_THAT(said, Not(HasSubstr("scale")));
  EXPECT_THAT(support::message_of<ConfigError>([&] {
                buffer_dtypes(1, R"(, "bf16": {"enabled": true})" + types(R"("keep_in_fp32_modules": ["(a"])"));
              }),
              AllOf(HasSubstr("'data_types.keep_in_fp32_modules' has '(a'"), HasSubstr("correct it")));
}

// Groups of other lengths than gradient_accumulation_steps, which the loss is divided by all the same.
RANKS_TEST(Zero, TheProgramDecidesAboutStepsWhereTheFileSays, 1, 2, 3) {
  const std::vector<int64_t> groups{1, 3, 2};
  const int64_t ranks = support::world_size();
  ThreeLayers alone;
  auto plain = with_momentum(alone->parameters());
  for (size_t step = 0; step < groups.size(); ++step) {
    plain.zero_grad();
    for (int64_t micro = 0; micro < groups[step]; ++micro)
      for (int64_t rank = 0; rank < ranks; ++rank)
        (loss_of(alone(batch_of(static_cast<int64_t>(step), micro, rank))) / static_cast<double>(ranks * 2)).backward();
    plain.step();
  }
  const std::filesystem::path folder = std::filesystem::path(support::scratch_dir()) / ("own" + std::to_string(ranks));
  support::on_both_stores([&](const std::string& store) {
    for (int64_t number = 0; number <= 3; ++number) {
      SCOPED_TRACE(store + ", stage " + std::to_string(number));
      support::reset_states();
      counts::reset();
      const std::filesystem::path here = folder / (store + std::to_string(number));
      Accelerator accelerator(
          {.cpu = true,
           .deepspeed_plugin = stage(number, kUnclipped + R"(, "managed_gradient_accumulation": false, "csv_monitor": {
             "enabled": true, "job_name": "csv", "output_path": ")" +
                                                 here.string() + "\"}")});
      ThreeLayers model;
      auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
      for (size_t step = 0; step < groups.size(); ++step) {
        for (int64_t micro = 0; micro < groups[step]; ++micro) {
          const auto scope = accelerator.accumulate(m);
          EXPECT_TRUE(accelerator.sync_gradients());
          accelerator.backward(loss_of(m(batch_of(static_cast<int64_t>(step), micro, accelerator.process_index()))));
        }
        opt.step();
        opt.zero_grad();
        EXPECT_EQ(opt.step_counts().taken, static_cast<int64_t>(step) + 1);
      }
      expect_equal(m->parameters(), alone->parameters(), 1e-5);
      const auto receipts = accelerator.receipts();
      EXPECT_EQ(receipts["gradient_accumulation_plugin.num_steps"].effect,
                "losses of 6 backwards were divided by 2; the program decided when to step, 3 times");
      EXPECT_THAT(receipts["gradient_accumulation_plugin.adjust_scheduler"].effect, HasSubstr("there are no groups"));
      accelerator.end_training();
      if (support::rank() != 0) continue;
      const auto line = [&](int64_t micro_steps) { return std::to_string(4 * ranks * micro_steps) + ",0.2\r\n"; };
      EXPECT_EQ(text_of(here / "csv/Train_Samples_lr.csv"), "step,lr\r\n" + line(1) + line(4) + line(6));
    }
  });
}

namespace {

/// Its second and third layers trade places.
struct InAnyOrderImpl : ThreeLayersImpl {
  at::Tensor forward(const at::Tensor& x) { return last(turned ? second(other(first(x))) : other(second(first(x)))); }
  torch::nn::Linear other = register_module("other", torch::nn::Linear(8, 8)),
                    last = register_module("last", torch::nn::Linear(8, 3));
  bool turned = false;
};
TORCH_MODULE(InAnyOrder);

}  // namespace

RANKS_TEST(Zero, AnOrderOfModulesThatBreaksIsTold, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    for (const bool asked : {true, false}) {
      support::reset_states();
      Accelerator accelerator(
          {.cpu = true,
           .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3,
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0, "log_trace_cache_warnings": )" +
                                                               std::string(asked ? "true" : "false") + "}}"}});
      InAnyOrder model;
      const support::Warnings heard;
      auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
      const auto said = [&, &m = m, &opt = opt](bool turned) {
        model->turned = turned;
        return support::warnings_of([&] { train(accelerator, m, opt, 2); });
      };
      const std::string broke = "the recorded order of modules broke: after 'first' came 'other', expected 'second'";
      const bool fetches = store == "shared memory 0", tells = asked && support::rank() == 0 && fetches;
      EXPECT_EQ(heard.text.find("log_trace_cache_warnings has no effect") != std::string::npos,
                asked && support::rank() == 0 && !fetches);
      EXPECT_THAT(said(false), Not(HasSubstr("recorded order"))) << "the first order is recorded";
      const auto changed = said(true);
      EXPECT_EQ(changed.find(broke) != std::string::npos, tells) << changed;
      EXPECT_EQ(changed.find(broke), changed.rfind(broke)) << "once";
      EXPECT_THAT(said(true), Not(HasSubstr("recorded order"))) << "the new one is, too";
      said(false);
      EXPECT_THAT(said(true), Not(HasSubstr(broke))) << "it was told of";
    }
  });
}

/// A device that need not be there: nothing may be asked of it for what goes to the host.
TEST(Zero, AShareOfTheMastersStaysOnTheDevice) {
  const at::Device gpu(at::kCUDA, 0);
  const auto weight = torch::zeros({4, 4});
  std::vector<parallel::ShardedPart> parts(4);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].index = i;
    parts[i].layout = residency::lay_out({weight}, 2);
    parts[i].members.push_back({.name = "weight", .tensor = weight, .shard = {}});
  }
  zero::ZeroSettings settings;
  settings.zero_optimization.stage = 3;
  settings.zero_optimization.overlap_comm = true;
  settings.zero_optimization.offload_optimizer.device = "cpu";
  settings.zero_optimization.offload_optimizer.pin_memory = settings.zero_optimization.offload_param.pin_memory = false;
  for (const double ratio : {1.0, 0.5, 0.0})
    for (const bool alone : {true, false}) {
      SCOPED_TRACE(std::to_string(ratio) + (alone ? ", alone" : ""));
      settings.zero_optimization.offload_optimizer.ratio = ratio;
      parallel::ShardGroups groups;
      if (!alone) groups.shard = comm::Group::join({.world_size = 2, .dry = std::make_shared<comm::TrafficCounter>()});
      const auto store = parallel::make_shard_store(parts, groups, gpu, parallel::settings_of(settings, 1));
      for (auto& part : parts) {
        const bool on_host = static_cast<double>(part.index) >= 4 * (1 - ratio);
        if (on_host || torch::cuda::is_available()) {
          store->allocate(part);
          EXPECT_EQ(part.master.is_cpu(), on_host) << part.index;
        } else {
          EXPECT_ANY_THROW(store->allocate(part)) << "memory on the device was asked for";
        }
      }
    }
}
