/// ParallelismConfig from the options (or the launcher's environment) to trained weights, and what Accelerator refuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "fsdp_of.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "small_gpt.hpp"
#include "variable.hpp"

namespace {

using namespace accelerate;
using support::Gpt;
using support::message_of;
using support::Variable;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kGlobalBatch = 12, kTokens = 9, kVocabulary = 61, kSteps = 6;

void reset() {
  AcceleratorState::reset();
  GradientState::reset();
}

at::Tensor batch_of(int64_t step) {
  return torch::randint(0, kVocabulary, {kGlobalBatch, kTokens},
                        at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step)), torch::kLong);
}

template <class Model> at::Tensor loss_of(Model& model, const at::Tensor& ids) {
  const auto logits = model(ids.narrow(1, 0, kTokens - 1));
  return torch::cross_entropy_loss(logits.reshape({-1, kVocabulary}), ids.narrow(1, 1, kTokens - 1).reshape({-1}));
}

Gpt make_gpt(int64_t seed = 11) {
  torch::manual_seed(seed);
  return Gpt();
}

struct Training {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> state;  ///< rank 0
};

Training train_plainly() {
  Training run;
  Gpt model = make_gpt();
  auto optimizer = support::make_adamw(model);
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto loss = loss_of(model, batch_of(step));
    loss.backward();
    run.losses.push_back(loss.item<double>());
    optimizer.step(), optimizer.zero_grad();
  }
  for (const auto& item : model->named_parameters()) run.state[item.key()] = item.value().detach().clone();
  return run;
}

/// `look` sees the accelerator and the prepared model before the first step.
template <class Look> Training train(AcceleratorOptions options, Look look) {
  reset();
  options.cpu = true;
  Accelerator accelerator(options);
  Training run;
  Gpt model = make_gpt(
      11 + support::rank());  // ranks begin as rank 0 only in data parallelism; sharding keeps what each rank brought
  if (accelerator.distributed_type() == DistributedType::FSDP) model = make_gpt();
  auto optimizer = support::make_adamw(model);
  auto [m, opt] = accelerator.prepare(model, optimizer);
  look(accelerator, m);
  const int64_t share = kGlobalBatch / support::world_size();
  for (int64_t step = 0; step < kSteps; ++step) {
    auto scope = accelerator.accumulate(m);
    const auto loss = loss_of(m, batch_of(step).narrow(0, support::rank() * share, share));
    accelerator.backward(loss);
    run.losses.push_back(accelerator.reduce(loss.detach(), "mean").template item<double>());
    opt.step(), opt.zero_grad();
  }
  run.state = accelerator.get_state_dict(m);
  return run;
}

/// Sums in another order keep losses within 1e-5 and, over six steps of AdamW, parameters within 1e-4 (a sign change of
/// a tiny gradient moves a weight by up to lr).
void expect_close(const Training& expected, const Training& run, const std::string& what) {
  ASSERT_EQ(expected.losses.size(), run.losses.size());
  for (size_t i = 0; i < run.losses.size(); ++i)
    EXPECT_NEAR(expected.losses[i], run.losses[i], 1e-5) << what << " step " << i;
  if (support::rank() != 0) return;
  for (const auto& [name, value] : expected.state)
    EXPECT_LT((run.state.at(name) - value).abs().max().item<double>(), 1e-4) << what << " " << name;
}

RANKS_TEST(Parallelism, ReplicasAreDataParallelism, 2, 4) {
  const int64_t n = support::world_size();
  const Training plain = train_plainly();
  const auto look = [n](const Accelerator& accelerator, const auto& m) {
    EXPECT_EQ(accelerator.parallelism_config()->dp_replicate_size, n);
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::MULTI_CPU);
    EXPECT_EQ(accelerator.data_parallel_rank(), support::rank());
    EXPECT_EQ(accelerator.data_parallel_shard_rank(), 0);
    EXPECT_TRUE(m.core()->engine && !support::fsdp_of(m));
  };
  expect_close(plain, train({.parallelism_config = ParallelismConfig{.dp_replicate_size = n}}, look),
               "dp_replicate_size");
  expect_close(plain, train({.parallelism_config = ParallelismConfig{}}, look), "no axis: a replica per process");
}

RANKS_TEST(Parallelism, ShardsAreShardingOverAllRanks, 2, 4) {
  const int64_t n = support::world_size();
  const Training plain = train_plainly();
  const auto look = [n](const Accelerator& accelerator, const auto& m) {
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::FSDP);
    EXPECT_EQ(accelerator.data_parallel_rank(), 0);
    EXPECT_EQ(accelerator.data_parallel_shard_rank(), support::rank());
    ASSERT_TRUE(support::fsdp_of(m));
    EXPECT_EQ(support::fsdp_of(m)->replica(), 0);
    int64_t held = 0, all = 0;
    for (const auto& piece : support::fsdp_of(m)->held()) held += piece.value.numel(), all += piece.whole.numel();
    EXPECT_LT(held, all / n + all / 10) << "each rank holds its part";
  };
  expect_close(plain, train({.parallelism_config = ParallelismConfig{.dp_shard_size = n}}, look), "without a plugin");
  expect_close(plain,
               train({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2, .reshard_after_forward = false},
                      .parallelism_config = ParallelismConfig{.dp_shard_size = n}},
                     look),
               "with a plugin");
}

RANKS_TEST(Parallelism, BothAreReplicasOfAShardedModel, 4) {
  const Training plain = train_plainly();
  const auto look = [](const Accelerator& accelerator, const auto& m) {
    EXPECT_EQ(accelerator.distributed_type(), DistributedType::FSDP);
    EXPECT_EQ(accelerator.data_parallel_rank(), support::rank() / 2);
    EXPECT_EQ(accelerator.data_parallel_shard_rank(), support::rank() % 2);
    EXPECT_EQ(accelerator.tensor_parallel_rank(), 0);
    ASSERT_TRUE(support::fsdp_of(m));
    EXPECT_EQ(support::fsdp_of(m)->replica(), support::rank() / 2);
  };
  expect_close(plain,
               train({.parallelism_config = ParallelismConfig{.dp_replicate_size = 2, .dp_shard_size = 2}}, look),
               "2 x 2");
}

TEST(Parallelism, TheLaunchersEnvironmentSaysTheSame) {
  if (!support::is_rank())
    return support::expect_ranks_pass("Parallelism.TheLaunchersEnvironmentSaysTheSame",
                                      {.world_size = 4,
                                       .env = {{"ACCELERATE_USE_PARALLELISM_CONFIG", "true"},
                                               {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"},
                                               {"PARALLELISM_CONFIG_DP_SHARD_SIZE", "2"},
                                               {"ACCELERATE_USE_FSDP", "true"},
                                               {"FSDP_VERSION", "2"}}});
  const Training plain = train_plainly();
  expect_close(plain,
               train({},
                     [](const Accelerator&, const auto& m) {
                       ASSERT_TRUE(support::fsdp_of(m));
                       EXPECT_EQ(support::fsdp_of(m)->replica(), support::rank() / 2);
                     }),
               "environment");
  // The program's configuration wins: no axis, and so no replicas of the sharded model.
  expect_close(plain,
               train({.parallelism_config = ParallelismConfig{.dp_replicate_size = 1, .dp_shard_size = 1}},
                     [](const Accelerator& accelerator, const auto& m) {
                       ASSERT_TRUE(support::fsdp_of(m));
                       EXPECT_EQ(support::fsdp_of(m)->replica(), 0);
                       EXPECT_EQ(accelerator.data_parallel_shard_rank(), 0);
                     }),
               "program");
}

RANKS_TEST(Parallelism, WhatDoesNotFitTheJobIsRefusedOnAllRanks, 2) {
  const auto refusal = [](AcceleratorOptions options) {
    reset();
    options.cpu = true;
    return message_of<ConfigError>([&] { Accelerator accelerator(options); });
  };
  EXPECT_THAT(refusal({.parallelism_config = ParallelismConfig{.dp_replicate_size = 2, .dp_shard_size = 2}}),
              HasSubstr("= 4, but the job has 2 processes"));
  EXPECT_THAT(refusal({.fsdp_plugin = FullyShardedDataParallelPlugin{},
                       .parallelism_config = ParallelismConfig{.dp_shard_size = 2}}),
              HasSubstr("set fsdp_version to 2"));
  EXPECT_THAT(refusal({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2},
                       .parallelism_config = ParallelismConfig{.dp_replicate_size = 2}}),
              HasSubstr("nothing to shard over"));
  EXPECT_THAT(refusal({.fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = 2, .dp_shard_size = 1},
                       .parallelism_config = ParallelismConfig{.dp_shard_size = 2}}),
              HasSubstr("fsdp_plugin.dp_shard_size is 1, but parallelism_config.dp_shard_size is 2"));
}

// ---- engines that are not here: alone, before any group is joined
// ------------------------------------------------------------------------------------------------------

std::string refusal(AcceleratorOptions options) {
  reset();
  options.cpu = true;
  return message_of<ConfigError>([&] { Accelerator accelerator(options); });
}

TEST(MissingEngines, MegatronAndAxes) {
  EXPECT_THAT(refusal({.megatron_lm_plugin = MegatronLMPlugin{}}), HasSubstr("Megatron-LM is a Python program"));
  EXPECT_THAT(refusal({.parallelism_config = ParallelismConfig{.tp_size = 2}}),
              HasSubstr("tp_size 2, but tensor parallelism is not in this version"));
  EXPECT_THAT(refusal({.parallelism_config = ParallelismConfig{.cp_size = 2}}), HasSubstr("cp_size 2, but context"));
  EXPECT_THAT(refusal({.parallelism_config = ParallelismConfig{.sp_size = 2}}), HasSubstr("sp_size 2, but sequence"));
  {
    const Variable use("ACCELERATE_USE_MEGATRON_LM", "true");
    EXPECT_THAT(refusal({}), HasSubstr("ACCELERATE_USE_MEGATRON_LM is true"));
  }
  const Variable use("ACCELERATE_USE_PARALLELISM_CONFIG", "true"), size("PARALLELISM_CONFIG_TP_SIZE", "4");
  EXPECT_THAT(refusal({}), HasSubstr("tp_size 4"));
}

TEST(MissingEngines, ACompilerIsRefusedWithWhatRunsCompiledModels) {
  EXPECT_THAT(refusal({.dynamo_backend = "INDUCTOR"}),
              AllOf(HasSubstr("AcceleratorOptions::dynamo_backend is inductor"), HasSubstr("expected no"),
                    HasSubstr("aoti_compile_and_package"), HasSubstr("CompiledModel"), HasSubstr("CudaGraphModel")));
  EXPECT_THAT(refusal({.dynamo_plugin = TorchDynamoPlugin{.backend = "aot_eager"}}),
              HasSubstr("AcceleratorOptions::dynamo_plugin has backend aot_eager"));
  EXPECT_THAT(refusal({.dynamo_backend = "indctor"}), HasSubstr("backend is 'indctor', expected one of no, eager"));
  EXPECT_THAT(refusal({.dynamo_backend = "no", .dynamo_plugin = TorchDynamoPlugin{}}),
              HasSubstr("dynamo_backend = no beside a dynamo_plugin"));
  // Before a group is joined: nobody is at that address, where it would wait.
  const Variable rank("RANK", "1"), world("WORLD_SIZE", "2"), address("MASTER_ADDR", "127.0.0.1"),
      port("MASTER_PORT", "9"), backend("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR");
  EXPECT_THAT(refusal({}), HasSubstr("ACCELERATE_DYNAMO_BACKEND is inductor"));
}

TEST(MissingEngines, SettingsOfACompilerThatDoesNotCompileAreKept) {
  reset();
  {
    const Variable backend("ACCELERATE_DYNAMO_BACKEND", "NO"), mode("ACCELERATE_DYNAMO_MODE", "max-autotune");
    const Accelerator accelerator({.cpu = true});
    EXPECT_EQ(accelerator.options().dynamo_plugin->backend, "no");
    EXPECT_EQ(accelerator.options().dynamo_plugin->mode, "max-autotune");
    EXPECT_EQ(accelerator.receipts()["launch.dynamo_mode"].state, ReceiptState::without_effect);
  }
  reset();
  const Variable backend("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR");
  const AcceleratorOptions options{.cpu = true, .dynamo_plugin = TorchDynamoPlugin{.fullgraph = true, .disable = true}};
  const Accelerator accelerator(options);
  EXPECT_EQ(accelerator.options().dynamo_plugin->backend, "inductor");
  EXPECT_EQ(accelerator.options().dynamo_plugin->fullgraph, true);
  EXPECT_FALSE(options.dynamo_plugin->backend) << "the program's own stays as it was";
  const auto receipts = accelerator.receipts();
  EXPECT_EQ(receipts["launch.dynamo_backend"].effect, "disabled: models run as they are");
  EXPECT_EQ(receipts["launch.dynamo_use_fullgraph"].source, "call");
}

TEST(Parallelism, OneProcessIsTheSameProgram) {
  reset();
  Accelerator accelerator({.cpu = true, .parallelism_config = ParallelismConfig{}});
  EXPECT_EQ(accelerator.data_parallel_rank(), 0);
  EXPECT_EQ(accelerator.parallelism_config()->total_size(), 1);
  reset();
  Accelerator without({.cpu = true});
  EXPECT_FALSE(without.parallelism_config());
  EXPECT_THAT(message_of<ConfigError>([&] { without.data_parallel_rank(); }),
              HasSubstr("expected AcceleratorOptions::parallelism_config"));
}

}  // namespace
