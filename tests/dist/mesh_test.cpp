#include "comm/mesh.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/accelerate.hpp"
#include "comm/dry_process_group.hpp"
#include "comm/group.hpp"
#include "message_of.hpp"
#include "parallel/engines.hpp"
#include "ranks.hpp"

using namespace accelerate;
using comm::Axis;
using comm::Mesh;
using support::message_of;
using support::rank;
using testing::ElementsAre;
using testing::HasSubstr;

namespace {

std::vector<int64_t> ranks_of(const std::shared_ptr<comm::Group>& group) {
  return group ? group->global_ranks() : std::vector<int64_t>{};
}

}  // namespace

TEST(Mesh, ARankAloneHasOnePlaceOnEveryAxis) {
  const Mesh alone;
  EXPECT_EQ(alone.size(comm::kTokens), 1);
  EXPECT_EQ(alone.place(comm::kTokens), 0);
  EXPECT_EQ(alone.along(comm::kTokens), nullptr);
  EXPECT_THAT(message_of<ConfigError>([] {
                Mesh(nullptr, {{Axis::tp, 2}});
              }),
              HasSubstr("found the axes tp 2, expected sizes whose product is the job's 1 ranks"));
  EXPECT_THAT(message_of<ConfigError>([] { Mesh(nullptr, {{Axis::tp, 0}}); }), HasSubstr("1 at least"));
  EXPECT_THAT(message_of<ConfigError>([] {
                Mesh(nullptr, {{Axis::dp_replicate, int64_t{1} << 62}, {Axis::tp, int64_t{1} << 62}});
              }),
              HasSubstr("1 at least"));
}

RANKS_TEST(Mesh, GroupsAreOfRanksThatDifferInTheirAxesOnly, 6) {
  const PartialState state;
  EXPECT_EQ(ranks_of(comm::mesh().along(comm::kSamples)).size(), 6u) << "until an Accelerator says otherwise";
  const Mesh mesh(comm::world_group(), {{Axis::dp_replicate, 1}, {Axis::dp_shard, 3}, {Axis::tp, 2}});
  EXPECT_EQ(mesh.size({Axis::tp}), 2);
  EXPECT_EQ(mesh.size({Axis::dp_replicate}), 1);
  EXPECT_EQ(mesh.place({Axis::tp}), rank() % 2);
  EXPECT_EQ(mesh.place({Axis::dp_shard}), rank() / 2);
  EXPECT_EQ(mesh.place(comm::kSamples, 5), 2);
  const int64_t first = rank() / 2 * 2, column = rank() % 2;
  EXPECT_THAT(ranks_of(mesh.along({Axis::tp})), ElementsAre(first, first + 1));
  EXPECT_THAT(ranks_of(mesh.along(comm::kTokens)), ElementsAre(column, column + 2, column + 4));
  EXPECT_EQ(mesh.along(comm::kTokens), mesh.along({Axis::dp_shard})) << "the same ranks, one group";
  EXPECT_EQ(mesh.along({Axis::pp}), nullptr);
  EXPECT_EQ(mesh.along(comm::kTokens | comm::Axes{Axis::tp}), mesh.all());
  at::Tensor sum = torch::full({1}, rank(), torch::kLong);
  mesh.along(comm::kTokens)->all_reduce_(sum, Reduction::sum);
  EXPECT_EQ(sum.item<int64_t>(), 6 + 3 * column);
  EXPECT_THAT(message_of<ConfigError>([] {
                Mesh(comm::world_group(), {{Axis::dp_shard, 3}, {Axis::dp_shard, 2}});
              }),
              HasSubstr("dp_shard twice"));
}

RANKS_TEST(Mesh, ExpertsSeeTheSameRanksOtherwise, 8) {
  const PartialState state;
  const Mesh mesh(comm::world_group(), {{Axis::pp, 2}, {Axis::dp_shard, 2}, {Axis::cp, 2}});
  const Mesh experts = mesh.folded({Axis::dp_shard, Axis::cp}, {{Axis::dp_shard, 1}, {Axis::ep, 4}});
  const int64_t stage = rank() / 4 * 4;
  EXPECT_EQ(experts.place({Axis::ep}), rank() % 4);
  EXPECT_EQ(experts.place({Axis::pp}), rank() / 4);
  EXPECT_THAT(ranks_of(experts.along({Axis::ep})), ElementsAre(stage, stage + 1, stage + 2, stage + 3));
  EXPECT_THAT(message_of<ConfigError>([&] {
                mesh.folded({Axis::pp, Axis::cp}, {{Axis::ep, 4}});
              }),
              HasSubstr("expected axes beside each other"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                mesh.folded({Axis::cp}, {{Axis::ep, 4}});
              }),
              HasSubstr("as many ranks in both"));
}

RANKS_TEST(Mesh, IsTheFirstAcceleratorsLayout, 4) {
  {
    const Accelerator accelerator({.cpu = true});
    EXPECT_THAT(comm::mesh().sizes(), ElementsAre(comm::AxisSize{Axis::dp_replicate, 4}));
  }
  AcceleratorState::reset();
  FullyShardedDataParallelPlugin pairs;
  pairs.fsdp_version = 2;
  pairs.dp_replicate_size = 2;
  const Accelerator accelerator({.cpu = true, .fsdp_plugin = pairs});
  EXPECT_THAT(comm::mesh().sizes(),
              ElementsAre(comm::AxisSize{Axis::dp_replicate, 2}, comm::AxisSize{Axis::dp_shard, 2}));
  const Accelerator second({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{}});
  EXPECT_EQ(comm::mesh().size({Axis::dp_shard}), 2) << "the first one's";
}

TEST(Mesh, WhatTheAxesLeaveOverReadsOtherSamples) {
  const auto eight = comm::Group::join({.world_size = 8, .dry = std::make_shared<comm::TrafficCounter>()});
  const Mesh mesh(eight, parallel::axes_of(parallel::resolve({.cp_size = 2}), 8));
  EXPECT_EQ(mesh.size(comm::kSamples), 4);
  EXPECT_EQ(mesh.size(comm::kTokens), 8);
}
