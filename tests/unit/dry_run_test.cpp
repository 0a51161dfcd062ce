/// Jobs of many ranks, run dry, against the closed formulas of the ZeRO paper.

#include <accelerate/accelerate.hpp>
#include <accelerate/models/llama.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "message_of.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;
using models::LlamaConfig;
using models::LlamaForCausalLM;

LlamaConfig config_of(const std::string& name) {
  return LlamaConfig::from_pretrained(std::string(ACCELERATE_SOURCE_DIR) + "/examples/configs/" + name);
}

FullyShardedDataParallelPlugin plugin_of(ShardingStrategy strategy) {
  return {.fsdp_version = 1,
          .sharding_strategy = strategy,
          .backward_prefetch = BackwardPrefetch::backward_pre,
          .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
          .transformer_cls_names_to_wrap = {{"LlamaDecoderLayer"}}};
}

struct Outcome {
  DryRunReport report;
  ZeroShape shape;
};

/// Three steps with a few tokens, so that activations are small beside all else.
Outcome train(const LlamaConfig& config, ShardingStrategy strategy, int64_t ranks, int64_t rank = 0,
              const std::string& precision = "no", int64_t tokens = 1) {
  Outcome outcome;
  outcome.report = dry_run({.num_processes = ranks, .process_index = rank}, [&](const DryRunMark& mark) {
    Accelerator accelerator({.mixed_precision = precision,
                             .fsdp_plugin = plugin_of(strategy),
                             .kwargs_handlers = {DistributedDataParallelKwargs{.gradient_as_bucket_view = true}}});
    LlamaForCausalLM model = nullptr;
    {
      auto empty = init_empty_weights();
      model = LlamaForCausalLM(config);
    }
    auto plugin = plugin_of(strategy);
    if (precision != "no") plugin.mixed_precision_policy = MixedPrecision{.preset = precision};
    outcome.shape = zero_shape(ModelRef(model.ptr()), plugin, ranks);
    torch::optim::AdamW optimizer(model->parameters(), 1e-3);
    mark("build");
    auto [m, opt] = accelerator.prepare(model, optimizer);
    mark("prepare");
    const auto ids = torch::zeros({1, tokens}, torch::TensorOptions().dtype(at::kLong).device(accelerator.device()));
    for (int step = 0; step < 3; ++step) {
      auto loss = m(ids).to(at::kFloat).mean();
      mark("forward");
      accelerator.backward(loss);
      loss.reset();
      mark("backward");
      opt.step();
      mark("step");
      opt.zero_grad();
    }
  });
  return outcome;
}

int64_t volume_of_step(const DryRunReport& report) {
  return report.phase("forward").traffic.volume() + report.phase("backward").traffic.volume() +
         report.phase("step").traffic.volume();
}

int64_t sent_in_step(const DryRunReport& report) {
  return report.phase("forward").traffic.sent + report.phase("backward").traffic.sent +
         report.phase("step").traffic.sent;
}

std::string describe(const DryRunReport& report) {
  std::ostringstream text;
  for (const auto& phase : report.phases) {
    text << phase.name << ": peak " << phase.at_peak.total() << " end " << phase.at_end.total() << " volume "
         << phase.traffic.volume() << " (gather " << phase.traffic.all_gather << ", scatter "
         << phase.traffic.reduce_scatter << ", reduce " << phase.traffic.all_reduce << ") sent " << phase.traffic.sent
         << "\n   ";
    for (int use = 0; use < 6; ++use)
      text << " " << to_string(static_cast<MemoryUse>(use)) << " " << phase.at_end.bytes[use] << "/"
           << phase.peaks.bytes[use];
    text << "\n";
  }
  return text.str();
}

/// Within 2 %: what padding to equal shards and a few hundred bytes of control may add, and nothing more.
constexpr double kTolerance = 0.02;
::testing::Matcher<double> about(double expected) { return ::testing::DoubleNear(expected, kTolerance * expected); }

struct Job {
  std::string model;
  int64_t ranks;
};
class AgainstZero : public ::testing::TestWithParam<Job> {};

double number(int64_t bytes) { return static_cast<double>(bytes); }

/// 16 bytes of states per parameter over N, and three messages of all parameters in a step, less what backward finds
/// present.
TEST_P(AgainstZero, FullShard) {
  const auto [report, shape] = train(config_of(GetParam().model), ShardingStrategy::full_shard, GetParam().ranks);
  SCOPED_TRACE(describe(report));
  const auto zero = zero_estimate(ShardingStrategy::full_shard, shape);
  EXPECT_THAT(number(report.phase("step").at_end.model_states()),
              about(16.0 * number(shape.parameters) / number(GetParam().ranks)));
  EXPECT_THAT(number(report.phase("step").at_end.model_states()), about(number(zero.model_states)));
  EXPECT_EQ(zero.volume, 3 * 4 * shape.parameters);
  EXPECT_THAT(number(volume_of_step(report)), about(number(zero.volume - zero.volume_saved)));
  if (GetParam().model == "llama-3-70b") {
    EXPECT_THAT(number(volume_of_step(report)), about(number(zero.volume)))
        << "where the root is small, what is saved is within the tolerance";
  }
  EXPECT_THAT(number(sent_in_step(report)),
              about(number(zero.volume - zero.volume_saved) * (1 - 1.0 / number(GetParam().ranks))));
  // Whole parameters: two units and the root, and no more than that.
  for (const char* phase : {"forward", "backward"})
    EXPECT_THAT(number(report.phase(phase).peaks[MemoryUse::gathered]), about(number(zero.gathered))) << phase;
  // Formulas that are wrong by one term are far outside of the tolerance.
  EXPECT_THAT(number(report.phase("step").at_end.model_states()),
              ::testing::Not(about(12.0 * number(shape.parameters) / number(GetParam().ranks))));
  EXPECT_THAT(number(volume_of_step(report)), ::testing::Not(about(2 * 4.0 * number(shape.parameters))));
}

/// Parameters stay from forward to backward: one gather less.
TEST_P(AgainstZero, ShardGradOp) {
  const auto [report, shape] = train(config_of(GetParam().model), ShardingStrategy::shard_grad_op, GetParam().ranks);
  SCOPED_TRACE(describe(report));
  const auto zero = zero_estimate(ShardingStrategy::shard_grad_op, shape);
  EXPECT_THAT(number(report.phase("step").at_end.model_states()),
              about(16.0 * number(shape.parameters) / number(GetParam().ranks)));
  EXPECT_EQ(zero.volume, 2 * 4 * shape.parameters);
  EXPECT_THAT(number(volume_of_step(report)), about(number(zero.volume)));
  EXPECT_THAT(number(report.phase("forward").peaks[MemoryUse::gathered]), about(number(zero.gathered)));
  EXPECT_THAT(number(volume_of_step(report)), ::testing::Not(about(3 * 4.0 * number(shape.parameters))));
}

/// Nothing is sharded: 16 bytes per parameter whatever N is, and an all-reduce of the gradients.
TEST_P(AgainstZero, NoShard) {
  const auto [report, shape] = train(config_of(GetParam().model), ShardingStrategy::no_shard, GetParam().ranks);
  SCOPED_TRACE(describe(report));
  const auto zero = zero_estimate(ShardingStrategy::no_shard, shape);
  EXPECT_THAT(number(report.phase("step").at_end.model_states()), about(16.0 * number(shape.parameters)));
  EXPECT_THAT(number(report.phase("step").at_end.model_states()), about(number(zero.model_states)));
  EXPECT_THAT(number(report.phase("step").at_end.total()), about(16.0 * number(shape.parameters)))
      << "gradients are views of their buckets";
  EXPECT_THAT(number(volume_of_step(report)), about(2 * 4.0 * number(shape.parameters)));
}

/// In bf16 parameters and gradients travel in two bytes, and the shards keep four.
TEST_P(AgainstZero, FullShardInBf16) {
  const auto [report, shape] =
      train(config_of(GetParam().model), ShardingStrategy::full_shard, GetParam().ranks, 0, "bf16");
  SCOPED_TRACE(describe(report));
  const auto zero = zero_estimate(ShardingStrategy::full_shard, shape);
  EXPECT_THAT(number(report.phase("step").at_end.model_states()),
              about(16.0 * number(shape.parameters) / number(GetParam().ranks)));
  EXPECT_EQ(zero.volume, 3 * 2 * shape.parameters);
  EXPECT_THAT(number(volume_of_step(report)), about(number(zero.volume - zero.volume_saved)));
  EXPECT_THAT(number(report.phase("backward").peaks[MemoryUse::gathered]), about(number(zero.gathered)));
}

/// While the model is built and prepared a rank holds its shard and one parameter, the largest of which are the
/// embeddings.
TEST_P(AgainstZero, BuildingTakesTheShardAndOneParameter) {
  const auto config = config_of(GetParam().model);
  const auto [report, shape] = train(config, ShardingStrategy::full_shard, GetParam().ranks);
  SCOPED_TRACE(describe(report));
  EXPECT_EQ(report.phase("build").at_peak.total(), 0) << "without memory";
  const double shard = 4.0 * number(shape.parameters) / number(GetParam().ranks),
               one = 4.0 * number(config.vocab_size * config.hidden_size);
  EXPECT_THAT(number(report.phase("prepare").at_peak.total()), about(shard + one));
  EXPECT_THAT(number(report.phase("prepare").at_end.total()), about(shard));
}

INSTANTIATE_TEST_SUITE_P(Llama3, AgainstZero,
                         ::testing::Values(Job{"llama-3-8b", 8}, Job{"llama-3-8b", 64}, Job{"llama-3-8b", 1024},
                                           Job{"llama-3-70b", 8}, Job{"llama-3-70b", 64}, Job{"llama-3-70b", 1024}),
                         [](const auto& job) {
                           return (job.param.model == "llama-3-8b" ? "8B" : "70B") + std::string("_on_") +
                                  std::to_string(job.param.ranks);
                         });

LlamaConfig small() {
  LlamaConfig config;
  config.vocab_size = 100;
  config.hidden_size = 32;
  config.intermediate_size = 80;
  config.num_hidden_layers = 5;
  config.num_attention_heads = 4;
  return config;
}

TEST(DryRun, AllRanksHaveTheSameToDo) {
  const auto first = train(small(), ShardingStrategy::full_shard, 16).report,
             last = train(small(), ShardingStrategy::full_shard, 16, 15).report;
  EXPECT_EQ(last.process_index, 15);
  dry_run({.num_processes = 5, .process_index = 3},
          [](const DryRunMark&) { EXPECT_EQ(PartialState().process_index(), 3); });
  ASSERT_EQ(first.phases.size(), last.phases.size());
  for (size_t i = 0; i < first.phases.size(); ++i) {
    EXPECT_EQ(first.phases[i].traffic.volume(), last.phases[i].traffic.volume());
    EXPECT_EQ(first.phases[i].at_end[MemoryUse::parameters], last.phases[i].at_end[MemoryUse::parameters]);
    EXPECT_LE(last.phases[i].at_end.model_states(), first.phases[i].at_end.model_states())
        << "padding has neither gradients nor moments";
  }
}

TEST(DryRun, AloneNothingTravels) {
  const auto [report, shape] = train(small(), ShardingStrategy::full_shard, 1);
  EXPECT_EQ(volume_of_step(report), 0);
  EXPECT_EQ(report.phase("step").traffic.control, 0);
  EXPECT_THAT(number(report.phase("step").at_end[MemoryUse::optimizer]), about(8.0 * number(shape.parameters)));
}

TEST(DryRun, MoreTokensAreMoreActivationsAndNothingElse) {
  const auto few = train(small(), ShardingStrategy::full_shard, 4, 0, "no", 16).report,
             many = train(small(), ShardingStrategy::full_shard, 4, 0, "no", 32).report;
  EXPECT_GT(many.phase("forward").at_end[MemoryUse::other], 19 * few.phase("forward").at_end[MemoryUse::other] / 10);
  EXPECT_EQ(many.phase("step").at_end.model_states(), few.phase("step").at_end.model_states());
  EXPECT_EQ(volume_of_step(many), volume_of_step(few));
}

/// As with the fused kernels of accelerators: scores between all tokens would make it four times as much.
TEST(DryRun, AttentionKeepsNoScores) {
  const auto kept = [](int64_t tokens) {
    return train(small(), ShardingStrategy::full_shard, 4, 0, "no", tokens)
        .report.phase("forward")
        .at_end[MemoryUse::other];
  };
  EXPECT_LT(number(kept(2048)), 2.1 * number(kept(1024)));
}

/// Which units are fetched, prefetched and present at a time is the same as with real ranks, and so is every byte.
TEST(DryRun, UnitsComeAndGoAsInARealRun) {
  if (!support::is_rank()) {
    support::expect_ranks_pass(
        "DryRun.UnitsComeAndGoAsInARealRun",
        {.world_size = 2, .env = {{"ACCELERATE_SHARED_MEMORY", "0"}, {"ACCELERATE_USE_CPU", "1"}}});
    return;
  }
  const auto delta = [](const std::function<void()>& run) {
    residency::reset_stats();
    const auto before = residency::stats();
    run();
    auto after = residency::stats();
    after.peak_resident_bytes -= before.resident_bytes;
    return after;
  };
  const auto dry = delta([] { train(small(), ShardingStrategy::full_shard, 2, support::rank(), "no", 7); });
  const auto real = delta([] {
    Accelerator accelerator({.fsdp_plugin = plugin_of(ShardingStrategy::full_shard)});
    LlamaForCausalLM model(small());
    torch::optim::AdamW optimizer(model->parameters(), 1e-3);
    auto [m, opt] = accelerator.prepare(model, optimizer);
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(m(torch::zeros({1, 7}, at::kLong)).mean());
      opt.step();
      opt.zero_grad();
    }
  });
  EXPECT_GT(real.faults, 0);
  EXPECT_EQ(dry.faults, real.faults);
  EXPECT_EQ(dry.prefetch_hits, real.prefetch_hits);
  EXPECT_EQ(dry.evictions, real.evictions);
  EXPECT_EQ(dry.bytes_fetched, real.bytes_fetched);
  EXPECT_EQ(dry.peak_resident_bytes, real.peak_resident_bytes);
}

TEST(DryRun, GradientsTravelInBucketsOfTheSizeAskedFor) {
  const auto backward_of = [](int64_t bucket_cap_mb) {
    return dry_run(
               {.num_processes = 4},
               [&](const DryRunMark& mark) {
                 Accelerator accelerator(
                     {.kwargs_handlers = {DistributedDataParallelKwargs{.bucket_cap_mb = bucket_cap_mb}}});
                 torch::nn::Sequential net;  // 8 MB
                 for (int i = 0; i < 32; ++i)
                   net->push_back(torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false)));
                 auto model = accelerator.prepare(net);
                 const auto loss = model(torch::ones({1, 256}, at::TensorOptions().device(accelerator.device()))).sum();
                 mark("forward");
                 accelerator.backward(loss);
                 mark("backward");
               })
        .phase("backward")
        .traffic;
  };
  const auto small = backward_of(1), middle = backward_of(3), large = backward_of(25);
  EXPECT_EQ(small.volume(), large.volume()) << "the same gradients";
  EXPECT_EQ(small.messages - large.messages, 8 - 2) << "buckets of 1 MB; or a first one of 1 MB and one of the rest";
  EXPECT_EQ(middle.messages - large.messages, 4 - 2) << "1, 3, 3 and 1 MB";
}

TEST(DryRun, LeavesNothingBehind) {
  for (int round = 0; round < 2; ++round) {
    EXPECT_THROW(dry_run({.num_processes = 4},
                         [](const DryRunMark&) {
                           Accelerator accelerator;
                           EXPECT_EQ(accelerator.num_processes(), 4);
                           EXPECT_TRUE(accelerator.device().is_meta());
                           throw std::runtime_error("stop");
                         }),
                 std::runtime_error);
    EXPECT_FALSE(PartialState::initialized());
  }
  EXPECT_TRUE(torch::empty({3}, at::kMeta).is_meta()) << "the usual allocator is back";
}

TEST(DryRun, WhatCantBeIsAnErrorThatSaysWhy) {
  const auto nothing = [](const DryRunMark&) {};
  EXPECT_THAT(support::message_of<ConfigError>([&] { dry_run({.num_processes = 4, .process_index = 4}, nothing); }),
              ::testing::HasSubstr("process_index 4 of 4 processes"));
  const auto report = dry_run({.num_processes = 2}, [](const DryRunMark& mark) { mark("one"), mark("two"); });
  EXPECT_THAT(support::message_of<ConfigError>([&] { report.phase("three"); }),
              ::testing::HasSubstr("expected one of those that the program marked: one, two"));
  EXPECT_THAT(support::message_of<ConfigError>([&] { zero_estimate(ShardingStrategy::hybrid_shard, {}); }),
              ::testing::HasSubstr("HYBRID_SHARD"));
  const PartialState somebody;
  EXPECT_THAT(support::message_of<ConfigError>([&] { dry_run({.num_processes = 2}, nothing); }),
              ::testing::HasSubstr("this process knows already who it is"));
  PartialState::reset();
}

}  // namespace
