// Cases that conformance's fsdp_plugin.json lacks: our own errors' texts, warnings, mixed precision as a struct,
// which strategy results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate;
using parallel::resolve;
using support::Variable;
using support::Warnings;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Plugin = FullyShardedDataParallelPlugin;

std::string refusal(Plugin plugin) {
  return support::message_of<ConfigError>([&] { resolve(std::move(plugin)); });
}

TEST(FsdpPlugin, AMistypedNameIsAnsweredWithTheValidOnesAndTheNearest) {
  EXPECT_THAT(support::message_of<ConfigError>([] { parse_sharding_strategy("FUL_SHARD"); }),
              AllOf(HasSubstr("'FUL_SHARD'"),
                    HasSubstr("FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"),
                    HasSubstr("number from 1 to 5"), HasSubstr("did you mean FULL_SHARD?")));
  EXPECT_THAT(support::message_of<ConfigError>([] { parse_auto_wrap_policy("1"); }),
              HasSubstr("TRANSFORMER_BASED_WRAP"));  // the reference takes no numbers here
  EXPECT_THROW(parse_backward_prefetch("3"), ConfigError);
  EXPECT_THROW(parse_sharding_strategy("0"), ConfigError);
  EXPECT_THROW(parse_state_dict_type(""), ConfigError);
  const Variable variable("FSDP_STATE_DICT_TYPE", "SHARED_STATE_DICT");
  EXPECT_THAT(refusal({}), AllOf(HasSubstr("FSDP_STATE_DICT_TYPE"), HasSubstr("did you mean SHARDED_STATE_DICT?")));
}

TEST(FsdpPlugin, NamesAreReadBack) {
  for (auto value : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard,
                     ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_zero2})
    EXPECT_EQ(parse_sharding_strategy(to_string(value)), value);
  for (auto value : {BackwardPrefetch::backward_pre, BackwardPrefetch::backward_post, BackwardPrefetch::no_prefetch})
    EXPECT_EQ(parse_backward_prefetch(to_string(value)), value);
  for (auto value :
       {StateDictType::full_state_dict, StateDictType::local_state_dict, StateDictType::sharded_state_dict})
    EXPECT_EQ(parse_state_dict_type(to_string(value)), value);
  for (auto value : {AutoWrapPolicy::transformer_based_wrap, AutoWrapPolicy::size_based_wrap, AutoWrapPolicy::no_wrap})
    EXPECT_EQ(parse_auto_wrap_policy(to_string(value)), value);
  EXPECT_EQ(parse_sharding_strategy("_hybrid_shard_zero2"), ShardingStrategy::hybrid_shard_zero2);
}

TEST(FsdpPlugin, WhatTheProgramSetsWinsOverTheEnvironment) {
  const Variable strategy("FSDP_SHARDING_STRATEGY", "NO_SHARD"), offload("FSDP_OFFLOAD_PARAMS", "true"),
      prefetch("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"), size("FSDP_MIN_NUM_PARAMS", "7"),
      classes("FSDP_TRANSFORMER_CLS_TO_WRAP", "A"), ignored("FSDP_IGNORED_MODULES", "a.*");
  const Plugin plugin = resolve({.sharding_strategy = ShardingStrategy::hybrid_shard,
                                 .backward_prefetch = BackwardPrefetch::no_prefetch,
                                 .auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
                                 .cpu_offload = false,
                                 .ignored_modules = "b.*",
                                 .min_num_params = 9});
  EXPECT_EQ(plugin.sharding_strategy, ShardingStrategy::hybrid_shard);
  EXPECT_EQ(plugin.backward_prefetch, BackwardPrefetch::no_prefetch);
  EXPECT_FALSE(plugin.cpu_offload->offload_params);
  EXPECT_EQ(std::get<std::string>(*plugin.ignored_modules), "b.*");
  EXPECT_EQ(plugin.min_num_params, 9);
  EXPECT_FALSE(plugin.transformer_cls_names_to_wrap);  // not this policy's
}

TEST(FsdpPlugin, ReshardAfterForwardMayBeANumberInTheEnvironment) {
  const auto found = [](const char* text) {
    const Variable environment("FSDP_RESHARD_AFTER_FORWARD", text);
    return *resolve({.fsdp_version = 2}).reshard_after_forward;
  };
  EXPECT_EQ(std::get<int64_t>(found("4")), 4);
  EXPECT_EQ(std::get<bool>(found("1")), true) << "a truth value, as everywhere";
  EXPECT_EQ(std::get<bool>(found("0")), false);
  EXPECT_EQ(std::get<bool>(found("false")), false);
}

TEST(FsdpPlugin, TheStrategyThatResults) {
  const auto effective = [](Plugin plugin) { return parallel::effective_strategy(resolve(std::move(plugin))); };
  EXPECT_EQ(effective({}), ShardingStrategy::full_shard);
  EXPECT_EQ(effective({.fsdp_version = 2}), ShardingStrategy::full_shard);
  EXPECT_EQ(effective({.fsdp_version = 2, .reshard_after_forward = false}), ShardingStrategy::shard_grad_op);
  EXPECT_EQ(effective({.fsdp_version = 2, .reshard_after_forward = 1}), ShardingStrategy::shard_grad_op);
  EXPECT_EQ(effective({.fsdp_version = 2, .reshard_after_forward = 4}), ShardingStrategy::full_shard);
  EXPECT_EQ(effective({.fsdp_version = 2, .dp_replicate_size = 2}), ShardingStrategy::hybrid_shard);
  EXPECT_EQ(effective({.fsdp_version = 2, .reshard_after_forward = false, .dp_shard_size = 4}),
            ShardingStrategy::hybrid_shard_zero2);
  EXPECT_EQ(effective({.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_replicate_size = 2}),
            ShardingStrategy::hybrid_shard);
  // The reference fills sharding_strategy with the default first and then forgets what was asked for.
  const Variable environment("FSDP_SHARDING_STRATEGY", "FULL_SHARD");
  EXPECT_EQ(effective({.fsdp_version = 1, .reshard_after_forward = ShardingStrategy::shard_grad_op}),
            ShardingStrategy::shard_grad_op);
}

TEST(FsdpPlugin, NumbersOfReplicasComeFromTheParallelismConfig) {
  const Variable replicas("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"), shards("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1");
  EXPECT_FALSE(resolve({.fsdp_version = 2}).dp_replicate_size);
  const Variable used("ACCELERATE_USE_PARALLELISM_CONFIG", "true");
  const Plugin plugin = resolve({.fsdp_version = 2});
  EXPECT_EQ(plugin.dp_replicate_size, 2);
  EXPECT_FALSE(plugin.dp_shard_size) << "1 is the launcher's default";
  EXPECT_FALSE(resolve({.fsdp_version = 2, .dp_shard_size = 4}).dp_replicate_size);
}

TEST(FsdpPlugin, CombinationsThatAVersionDoesNotHaveAreRefused) {
  EXPECT_THAT(refusal({.fsdp_version = 3}), HasSubstr("expected 1 or 2"));
  EXPECT_THAT(refusal({.fsdp_version = 2, .sharding_strategy = ShardingStrategy::shard_grad_op}),
              AllOf(HasSubstr("SHARD_GRAD_OP"), HasSubstr("reshard_after_forward as a bool")));
  EXPECT_THAT(refusal({.fsdp_version = 2, .reshard_after_forward = 0}), HasSubstr("reshard_after_forward is 0"));
  EXPECT_THAT(refusal({.fsdp_version = 1, .reshard_after_forward = 2}), HasSubstr("only fsdp_version 2"));
  EXPECT_THAT(refusal({.fsdp_version = 1,
                       .sharding_strategy = ShardingStrategy::no_shard,
                       .reshard_after_forward = ShardingStrategy::full_shard}),
              HasSubstr("give one of them"));
  EXPECT_THAT(refusal({.dp_replicate_size = 2}),
              AllOf(HasSubstr("FULL_SHARD has no replicas"), HasSubstr("HYBRID_SHARD")));
  EXPECT_THAT(refusal({.fsdp_version = 2, .dp_shard_size = 0}), HasSubstr("dp_shard_size is 0"));
  EXPECT_THAT(refusal({.fsdp_version = 2, .forward_prefetch = false}), HasSubstr("forward_prefetch"));
  EXPECT_THAT(refusal({.fsdp_version = 2, .activation_checkpointing_offload = true}), HasSubstr("set both"));
  EXPECT_THAT(refusal({.fsdp_version = 2, .state_dict_config = StateDictConfig{.rank0_only = true}}),
              HasSubstr("rank0_only"));
  EXPECT_THAT(refusal({.min_num_params = -1}), HasSubstr("min_num_params is -1"));
  EXPECT_THAT(refusal({.auto_wrap_policy = WrapFunction()}), HasSubstr("empty function"));
  const Variable number("FSDP_MIN_NUM_PARAMS", "1e8");
  EXPECT_THAT(refusal({.auto_wrap_policy = AutoWrapPolicy::size_based_wrap}),
              HasSubstr("FSDP_MIN_NUM_PARAMS is '1e8'"));
}

TEST(FsdpPlugin, SettingsWithoutEffectWarnOnRankZero) {
  const Plugin given{.fsdp_version = 2,
                     .sharding_strategy = ShardingStrategy::full_shard,
                     .reshard_after_forward = true,
                     .backward_prefetch = BackwardPrefetch::backward_pre,
                     .use_orig_params = false,
                     .sync_module_states = true};
  {
    Warnings warnings;
    const Plugin plugin = resolve(given);
    for (const char* field : {"sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states"})
      EXPECT_THAT(warnings.text, HasSubstr(std::string(field) + " has no effect"));
    EXPECT_FALSE(plugin.backward_prefetch || plugin.use_orig_params || plugin.sync_module_states);
  }
  {
    const Variable rank("RANK", "1");
    Warnings warnings;
    resolve(given);
    EXPECT_EQ(warnings.text, "");
  }
  Warnings warnings;
  resolve(Plugin{});
  resolve({.fsdp_version = 2});
  EXPECT_EQ(warnings.text, "");
  EXPECT_EQ(resolve({.sync_module_states = false, .cpu_ram_efficient_loading = true}).sync_module_states, true);
  EXPECT_THAT(warnings.text, HasSubstr("sync_module_states, because only rank 0 has values"));
}

TEST(FsdpPlugin, MixedPrecisionFieldsWinOverThePreset) {
  const auto first = *resolve({.mixed_precision_policy = MixedPrecision{.preset = "bf16", .reduce_dtype = at::kFloat}})
                          .mixed_precision_policy;
  EXPECT_EQ(first.param_dtype, at::kBFloat16);
  EXPECT_EQ(first.reduce_dtype, at::kFloat);
  EXPECT_EQ(first.buffer_dtype, at::kBFloat16);
  EXPECT_FALSE(first.output_dtype || *first.cast_forward_inputs);
  EXPECT_THAT(*first.module_classes_to_ignore, ::testing::Contains("BatchNorm2d"));
  const auto second = *resolve({.fsdp_version = 2, .mixed_precision_policy = MixedPrecision{.param_dtype = at::kHalf}})
                           .mixed_precision_policy;
  EXPECT_TRUE(*second.cast_forward_inputs);
  EXPECT_FALSE(second.reduce_dtype || second.output_dtype || second.module_classes_to_ignore);
  EXPECT_FALSE(resolve(Plugin{}).mixed_precision_policy);

  const auto refused = [](int64_t version, MixedPrecision policy) {
    return refusal({.fsdp_version = version, .mixed_precision_policy = std::move(policy)});
  };
  EXPECT_THAT(refused(1, {.preset = "bf61"}),
              AllOf(HasSubstr("fp8, fp16, bf16, fp32"), HasSubstr("did you mean bf16?")));
  EXPECT_THAT(refused(1, {.output_dtype = at::kHalf}), HasSubstr("output_dtype is set, but only fsdp_version 2"));
  EXPECT_THAT(refused(1, {.cast_forward_inputs = true}),
              AllOf(HasSubstr("cast_forward_inputs is true"), HasSubstr("cast_root_forward_inputs")));
  EXPECT_THAT(refused(2, {.buffer_dtype = at::kHalf}), HasSubstr("buffer_dtype is set, but only fsdp_version 1"));
  EXPECT_THAT(refused(2, {.keep_low_precision_grads = true}), HasSubstr("keep_low_precision_grads"));
  EXPECT_THAT(refused(2, {.cast_root_forward_inputs = false}), HasSubstr("cast_root_forward_inputs"));
  EXPECT_THAT(refused(2, {.module_classes_to_ignore = {{"A"}}}), HasSubstr("module_classes_to_ignore"));
  EXPECT_THAT(refused(1, {.param_dtype = at::kInt}), HasSubstr("dtype Int"));
  EXPECT_THROW(parallel::mixed_precision_policy("", 1), ConfigError);
}

TEST(FsdpPlugin, StateDictConfigsFollowTheType) {
  const Plugin sharded = resolve({.state_dict_type = StateDictType::sharded_state_dict});
  EXPECT_FALSE(*sharded.state_dict_config->rank0_only);
  EXPECT_TRUE(sharded.optim_state_dict_config->offload_to_cpu);
  EXPECT_THAT(refusal({.state_dict_type = StateDictType::sharded_state_dict,
                       .state_dict_config = StateDictConfig{.offload_to_cpu = false}}),
              AllOf(HasSubstr("state_dict_config has offload_to_cpu = false"), HasSubstr("SHARDED_STATE_DICT")));
  EXPECT_THAT(refusal({.state_dict_type = StateDictType::local_state_dict,
                       .optim_state_dict_config = StateDictConfig{.offload_to_cpu = false}}),
              HasSubstr("optim_state_dict_config has offload_to_cpu = false"));
  const Plugin full = resolve({.optim_state_dict_config = StateDictConfig{.rank0_only = false}});
  EXPECT_TRUE(*full.state_dict_config->rank0_only);
  EXPECT_FALSE(*full.optim_state_dict_config->rank0_only);
}

TEST(FsdpPlugin, ClassNamesAreSplitAtCommas) {
  const Variable classes("FSDP_TRANSFORMER_CLS_TO_WRAP", "A,b::B,C");
  EXPECT_THAT(*resolve({.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap}).transformer_cls_names_to_wrap,
              ElementsAre("A", "b::B", "C"));
}

TEST(FsdpPlugin, RequestedByTheEnvironment) {
  EXPECT_FALSE(parallel::fsdp_requested());
  for (const char* yes : {"true", "True", "1"}) {
    const Variable variable("ACCELERATE_USE_FSDP", yes);
    EXPECT_TRUE(parallel::fsdp_requested()) << yes;
  }
  const Variable no("ACCELERATE_USE_FSDP", "false");
  EXPECT_FALSE(parallel::fsdp_requested());
}

}  // namespace
