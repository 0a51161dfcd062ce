/// Training of one rank by nccl, and of two ranks on one GPU, whose tensors gloo carries.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>

#include "comm/backends/backend.hpp"
#include "comm/group.hpp"
#include "gpu.hpp"
#include "message_of.hpp"
#include "parallel/averaging/averaging.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/engines.hpp"
#include "ranks.hpp"
#include "residency/homes/shard.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;
using support::rank;
using testing::HasSubstr;

/// A group that consists of this process. An Accelerator alone makes none, so these tests go to what it would use.
class GpuGroupOfOne : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (on_gpu() && !comm::kNccl.available) GTEST_SKIP() << "this build has no nccl";
    const PartialState state;  // which chooses the device
    ASSERT_EQ(state.device(), device());
    group = comm::Group::join({.rank = 0,
                               .world_size = 1,
                               .backend = on_gpu() ? "nccl" : "gloo",
                               .master_addr = "127.0.0.1",
                               .master_port = support::free_port(),
                               .timeout = std::chrono::seconds(60),
                               .device = device()});
    comm::set_world_group(group);
  }
  void TearDown() override {
    if (support::is_rank()) return;  // which ends with its group, as programs do
    comm::set_world_group(nullptr);
    group.reset();
  }
  std::shared_ptr<comm::Group> group;
};

TEST_F(GpuGroupOfOne, EachCollectiveGivesItsArgument) {
  const auto x = numbers({3, 5}, 1);
  EXPECT_TRUE(same_bits(group->all_gather(x), x));
  EXPECT_TRUE(same_bits(group->all_gather(x > 0), x > 0)) << "bools travel as bytes";
  EXPECT_TRUE(same_bits(group->broadcast(x, 0), x));
  for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16, at::kLong}) {
    at::Tensor sum = (8 * x).to(type);
    const auto before = sum.clone();
    group->all_reduce_(sum, Reduction::sum);
    group->all_reduce_(sum, Reduction::max);
    EXPECT_TRUE(same_bits(sum, before)) << type;
  }
  group->barrier();
  EXPECT_THAT(comm::all_gather_bytes(*group, "a text"), testing::ElementsAre("a text"));
}

TEST_F(GpuGroupOfOne, FuturesAreWaitedForOnTheStream) {
  for (uint64_t i = 0; i < 20; ++i) {
    const auto x = numbers({1 << 16}, i);
    at::Tensor reduced = x.clone(), gathered = torch::zeros_like(x), scattered = torch::zeros_like(x);
    const auto one = group->all_reduce_async(reduced), two = group->all_gather_async(gathered, x);
    const auto three = group->reduce_scatter_async(scattered, x.clone());
    group->wait("a sum", *one);
    group->wait("a gather", *two);
    group->wait("a scatter", *three);
    EXPECT_TRUE(same_bits(reduced, x) && same_bits(gathered, x) && same_bits(scattered, x)) << i;
  }
}

/// c10d's Reducer with our hook: the average over one rank is its own gradient, rounded to what travels.
TEST_F(GpuGroupOfOne, DataParallelGradientsAreThoseOfThePlainModel) {
  for (const auto hook : {DDPCommunicationHookType::no, DDPCommunicationHookType::bf16}) {
    Mlp net(64, 4), plain(64, 4);
    net->to(device());
    plain->to(device());
    const ModelRef model(net.ptr());
    parallel::Averaging engine(model.parameters(), model.buffers(), {.comm_hook = hook}, {});
    const int64_t before = counts::of(parallel::AveragingCount::gradient_buckets);
    for (uint64_t step = 0; step < 4; ++step) {
      const auto x = numbers({16, 64}, step);
      engine.before_forward();
      const auto y = net(x);
      engine.after_forward({y});
      engine.leave_forward();
      const auto loss = loss_of(y);
      engine.before_backward(loss);
      parallel::guard_backward([&] { loss.backward(); });
      engine.after_backward();
      loss_of(plain(x)).backward();
      const auto found = gradients_of(*net), expected = gradients_of(*plain);
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_TRUE(same_bits(found[i], hook == DDPCommunicationHookType::no
                                            ? expected[i]
                                            : expected[i].to(at::kBFloat16).to(at::kFloat)))
            << "step " << step;
      net->zero_grad();
      plain->zero_grad();
    }
    EXPECT_GE(counts::of(parallel::AveragingCount::gradient_buckets) - before, 4) << "nothing was reduced";
  }
}

/// The whole of a unit comes from its shards, of which there is one, also if that lies in pinned memory on the host.
TEST_F(GpuGroupOfOne, ShardsBecomeWhole) {
  for (const bool on_host : {false, true})
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      at::Tensor shard = numbers({1 << 16}, 7, on_host ? at::Device(at::kCPU) : device());
      if (on_host && on_cuda()) shard = shard.pin_memory();
      const auto home = residency::shard_home(residency::in_memory(shard), group, nullptr, "unit");
      at::Tensor flat = torch::zeros({1 << 16}, at::TensorOptions().dtype(type).device(device()));
      home->fetch(flat)->wait();
      EXPECT_TRUE(same_bits(flat, shard.to(type)));
      flat.add_(1);
      home->store(flat);
      EXPECT_TRUE(same_bits(shard.to(type), flat));
    }
}

TEST_F(GpuGroupOfOne, ProcessesEndWellWithTheirGroup) {
  if (!support::is_rank())
    return support::expect_ranks_pass("GpuGroupOfOne.ProcessesEndWellWithTheirGroup",
                                      {.world_size = 1, .env = {{"ACCELERATE_USE_CPU", on_cuda() ? "false" : "true"}}});
  at::Tensor x = numbers({8}, 1);
  group->all_reduce_(x, Reduction::sum);
}

// ------------------------------------------------------------------------------------------------ one rank, sharded

struct Trained {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> weights;
};

Trained train_alone(const std::optional<FullyShardedDataParallelPlugin>& plugin) {
  start_again();
  Accelerator accelerator({.fsdp_plugin = plugin});
  Mlp net(64, 4);
  auto [m, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-3));
  Trained trained;
  for (uint64_t step = 0; step < 6; ++step) {
    const auto loss = loss_of(m(numbers({16, 64}, step)));
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    trained.losses.push_back(loss.item<double>());
  }
  trained.weights = accelerator.get_state_dict(m);
  return trained;
}

FullyShardedDataParallelPlugin layers_are_units(int64_t version, bool offload = false) {
  return {.fsdp_version = version,
          .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
          .cpu_offload = CPUOffload(offload),
          .transformer_cls_names_to_wrap = {{"Linear"}}};
}

class GpuSharding : public GpuTest {};

TEST_F(GpuSharding, OneRankTrainsAsWithoutIt) {
  const auto plain = train_alone({});
  for (const int64_t version : {1, 2}) {
    const auto sharded = train_alone(layers_are_units(version));
    EXPECT_EQ(sharded.losses, plain.losses) << "version " << version;
    for (const auto& [name, weight] : plain.weights) EXPECT_TRUE(same_bits(sharded.weights.at(name), weight)) << name;
  }
}

/// Masters, gradients and Adam's moments on the host. The optimizer's kernel there rounds otherwise, so the first loss
/// alone has the same bits.
TEST_F(GpuSharding, OneRankOffloadsParametersAndOptimizer) {
  const auto plain = train_alone({});
  residency::reset_stats();
  const auto offloaded = train_alone(layers_are_units(1, /*offload=*/true));
  EXPECT_EQ(offloaded.losses.front(), plain.losses.front());
  for (size_t i = 0; i < plain.losses.size(); ++i) EXPECT_NEAR(offloaded.losses[i], plain.losses[i], 1e-5);
  NEEDS_DEVICE("host memory is where everything is");
  EXPECT_GT(residency::stats().bytes_fetched, 6 * 4 * 4 * 64 * 64) << "each step fetches all layers";
}

// --------------------------------------------------------------------------------------------- two ranks on one GPU

class GpuTwoRanks : public GpuTest {};

/// The batch that both ranks have, and each one's half.
at::Tensor batch_of(uint64_t step) { return numbers({16, 64}, step); }
at::Tensor half_of(uint64_t step) { return batch_of(step).slice(0, 8 * rank(), 8 * (rank() + 1)); }

torch::optim::SGD momentum(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

TEST_F(GpuTwoRanks, DataParallelGradientsAreThoseOfOneProcess) {
  if (!support::is_rank()) return in_two_ranks();
  Accelerator accelerator({.kwargs_handlers = {kGlooGroup}});
  ASSERT_EQ(accelerator.device(), device());
  Mlp net(64, 4), alone(64, 4);
  alone->to(device());
  auto plain = momentum(alone->parameters());
  auto [m, optimizer] = accelerator.prepare(net, momentum(net->parameters()));
  for (uint64_t step = 0; step < 5; ++step) {
    accelerator.backward(loss_of(m(half_of(step))));
    loss_of(alone(batch_of(step))).backward();
    const auto found = gradients_of(*net), expected = gradients_of(*alone);
    // Sums over 16 rows, here of two sums over 8.
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(close(found[i], expected[i], 1e-5)) << "step " << step;
    optimizer.step();
    optimizer.zero_grad();
    plain.step();
    plain.zero_grad();
  }
  const auto weight = accelerator.gather(net->layers[0]->weight.detach().unsqueeze(0));
  EXPECT_TRUE(same_bits(weight[0], weight[1])) << "ranks must stay equal";
}

/// With and without masters on the host: then gradients must leave the device only after they were summed there.
TEST_F(GpuTwoRanks, ShardedTrainingIsThatOfOneProcess) {
  if (!support::is_rank()) return in_two_ranks();
  for (const bool offload : {false, true})
    for (const int64_t version : {1, 2}) {
      SCOPED_TRACE("version " + std::to_string(version) + (offload ? ", offloaded" : ""));
      start_again();
      Accelerator accelerator({.fsdp_plugin = layers_are_units(version, offload), .kwargs_handlers = {kGlooGroup}});
      Mlp net(64, 4), alone(64, 4);
      alone->to(device());
      auto plain = momentum(alone->parameters());
      auto [m, optimizer] = accelerator.prepare(net, momentum(net->parameters()));
      for (uint64_t step = 0; step < 5; ++step) {
        const auto loss = loss_of(m(half_of(step)));
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        const auto expected = loss_of(alone(batch_of(step)));
        expected.backward();
        plain.step();
        plain.zero_grad();
        EXPECT_TRUE(close(accelerator.reduce(loss.detach(), "mean"), expected, 1e-5)) << "step " << step;
      }
      {
        const auto whole = residency::summon(ModelRef(net.ptr()));
        const auto found = net->parameters(), expected = alone->parameters();
        for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(close(found[i], expected[i], 1e-5)) << i;
      }
    }
}

TEST_F(GpuTwoRanks, CollectivesOfDeviceTensors) {
  if (!support::is_rank()) return in_two_ranks();
  Accelerator accelerator({.kwargs_handlers = {kGlooGroup}});
  const auto mine = torch::full({2, 3}, static_cast<double>(rank() + 1), device());
  const auto all = accelerator.gather(mine);
  EXPECT_EQ(all.device(), device());
  EXPECT_TRUE(same_bits(all, torch::cat({torch::full({2, 3}, 1.0), torch::full({2, 3}, 2.0)})));
  EXPECT_TRUE(same_bits(accelerator.reduce(mine, "sum"), torch::full({2, 3}, 3.0)));
  EXPECT_TRUE(same_bits(broadcast(mine, 1), torch::full({2, 3}, 2.0)));
  const auto padded = accelerator.pad_across_processes(torch::ones({rank() + 1}, device()));
  EXPECT_EQ(padded.sizes(), at::IntArrayRef({2}));
  auto& group = *comm::world_group();
  at::Tensor received = torch::zeros({1000}, device());
  const auto sent = torch::full({1000}, 7.0, device());
  if (rank() == 0) {
    group.wait(*group.send(sent, 1));
  } else {
    group.receive_(received, 0);
    EXPECT_TRUE(same_bits(received, sent));
  }
}

/// A rank that waits for one that does not come is told what for, and for whom.
TEST_F(GpuTwoRanks, HangReportNamesTheCollective) {
  if (!support::is_rank()) return in_two_ranks();
  const PartialState state({.process_group = {.backend = "gloo", .timeout = std::chrono::seconds(10)}});
  ASSERT_EQ(state.device(), device());
  reduce(torch::ones({1}, device()));
  if (rank() == 1) {
    EXPECT_TRUE(support::heard("rank 0 gave up", 1, std::chrono::seconds(60)));
    return;
  }
  const auto text = support::message_of<CommError>([] { gather(torch::ones({1}, device())); });
  support::say("rank 0 gave up");
  EXPECT_THAT(text, HasSubstr("rank 1 has not arrived: it came out of collective 2 (reduce)"));
  EXPECT_THAT(text, HasSubstr("gather (collective 3"));
}

/// The first stage on the GPU, the second on the host. Values differ in rounding where the CPU computes.
TEST_F(GpuTwoRanks, PipelineOverGpuAndHost) {
  if (!support::is_rank()) return in_two_ranks();
  if (rank() == 1) ::setenv("ACCELERATE_TORCH_DEVICE", "cpu", 1);
  const PartialState state({.process_group = kGlooGroup});
  Mlp net(64, 4), whole(64, 4);
  net->eval();
  const at::NoGradGuard no_grad;
  const auto x = numbers({6, 64}, 1, at::kCPU);
  const auto pipeline = prepare_pippy(net, {.split_points = {"layer2"}, .gather_output = true}, x);
  EXPECT_EQ(net->layers[0]->weight.is_meta(), rank() == 1);
  EXPECT_EQ(net->layers[3]->weight.is_meta(), rank() == 0);
  EXPECT_TRUE(close(pipeline(x), whole(x), 1e-5));
}

}  // namespace
}  // namespace gpu_test
