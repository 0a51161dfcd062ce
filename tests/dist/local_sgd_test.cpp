// LocalSGD and its outer optimizer against the same written out in one process.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::HasSubstr;

namespace {

constexpr int64_t kRows = 4;

torch::Tensor rows(int64_t step, int64_t r) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(500 + 10 * step + r));
  return torch::randn({kRows, 6}, generator);
}
torch::Tensor loss_of(const torch::Tensor& output) { return (output - 0.3).pow(2).mean(); }
torch::nn::Sequential net_of() {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net[0]->as<torch::nn::Linear>()->bias.set_requires_grad(false);
  return net;
}
std::vector<torch::Tensor> trained(const torch::nn::Sequential& net) {
  std::vector<torch::Tensor> all;
  for (auto& parameter : net->parameters())
    if (parameter.requires_grad()) all.push_back(parameter);
  return all;
}
torch::optim::SGD sgd(const torch::nn::Sequential& net) {
  return torch::optim::SGD(trained(net), torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// The parameters that `replicas` models have after each step; replica k learns from the ranks that `of` says.
std::vector<std::vector<torch::Tensor>> simulate(int64_t steps, int64_t replicas, int64_t ranks,
                                                 const LocalSGDOptions& options, int64_t mine) {
  std::vector<torch::nn::Sequential> nets;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  for (int64_t k = 0; k < replicas; ++k) {
    nets.push_back(net_of());
    optimizers.push_back(std::make_unique<torch::optim::SGD>(sgd(nets.back())));
  }
  torch::NoGradGuard outside;
  std::vector<torch::Tensor> common, velocity;
  for (const auto& parameter : trained(nets[0])) {
    common.push_back(parameter.clone());
    velocity.push_back(torch::zeros_like(parameter));
  }
  const auto meet = [&] {
    for (size_t i = 0; i < common.size(); ++i) {
      auto mean = torch::zeros_like(common[i]);
      for (const auto& net : nets) mean += trained(net)[i] / static_cast<double>(replicas);
      if (const auto& outer = options.outer_optimizer) {
        const auto way = common[i] - mean;
        velocity[i] = velocity[i] * outer->momentum + way;
        mean = common[i] - outer->lr * (outer->nesterov ? way + outer->momentum * velocity[i] : velocity[i]);
      }
      common[i] = mean;
      for (const auto& net : nets) trained(net)[i].copy_(mean);
    }
  };
  std::vector<std::vector<torch::Tensor>> history;
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t k = 0; k < replicas; ++k) {
      torch::AutoGradMode grad(true);
      const int64_t share = ranks / replicas;
      for (int64_t r = k * share; r < (k + 1) * share; ++r)
        (loss_of(nets[static_cast<size_t>(k)]->forward(rows(step, r))) / static_cast<double>(share)).backward();
      optimizers[static_cast<size_t>(k)]->step();
      optimizers[static_cast<size_t>(k)]->zero_grad();
    }
    if ((step + 1) % options.local_sgd_steps == 0 || step + 1 == steps) meet();
    history.emplace_back();
    for (const auto& parameter : trained(nets[static_cast<size_t>(mine)])) history.back().push_back(parameter.clone());
  }
  return history;
}

const LocalSGDOptions kCases[] = {
    {.local_sgd_steps = 3},
    {.local_sgd_steps = 3, .outer_optimizer = OuterOptimizer{}},
    {.local_sgd_steps = 2, .outer_optimizer = OuterOptimizer{.lr = 0.5, .momentum = 0.5, .nesterov = false}},
};

void compare(Accelerator& accelerator, int64_t replicas, const LocalSGDOptions& options) {
  constexpr int64_t kSteps = 8;
  const int64_t mine = rank() / (world_size() / replicas);
  const auto expected = simulate(kSteps, replicas, world_size(), options, mine);
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  const auto check = [&](int64_t step) {
    const auto held = residency::summon(net);
    const auto found = trained(net);
    for (size_t i = 0; i < found.size(); ++i)
      ASSERT_LE((found[i] - expected[static_cast<size_t>(step)][i]).abs().max().item<double>(), 2e-6)
          << "after step " << step << ", parameter " << i;
  };
  {
    LocalSGD local_sgd(accelerator, model, options);
    EXPECT_TRUE(local_sgd.enabled());
    for (int64_t step = 0; step < kSteps; ++step) {
      accelerator.backward(loss_of(model(rows(step, rank()))));
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
      if (step + 1 < kSteps) check(step);
    }
    EXPECT_EQ(local_sgd.num_steps(), kSteps);
  }
  check(kSteps - 1);
  // And together again.
  accelerator.backward(loss_of(model(rows(99, rank()))));
  optimizer.zero_grad();
}

}  // namespace

RANKS_TEST(LocalSgd, EqualsTheSameWrittenOut, 2, 3) {
  for (const auto& options : kCases) {
    Accelerator accelerator({.cpu = true});
    compare(accelerator, world_size(), options);
  }
}

RANKS_TEST(LocalSgd, ShardGroupsTrainApart, 4) {
  for (const bool shared : {true, false}) {
    if (!shared) setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
    for (const auto& options : kCases) {
      Accelerator accelerator({.cpu = true,
                               .fsdp_plugin = FullyShardedDataParallelPlugin{
                                   .sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 2}});
      compare(accelerator, 2, options);
    }
  }
}

RANKS_TEST(LocalSgd, AccumulatesAndClipsByItself, 2) {
  Accelerator accelerator({.gradient_accumulation_steps = 2, .cpu = true});
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  LocalSGD local_sgd(accelerator, model, 100);
  for (int64_t step = 0; step < 2; ++step) {
    auto scope = accelerator.accumulate(model);
    accelerator.backward(loss_of(model(rows(step, rank()))));
    if (accelerator.sync_gradients()) {
      const auto norms = accelerator.gather(accelerator.clip_grad_norm_(trained(net), 1e9).view({1}));
      EXPECT_NE(norms[0].item<float>(), norms[1].item<float>()) << "gradients were averaged";
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  local_sgd.finish();
  EXPECT_FALSE(local_sgd.enabled());
  const auto all = accelerator.gather(net->parameters()[0].detach().unsqueeze(0));
  EXPECT_TRUE(all[0].equal(all[1]));
}

RANKS_TEST(LocalSgd, ShardGroupsHaveNormsOfTheirOwn, 4) {
  Accelerator accelerator({.cpu = true,
                           .fsdp_plugin = FullyShardedDataParallelPlugin{
                               .sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 2}});
  auto net = net_of(), plain = net_of();
  const int64_t first = rank() / 2 * 2;
  for (const int64_t r : {first, first + 1}) (loss_of(plain->forward(rows(0, r))) / 2.0).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(trained(plain), 1e9);
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  LocalSGD local_sgd(accelerator, model, 100);
  accelerator.backward(loss_of(model(rows(0, rank()))));
  EXPECT_NEAR(accelerator.clip_grad_norm_(trained(net), 1e9).item<double>(), expected, 1e-5 * expected);
  optimizer.zero_grad();
  local_sgd.finish();
}

// Momentum that each replica had by itself would drive those apart that train together from there on. The first one's
// goes on, also where it sits in pieces.
RANKS_TEST(LocalSgd, ReplicasStayTheSameWhenItHasEnded, 4) {
  for (const bool sharded : {false, true}) {
    AcceleratorOptions asked{.cpu = true};
    if (sharded)
      asked.fsdp_plugin =
          FullyShardedDataParallelPlugin{.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 2};
    const int64_t replicas = sharded ? 2 : 4, share = 4 / replicas;
    Accelerator accelerator(asked);
    auto net = net_of();
    auto [model, optimizer] = accelerator.prepare(net, sgd(net));
    // The momentum of the first replica, whose ranks are the first ones, written out.
    auto plain = net_of();
    auto plainly = sgd(plain);
    {
      LocalSGD local_sgd(accelerator, model, 100);
      for (int64_t step = 0; step < 2; ++step) {
        accelerator.backward(loss_of(model(rows(step, rank()))));
        optimizer.step();
        optimizer.zero_grad();
        for (int64_t r = 0; r < share; ++r)
          (loss_of(plain->forward(rows(step, r))) / static_cast<double>(share)).backward();
        plainly.step();
        plainly.zero_grad();
        local_sgd.step();
      }
    }
    {
      const auto held = residency::summon(net);
      const torch::NoGradGuard no_grad;
      const auto from = trained(net), to = trained(plain);
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    for (int64_t step = 2; step < 6; ++step) {
      accelerator.backward(loss_of(model(rows(step, rank()))));
      optimizer.step();
      optimizer.zero_grad();
      for (int64_t r = 0; r < 4; ++r) (loss_of(plain->forward(rows(step, r))) / 4.0).backward();
      plainly.step();
      plainly.zero_grad();
    }
    const auto held = residency::summon(net);
    const auto found = trained(net), expected = trained(plain);
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_LE((found[i] - expected[i]).abs().max().item<double>(), 2e-6) << (sharded ? "sharded " : "whole ") << i;
      const auto all = accelerator.gather(found[i].detach().unsqueeze(0));
      for (int64_t r = 1; r < 4; ++r) EXPECT_TRUE(all[0].equal(all[r])) << (sharded ? "sharded " : "whole ") << i;
    }
  }
}

// Averages over replicas that it had begun would be taken for those of the next backward of all.
RANKS_TEST(LocalSgd, ABackwardThatThrewBeforeItLeavesNothing, 2) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true,
         .deepspeed_plugin = DeepSpeedPlugin{
             .hf_ds_config =
                 R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": {"stage": 0}})"}});
    auto net = net_of();
    auto [model, optimizer] = accelerator.prepare(net, sgd(net));
    struct OutOfLuck {};
    const auto& first = net[0]->as<torch::nn::Linear>()->weight;
    const auto hook = first.register_hook([](const torch::Tensor&) { throw OutOfLuck(); });
    EXPECT_THROW(accelerator.backward(loss_of(model(rows(0, rank())))), OutOfLuck);
    first.remove_hook(hook);
    optimizer.zero_grad();
    auto step = [&, model = model, optimizer = optimizer](int64_t number) mutable {
      accelerator.backward(loss_of(model(rows(number, rank()))));
      optimizer.step();
      optimizer.zero_grad();
    };
    {
      LocalSGD local_sgd(accelerator, model, 1);
      step(1);
      local_sgd.step();
    }
    step(2);
    for (const auto& parameter : trained(net)) {
      const auto all = accelerator.gather(parameter.detach().clone().unsqueeze(0));
      EXPECT_TRUE(all[0].equal(all[1]));
    }
  });
}

RANKS_TEST(LocalSgd, OffItChangesNothing, 2) {
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 2, .enabled = false});
  accelerator.backward(loss_of(model(rows(0, rank()))));
  const auto all = accelerator.gather(net->parameters()[0].grad().unsqueeze(0));
  EXPECT_TRUE(all[0].equal(all[1]));
  EXPECT_FALSE(local_sgd.enabled());
}

RANKS_TEST(LocalSgd, AResumedRunIsTheUninterruptedOneBitByBit, 2) {
  for (const bool sharded : {false, true}) {
    const std::string folder = support::scratch_dir() + (sharded ? "/sharded" : "/whole");
    const LocalSGDOptions options{.local_sgd_steps = 3, .outer_optimizer = OuterOptimizer{}};
    const auto run = [&](int64_t from, int64_t to, int64_t save_at) {
      AcceleratorOptions asked{.cpu = true};
      if (sharded)
        asked.fsdp_plugin =
            FullyShardedDataParallelPlugin{.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 1};
      Accelerator accelerator(asked);
      auto net = net_of();
      auto [model, optimizer] = accelerator.prepare(net, sgd(net));
      LocalSGD local_sgd(accelerator, model, options);
      if (from > 0) accelerator.load_state(folder);
      for (int64_t step = from; step < to; ++step) {
        if (step == save_at) accelerator.save_state(folder);
        accelerator.backward(loss_of(model(rows(step, rank()))));
        optimizer.step();
        optimizer.zero_grad();
        local_sgd.step();
      }
      local_sgd.finish();
      const auto held = residency::summon(net);
      std::vector<torch::Tensor> result;
      for (const auto& parameter : trained(net)) result.push_back(parameter.detach().clone());
      return result;
    };
    const auto expected = run(0, 10, 5), found = run(5, 10, -1);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  }
}

// Ranks that train apart have states of their own: the file for all has rank 0's, whose weights are in it.
RANKS_TEST(LocalSgd, TheOptimizersFileIsRank0sWhileRanksTrainApart, 2, 3) {
  const std::filesystem::path folder = support::scratch_dir();
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  LocalSGD local_sgd(accelerator, model, 100);
  accelerator.backward(loss_of(model(rows(0, rank()))));
  optimizer.step();
  accelerator.save_state(folder);
  const auto states = checkpointing::load_object(folder / "optimizer.bin").toGenericDict().at("state").toGenericDict();
  const auto saved = states.at(int64_t{0}).toGenericDict().at("momentum_buffer").toTensor();
  const auto& state = *optimizer.optimizer().state().at(net->parameters()[0].unsafeGetTensorImpl());
  const auto own = static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer();
  EXPECT_EQ(saved.equal(own), rank() == 0);
  local_sgd.finish();
}

// Likewise of replicas, which share out what they have alike at other times.
RANKS_TEST(LocalSgd, ReplicasThatTrainApartSaveTheFirstOnes, 4) {
  const std::filesystem::path folder = support::scratch_dir();
  Accelerator accelerator(
      {.cpu = true,
       .fsdp_plugin = FullyShardedDataParallelPlugin{.sharding_strategy = ShardingStrategy::hybrid_shard,
                                                     .dp_shard_size = 2,
                                                     .state_dict_type = StateDictType::sharded_state_dict}});
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  LocalSGD local_sgd(accelerator, model, 100);
  accelerator.backward(loss_of(model(rows(0, rank()))));
  optimizer.step();
  accelerator.save_state(folder);
  for (const char* of : {"pytorch_model_fsdp_0", "optimizer_0"})
    for (int64_t r = 0; r < 4; ++r)
      EXPECT_EQ(std::filesystem::exists(folder / of / ("__" + std::to_string(r) + "_0.distcp")), r < 2) << of << r;
  local_sgd.finish();
}

// Files that are left of it in a folder that is used again would be refused there, as a run's that went on apart.
RANKS_TEST(LocalSgd, ACheckpointAfterItHasNoneOfItsStates, 2) {
  const std::filesystem::path folder = support::scratch_dir();
  const auto own = folder / ("own_states_" + std::to_string(rank()) + ".bin");
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto model = accelerator.prepare(net);
  LocalSGD local_sgd(accelerator, model, 2);
  accelerator.save_state(folder);
  EXPECT_TRUE(std::filesystem::exists(own));
  local_sgd.finish();
  accelerator.save_state(folder);
  EXPECT_FALSE(std::filesystem::exists(own));
  accelerator.load_state(folder);
}

RANKS_TEST(LocalSgd, TwoComeBackFromOneCheckpoint, 2) {
  const std::filesystem::path folder = support::scratch_dir();
  Accelerator accelerator({.cpu = true});
  std::vector<torch::nn::Sequential> nets{net_of(), net_of()};
  std::vector<Prepared<torch::nn::Sequential>> models;
  std::vector<std::unique_ptr<LocalSGD>> apart;
  for (auto& net : nets) {
    models.push_back(accelerator.prepare(net));
    apart.push_back(std::make_unique<LocalSGD>(accelerator, models.back(), 100));
  }
  std::vector<torch::Tensor> values;
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < nets.size(); ++i)
    for (const auto& parameter : trained(nets[i]))
      values.push_back(parameter.add_(0.1 * static_cast<double>(rank() + 1) + static_cast<double>(i)).clone());
  accelerator.save_state(folder);
  accelerator.load_state(folder);
  auto value = values.begin();
  for (const auto& net : nets)
    for (const auto& parameter : trained(net)) EXPECT_TRUE(parameter.equal(*value++));
}

RANKS_TEST(LocalSgd, LayersThatAreFreedWithinItAreNamed, 2) {
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto first = net->parameters()[0];
  first.set_requires_grad(false);
  auto model = accelerator.prepare(net);
  LocalSGD local_sgd(accelerator, model, 1);
  first.set_requires_grad(true);
  EXPECT_THAT(message_of<ConfigError>([&] { local_sgd.step(); }),
              HasSubstr("was frozen when it began and is trained now"));
  first.set_requires_grad(false);
}

RANKS_TEST(LocalSgd, ADamagedStateIsNamed, 2) {
  const std::filesystem::path folder = support::scratch_dir();
  const auto own = folder / ("own_states_" + std::to_string(rank()) + ".bin");
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto model = accelerator.prepare(net);
  LocalSGD local_sgd(accelerator, model, 2);
  accelerator.save_state(folder);
  std::filesystem::remove(folder / "checkpoint.json");  // which says what the file was
  // An object without the fields, and no object.
  for (const auto& wrong : {c10::IValue(c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get())),
                            c10::IValue(std::vector<int64_t>{1, 2})}) {
    checkpointing::save_object(wrong, own);
    EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }),
                testing::AllOf(HasSubstr("own_states_"), HasSubstr("it is damaged or not written by save_state")));
  }
}

RANKS_TEST(LocalSgd, WhatCanNotWorkIsNamed, 2) {
  {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{}});
    auto net = net_of();
    auto model = accelerator.prepare(net);
    EXPECT_THAT(message_of<ConfigError>([&] { LocalSGD local_sgd(accelerator, model, 2); }),
                HasSubstr("the ranks hold one replica of the model together"));
  }
  AcceleratorState::reset();
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  EXPECT_THAT(message_of<ConfigError>([&] { LocalSGD local_sgd(accelerator, model, 0); }),
              HasSubstr("local_sgd_steps is 0"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                LocalSGD local_sgd(accelerator, model, 2);
                accelerator.join_uneven_inputs(model, [] {});
              }),
              HasSubstr("found it within LocalSGD"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                LocalSGD local_sgd(accelerator, model, 2);
                for (int64_t step = 0; step < 2 - rank(); ++step) local_sgd.step();
              }),
              HasSubstr("rank 0 has made 2 steps and rank 1 ends after 1"));
}

// A rank that is killed ends the others' wait for its average.
TEST(LocalSgd, AKilledRankEndsTheWait) {
  if (!support::is_rank()) {
    const auto results = support::run_test_in_ranks("LocalSgd.AKilledRankEndsTheWait", {.world_size = 2});
    EXPECT_EQ(results[1].signal, SIGKILL) << results[1].output;
    EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
    return;
  }
  Accelerator accelerator({.cpu = true});
  auto net = net_of();
  auto [model, optimizer] = accelerator.prepare(net, sgd(net));
  EXPECT_THAT(message_of<CommError>([&] {
                LocalSGD local_sgd(accelerator, model, 4);
                for (int64_t step = 0; step < 20; ++step) {
                  if (rank() == 1 && step == 6) raise(SIGKILL);
                  local_sgd.step();
                }
              }),
              HasSubstr("rank 1"));
}
