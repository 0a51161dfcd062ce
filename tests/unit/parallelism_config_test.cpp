// Cases that conformance's parallelism_config.json lacks: precedence, handlers, our own errors' texts, warnings,
// ranks outside of the mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/parallel/parallelism_config.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate;
using parallel::resolve;
using parallel::validate;
using support::message_of;
using support::Variable;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal(ParallelismConfig config) {
  return message_of<ConfigError>([&] { resolve(std::move(config)); });
}

TEST(ParallelismConfig, WhatTheProgramSetsWinsOverTheEnvironment) {
  const Variable shards("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8"), replicas("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2"),
      strategy("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall");
  const auto config = resolve(
      {.dp_shard_size = 4, .cp_size = 2, .cp_handler = TorchContextParallelConfig{.cp_comm_strategy = "allgather"}});
  EXPECT_EQ(config.total_size(), 16);
  EXPECT_EQ(config.cp_handler->cp_comm_strategy, "allgather");
  EXPECT_FALSE(config.tp_handler || config.sp_handler);
  EXPECT_TRUE(resolve({.tp_size = 2}).tp_handler);
}

TEST(ParallelismConfig, WrongValuesAreNamedWithTheirVariable) {
  EXPECT_THAT(refusal({.sp_size = 0}), AllOf(HasSubstr("sp_size is 0"), HasSubstr("PARALLELISM_CONFIG_SP_SIZE")));
  EXPECT_THAT(refusal({.cp_backend = "ring"}), HasSubstr("cp_backend is 'ring', expected torch"));
  EXPECT_THAT(refusal({.cp_size = 2, .sp_size = 3}), HasSubstr("cp_size is 2 and sp_size 3"));
  EXPECT_THAT(refusal({.dp_replicate_size = 2, .tp_size = 4}), HasSubstr("expected dp_shard_size above 1"));
  EXPECT_THAT(refusal({.dp_replicate_size = int64_t{1} << 40, .dp_shard_size = int64_t{1} << 40}),
              HasSubstr("that no job has"));
  EXPECT_THAT(
      refusal({.sp_size = 2, .sp_handler = DeepSpeedSequenceParallelConfig{.sp_attn_implementation = "flash-attn"}}),
      HasSubstr("sp_attn_implementation is 'flash-attn'"));
  EXPECT_THAT(refusal({.cp_handler = TorchContextParallelConfig{.cp_comm_strategy = "ring"}}),
              HasSubstr("cp_comm_strategy is 'ring'"));
  const Variable size("PARALLELISM_CONFIG_TP_SIZE", "two");
  EXPECT_THAT(refusal(ParallelismConfig{}), HasSubstr("PARALLELISM_CONFIG_TP_SIZE is 'two'"));
}

TEST(ParallelismConfig, FixedLengthsOfSequences) {
  const Variable fixed("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false");
  EXPECT_THAT(refusal({.sp_size = 2}), HasSubstr("PARALLELISM_CONFIG_SP_SEQ_LENGTH"));
  {
    const Variable none("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "None");
    EXPECT_FALSE(resolve({.sp_size = 2}).sp_handler->sp_seq_length);
  }
  EXPECT_EQ(resolve({.sp_size = 2, .sp_handler = DeepSpeedSequenceParallelConfig{.sp_seq_length = 64}})
                .sp_handler->sp_seq_length,
            64);
}

TEST(ParallelismConfig, RanksCountThroughTheMeshWithTheLastAxisFastest) {
  const auto config = resolve({.dp_replicate_size = 2, .dp_shard_size = 3, .tp_size = 2, .cp_size = 2});
  const auto mesh = config.mesh();
  EXPECT_THAT(mesh.dim_names, ElementsAre("dp_replicate", "dp_shard", "cp", "tp"));
  EXPECT_THAT(mesh.coordinates(17), ElementsAre(1, 1, 0, 1));
  EXPECT_EQ(mesh.coordinate(17, "dp_shard"), 1);
  EXPECT_EQ(mesh.coordinate(17, "sp"), 0);
  EXPECT_EQ(config.data_loader_process_index(17), 4);
  EXPECT_EQ(config.data_loader_num_processes(24), 6);
  EXPECT_THAT(message_of<ConfigError>([&] { mesh.coordinates(24); }), HasSubstr("rank 24 is outside"));
  EXPECT_THROW(mesh.coordinates(-1), ConfigError);
  EXPECT_TRUE(ParallelismConfig{}.mesh().coordinates(0).empty());
}

TEST(ParallelismConfig, DeepSpeedsSequenceParallelismHasNoMeshAndReadsByRank) {
  const auto config = resolve({.dp_shard_size = 2, .sp_size = 2});
  EXPECT_FALSE(config.uses_device_mesh());
  EXPECT_EQ(config.data_loader_process_index(3), 3);
  EXPECT_EQ(config.data_loader_num_processes(4), 4);
}

TEST(ParallelismConfig, FitsAJobOrSaysWhyNot) {
  const auto refused = [](ParallelismConfig config, const parallel::JobFacts& job) {
    return message_of<ConfigError>([&] { validate(resolve(std::move(config)), job); });
  };
  EXPECT_THAT(refused({.dp_replicate_size = 2, .dp_shard_size = 3}, {.num_processes = 4, .is_fsdp2 = true}),
              HasSubstr("found dp_replicate_size 2 * dp_shard_size 3 = 6, but the job has 4 processes"));
  EXPECT_THAT(refused({.dp_replicate_size = 4}, {.num_processes = 4, .is_fsdp2 = true}),
              HasSubstr("nothing to shard over"));
  EXPECT_THAT(refused({.dp_shard_size = 4}, {.num_processes = 4}), HasSubstr("set fsdp_version to 2"));
  EXPECT_EQ(validate(resolve(ParallelismConfig{}), {.num_processes = 4, .multi_device = true}).dp_replicate_size, 4);
  EXPECT_EQ(validate(resolve(ParallelismConfig{}), {.num_processes = 4, .is_fsdp2 = true}).dp_replicate_size, 1)
      << "sharded over all, as without it";
}

TEST(ParallelismConfig, HandlersOfUnusedAxesWarnOnRankZero) {
  support::Warnings warnings;
  const ParallelismConfig config = resolve(
      {.dp_replicate_size = 2, .tp_handler = TorchTensorParallelConfig{}, .cp_handler = TorchContextParallelConfig{}});
  validate(config, {.num_processes = 2, .multi_device = true});
  EXPECT_THAT(warnings.text, AllOf(HasSubstr("tp_handler is set, but tp_size is 1"), HasSubstr("cp_handler")));
  warnings.text.clear();
  const Variable rank("RANK", "1");
  validate(config, {.num_processes = 2, .multi_device = true});
  EXPECT_EQ(warnings.text, "");
}

}  // namespace
