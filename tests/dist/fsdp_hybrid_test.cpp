/// Sharding within groups of ranks: replicas of a sharded model, and parameters that stay near between forward and
/// backward. Every case runs on both stores: shards in shared memory, and shards that are gathered through c10d.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "comm/group.hpp"
#include "fsdp_of.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "small_gpt.hpp"

namespace {

using namespace accelerate;
using support::Gpt;
using support::make_adamw;
using support::message_of;
using support::on_both_stores;
using support::reset_states;
using testing::AllOf;
using testing::HasSubstr;
namespace nn = torch::nn;

using Plugin = FullyShardedDataParallelPlugin;

/// Units within units.
Plugin by_block(Plugin plugin) {
  plugin.auto_wrap_policy = lambda_auto_wrap_policy([](const Submodule& module) {
    return module.class_name.ends_with("Block") || module.class_name.ends_with("Linear");
  });
  return plugin;
}
Plugin full_shard() {
  return by_block(
      {.sharding_strategy = ShardingStrategy::full_shard, .backward_prefetch = BackwardPrefetch::backward_pre});
}
Plugin hybrid(int64_t replicas) {
  return by_block({.sharding_strategy = ShardingStrategy::hybrid_shard,
                   .dp_replicate_size = replicas,
                   .backward_prefetch = BackwardPrefetch::backward_pre});
}

constexpr int64_t kGlobalBatch = 12, kTokens = 9, kVocabulary = 61;

at::Tensor batch_of(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step));
  return torch::randint(0, kVocabulary, {kGlobalBatch, kTokens}, generator, torch::kLong);
}
at::Tensor mine(const at::Tensor& global) {
  const int64_t share = global.size(0) / support::world_size();
  return global.narrow(0, support::rank() * share, share);
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
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> gradients;  ///< of the first step, on every rank
  std::map<std::string, at::Tensor> state;      ///< rank 0
};

/// No plugin: plain training on the whole batch.
Training train(const std::optional<Plugin>& plugin, int64_t steps, int64_t micro_steps = 1) {
  reset_states();
  std::optional<Accelerator> accelerator;
  if (plugin)
    accelerator.emplace(
        AcceleratorOptions{.gradient_accumulation_steps = micro_steps, .cpu = true, .fsdp_plugin = plugin});
  Gpt model = make_gpt();
  auto optimizer = make_adamw(model);
  Training run;
  if (!plugin) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t micro = 0; micro < micro_steps; ++micro) {
        auto loss = loss_of(model, batch_of(step * micro_steps + micro));
        (loss / micro_steps).backward();
        run.losses.push_back(loss.item<double>());
      }
      if (step == 0)
        for (const auto& item : model->named_parameters()) run.gradients[item.key()] = item.value().grad().clone();
      run.norms.push_back(nn::utils::clip_grad_norm_(model->parameters(), 0.5));
      optimizer.step(), optimizer.zero_grad();
    }
    for (const auto& item : model->named_parameters()) run.state[item.key()] = item.value().detach().clone();
    return run;
  }
  auto [m, opt] = accelerator->prepare(model, optimizer);
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t micro = 0; micro < micro_steps; ++micro) {
      auto scope = accelerator->accumulate(m);
      auto loss = loss_of(m, mine(batch_of(step * micro_steps + micro)));
      accelerator->backward(loss);
      run.losses.push_back(accelerator->reduce(loss.detach(), "mean").template item<double>());
    }
    if (step == 0)
      support::fsdp_of(m)->gather_each([](const at::Tensor&, const at::Tensor& shard) { return shard.grad(); },
                                       [&](const auto& whole) { run.gradients[whole.name] = whole.value.clone(); },
                                       /*everywhere=*/true);
    run.norms.push_back(accelerator->clip_grad_norm_(m->parameters(), 0.5).template item<double>());
    opt.step(), opt.zero_grad();
  }
  run.state = accelerator->get_state_dict(m);
  return run;
}

/// Gradients within 1e-6: sums in another order. A few steps of AdamW keep losses within 1e-5 and parameters within
/// 1e-4 (a sign change of a tiny gradient moves a weight by up to lr).
void expect_close(const Training& expected, const Training& run, const std::string& what) {
  ASSERT_EQ(expected.losses.size(), run.losses.size());
  for (size_t i = 0; i < run.losses.size(); ++i)
    EXPECT_NEAR(expected.losses[i], run.losses[i], 1e-5) << what << " step " << i;
  for (size_t i = 0; i < run.norms.size(); ++i)
    EXPECT_NEAR(expected.norms[i], run.norms[i], 1e-5) << what << " step " << i;
  ASSERT_EQ(expected.gradients.size(), run.gradients.size()) << what;
  for (const auto& [name, value] : expected.gradients)
    EXPECT_LT(((run.gradients.at(name) - value).abs() / value.abs().clamp_min(1)).max().item<double>(), 1e-6)
        << what << " gradient of " << name;
  if (support::rank() != 0) return;
  for (const auto& [name, value] : expected.state)
    EXPECT_LT((run.state.at(name) - value).abs().max().item<double>(), 1e-4) << what << " " << name;
}

TEST(FsdpHybrid, EqualsFullShardAndPlainTraining) {
  if (!support::is_rank()) {
    for (const int64_t n : {2, 4, 6})
      support::expect_ranks_pass("FsdpHybrid.EqualsFullShardAndPlainTraining",
                                 {.world_size = n, .env = {{"LOCAL_WORLD_SIZE", std::to_string(n / 2)}}});
    return;
  }
  const int64_t half = support::world_size() / 2;
  constexpr int64_t steps = 4;
  const Training plain = train(std::nullopt, steps);
  on_both_stores([&](const std::string& store) {
    const Training full = train(full_shard(), steps);
    expect_close(plain, full, "FULL_SHARD " + store);
    const std::vector<std::pair<std::string, Plugin>> plugins = {
        {"two replicas", hybrid(2)},
        {"a replica per machine", by_block({.sharding_strategy = ShardingStrategy::hybrid_shard})},
        {"ZeRO 2", by_block({.sharding_strategy = ShardingStrategy::hybrid_shard_zero2, .dp_shard_size = half})},
        {"replicas of one rank", by_block({.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_shard_size = 1})},
        {"one replica", by_block({.sharding_strategy = ShardingStrategy::hybrid_shard, .dp_replicate_size = 1})},
        {"version 2", by_block({.fsdp_version = 2, .dp_replicate_size = 2, .dp_shard_size = half})},
        {"version 2, not resharded",
         by_block({.fsdp_version = 2, .reshard_after_forward = false, .dp_replicate_size = 2})},
    };
    for (const auto& [name, plugin] : plugins) {
      const Training run = train(plugin, steps);
      expect_close(plain, run, name + ", " + store);
      expect_close(full, run, name + " and FULL_SHARD, " + store);
    }
  });
}

RANKS_TEST(FsdpHybrid, AccumulatesWithoutSynchronisation, 4) {
  const Training plain = train(std::nullopt, 4, 3);
  on_both_stores([&](const std::string& store) { expect_close(plain, train(hybrid(2), 4, 3), store); });
}

RANKS_TEST(FsdpHybrid, ParanoidModeIsBitEqual, 4) {
  on_both_stores([](const std::string& store) {
    for (const auto& plugin : {hybrid(2), by_block({.fsdp_version = 2, .reshard_after_forward = 2})}) {
      const Training normal = train(plugin, 3);
      residency::set_paranoid(true);
      const Training paranoid = train(plugin, 3);
      residency::set_paranoid(false);
      EXPECT_EQ(normal.losses, paranoid.losses) << store;
      for (const auto& [name, value] : normal.state)
        EXPECT_TRUE(torch::equal(paranoid.state.at(name), value)) << store << " " << name;
    }
  });
}

/// Two heads of which each replica uses another one, and one that nobody uses.
struct HeadsImpl : nn::Module {
  HeadsImpl() {
    torch::manual_seed(3);
    body = register_module("body", nn::Linear(6, 6));
    left = register_module("left", nn::Linear(6, 2));
    right = register_module("right", nn::Linear(6, 2));
    never = register_module("never", nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool use_right) {
    const auto y = torch::tanh(body(x));
    return use_right ? right(y) : left(y);
  }
  nn::Linear body{nullptr}, left{nullptr}, right{nullptr}, never{nullptr};
};
TORCH_MODULE(Heads);

RANKS_TEST(FsdpHybrid, ReplicasMayUseDifferentParameters, 2, 4) {
  on_both_stores([](const std::string& store) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = hybrid(2)});
    Heads plain, net;
    const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.5);
    torch::optim::AdamW reference(plain->parameters(), options), optimizer(net->parameters(), options);
    auto [m, opt] = accelerator.prepare(net, optimizer);
    const bool second = support::fsdp_of(m)->replica() == 1;
    EXPECT_EQ(second, support::rank() >= support::world_size() / 2);
    for (int64_t step = 0; step < 4; ++step) {
      const auto x = torch::randn({8, 6}, at::detail::createCPUGenerator(static_cast<uint64_t>(step)));
      // In the last step nobody uses the right one.
      const bool right = step < 3;
      ((plain->forward(x.narrow(0, 0, 4), false).pow(2).mean() +
        plain->forward(x.narrow(0, 4, 4), right).pow(2).mean()) /
       2)
          .backward();
      reference.step(), reference.zero_grad();
      accelerator.backward(m(mine(x), second && right).pow(2).mean());
      opt.step(), opt.zero_grad();
    }
    const auto state = accelerator.get_state_dict(m);
    // Also: `never` was not decayed, and `right` not in the last step, because a gradient of zeros is not the same as
    // none.
    for (const auto& item : plain->named_parameters())
      if (support::rank() == 0) {
        EXPECT_LT((state.at(item.key()) - item.value()).abs().max().item<double>(), 2e-5) << store << " " << item.key();
      }
  });
}

RANKS_TEST(FsdpHybrid, ReplicasBeginAlikeAndStayAlike, 4) {
  on_both_stores([](const std::string& store) {
    for (const bool from_rank0 : {false, true}) {
      reset_states();
      auto plugin = hybrid(2);
      plugin.cpu_ram_efficient_loading = plugin.sync_module_states = from_rank0;
      Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
      Gpt model{nullptr};
      if (from_rank0 && support::rank() > 0) {
        const auto empty = init_empty_weights();
        model = make_gpt(support::rank());
      } else {
        model = make_gpt(support::rank());
      }
      auto optimizer = make_adamw(model);
      auto [m, opt] = accelerator.prepare(model, optimizer);
      const auto pieces_are_equal = [&](const std::string& when) {
        for (const auto& piece : support::fsdp_of(m)->held()) {
          const auto all = comm::world_group()->all_gather(
              torch::constant_pad_nd(piece.value.detach(), {0, piece.whole.numel() - piece.value.numel()}));
          const auto rows = all.view({2, -1});
          EXPECT_TRUE(torch::equal(rows[0], rows[1])) << store << " " << when << " " << piece.names.front();
        }
      };
      pieces_are_equal("at the start");
      if (from_rank0) {
        const Gpt expected = make_gpt(0);
        const auto state = accelerator.get_state_dict(m);
        for (const auto& item : expected->named_parameters())
          if (support::rank() == 0) {
            EXPECT_TRUE(torch::equal(state.at(item.key()), item.value())) << item.key();
          }
      }
      for (int64_t step = 0; step < 3; ++step) {
        accelerator.backward(loss_of(m, mine(batch_of(step))));
        accelerator.clip_grad_norm_(m->parameters(), 0.1);
        opt.step(), opt.zero_grad();
      }
      pieces_are_equal("at the end");
    }
  });
}

RANKS_TEST(FsdpHybrid, NormsCountEachElementOnce, 2, 4) {
  on_both_stores([](const std::string& store) {
    for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      reset_states();
      Accelerator accelerator({.cpu = true, .fsdp_plugin = hybrid(2)});
      Gpt plain = make_gpt(), model = make_gpt();
      auto m = accelerator.prepare(model);
      loss_of(plain, batch_of(0)).backward();
      accelerator.backward(loss_of(m, mine(batch_of(0))));
      const double expected = nn::utils::clip_grad_norm_(plain->parameters(), 0.01, p);
      EXPECT_NEAR(accelerator.clip_grad_norm_(m->parameters(), 0.01, p).item<double>(), expected, 1e-5 * expected)
          << store << " p " << p;
      EXPECT_NEAR(accelerator.clip_grad_norm_(m->parameters(), 1e9, p).item<double>(), 0.01, 1e-5)
          << store << " p " << p;
    }
  });
}

RANKS_TEST(FsdpHybrid, AnOverflowOnOneRankSkipsTheStepOfAll, 4) {
  on_both_stores([](const std::string& store) {
    Accelerator accelerator({.mixed_precision = "fp16",
                             .cpu = true,
                             .fsdp_plugin = hybrid(2),
                             .kwargs_handlers = {GradScalerKwargs{.init_scale = 64, .growth_interval = 100}}});
    nn::Sequential net(nn::Linear(4, 4), nn::Linear(4, 2));
    auto [m, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
    for (int64_t step = 0; step < 3; ++step) {
      const bool overflow = step == 1 && support::rank() == 3;
      accelerator.backward(m(torch::ones({2, 4})).pow(2).mean() *
                           (overflow ? std::numeric_limits<float>::infinity() : 1.0F));
      opt.step(), opt.zero_grad();
      EXPECT_EQ(opt.step_was_skipped(), step == 1) << store << " step " << step;
    }
    EXPECT_EQ(accelerator.scaler()->get_scale(), 32) << store;
  });
}

RANKS_TEST(FsdpHybrid, SummonedParametersAreWholeAndWrittenBackInEachReplica, 4) {
  on_both_stores([](const std::string& store) {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = hybrid(2)});
    Gpt model = make_gpt();
    const auto before = model->blocks[1]->up->weight.detach().clone();
    auto m = accelerator.prepare(model);
    {
      const auto present = residency::summon(model);
      torch::NoGradGuard no_grad;
      EXPECT_EQ(std::memcmp(model->blocks[1]->up->weight.data_ptr(), before.data_ptr(), before.nbytes()), 0) << store;
      model->blocks[1]->up->weight.mul_(2);
    }
    const auto state = accelerator.get_state_dict(m);
    if (support::rank() == 0) {
      EXPECT_TRUE(torch::equal(state.at("h1.up.weight"), before * 2)) << store;
    }
    const auto again = residency::summon(model);
    EXPECT_TRUE(torch::equal(model->blocks[1]->up->weight.detach(), before * 2)) << store;
  });
}

// ---- reshard_after_forward as a number
// ---------------------------------------------------------------------------------------------------------------------

RANKS_TEST(FsdpReshard, EqualsFullShardOnPairsOfRanks, 4) {
  constexpr int64_t kSteps = 6;
  const Training plain = train(std::nullopt, kSteps);
  on_both_stores([&](const std::string& store) {
    for (const int64_t to : {1, 2, 4})
      expect_close(plain, train(by_block({.fsdp_version = 2, .reshard_after_forward = to}), kSteps),
                   std::to_string(to) + ", " + store);
    expect_close(plain,
                 train(by_block({.fsdp_version = 2, .reshard_after_forward = 2, .dp_replicate_size = 2}), kSteps),
                 "2, with two replicas, " + store);
  });
  const Training accumulated = train(std::nullopt, 3, 2);
  on_both_stores([&](const std::string& store) {
    expect_close(accumulated, train(by_block({.fsdp_version = 2, .reshard_after_forward = 2}), 3, 2),
                 "accumulated, " + store);
  });
}

/// Between forward and backward each rank holds its half of every unit that went, and no more; afterwards nothing.
RANKS_TEST(FsdpReshard, AnNthOfTheModelStaysUntilBackward, 4) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);
  constexpr int64_t kLayers = 10, kWidth = 64;
  const int64_t unit = (kWidth * kWidth + kWidth + 16 * 4) * 4;  // at most this with padding
  for (const int64_t to : {0, 2}) {
    reset_states();
    Plugin plugin{.fsdp_version = 2,
                  .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                  .transformer_cls_names_to_wrap = {{"Linear"}}};
    if (to > 0) plugin.reshard_after_forward = to;
    Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
    nn::Sequential net;
    for (int64_t i = 0; i < kLayers; ++i) net->push_back(nn::Linear(kWidth, kWidth));
    auto [m, opt] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
    for (int64_t step = 0; step < 3; ++step) {
      const auto loss = m(torch::randn({2, kWidth})).pow(2).mean();
      const int64_t between = residency::stats().resident_bytes;
      if (to == 0) {
        EXPECT_LE(between, 2 * unit);
      } else {
        EXPECT_GE(between, (kLayers - 1) * unit / to * 9 / 10);
        EXPECT_LE(between, (kLayers - 1) * unit / to + 2 * unit);
      }
      accelerator.backward(loss);
      EXPECT_EQ(residency::stats().resident_bytes, 0);
      opt.step(), opt.zero_grad();
      torch::NoGradGuard no_grad;
      m(torch::randn({2, kWidth}));
      EXPECT_EQ(residency::stats().resident_bytes, 0) << "nothing stays for a backward that does not come";
    }
  }
}

// ---- mistakes, faults
// ---------------------------------------------------------------------------------------------------------------------

RANKS_TEST(FsdpHybrid, NumbersThatDoNotFitAreRefused, 4) {
  const auto refusal = [](Plugin plugin) {
    return message_of<ConfigError>([&] {
      reset_states();
      Accelerator accelerator({.cpu = true, .fsdp_plugin = std::move(plugin)});
      accelerator.prepare(make_gpt());
    });
  };
  EXPECT_THAT(refusal(hybrid(3)), HasSubstr("found dp_replicate_size 3 and dp_shard_size unset, expected two numbers "
                                            "of ranks whose product is the job's 4"));
  auto both = hybrid(2);
  both.dp_shard_size = 4;
  EXPECT_THAT(refusal(both), HasSubstr("found dp_replicate_size 2 and dp_shard_size 4"));
  EXPECT_THAT(refusal(by_block({.sharding_strategy = ShardingStrategy::full_shard, .dp_shard_size = 2})),
              HasSubstr("FULL_SHARD splits the model over all 4 ranks"));
  EXPECT_THAT(refusal(by_block({.fsdp_version = 2, .reshard_after_forward = 3})),
              HasSubstr("reshard_after_forward is 3, expected true, false or a divisor of the 4 ranks"));
}

/// Replicas that hold the same are compared from time to time, here after 1, 2 and 4 averages.
RANKS_TEST(FsdpHybrid, PiecesOfReplicasThatDriftApartAreNamed, 2, 3, 4) {
  on_both_stores([](const std::string& store) {
    for (const int64_t every : {500, 3, 0}) {
      reset_states();
      const bool shards = support::world_size() == 4;
      Accelerator accelerator(
          {.cpu = true,
           .fsdp_plugin = shards ? hybrid(2) : by_block({.sharding_strategy = ShardingStrategy::no_shard}),
           .kwargs_handlers = {DistributedDataParallelKwargs{.compare_parameters_every = every}}});
      Gpt model = make_gpt();
      auto [m, optimizer] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.1));
      const auto train = [&, m = m, optimizer = optimizer] {
        for (int64_t step = 0; step < 5; ++step) {
          accelerator.backward(loss_of(m, mine(batch_of(step))));
          optimizer.step(), optimizer.zero_grad();
          const at::NoGradGuard no_grad;
          if (step == 1) model->parameters().front().mul_(support::rank() >= (shards ? 2 : 1) ? 1.5 : 1);
        }
      };
      if (every == 0) {
        train();
        continue;
      }
      EXPECT_THAT(message_of<ConfigError>(train),
                  AllOf(HasSubstr(every == 3 ? "after 3 of them parameter '" : "after 4 of them parameter '"),
                        HasSubstr(shards ? "on rank 2 than on rank 0" : "on rank 1 than on rank 0")))
          << store;
    }
  });
}

TEST(FsdpHybrid, MachinesOfUnequalSizesAreRefused) {
  if (!support::is_rank())
    return support::expect_ranks_pass("FsdpHybrid.MachinesOfUnequalSizesAreRefused",
                                      {.world_size = 4, .env = {{"LOCAL_WORLD_SIZE", "3"}}});
  // Before a model is there: the job's mesh can't be made.
  EXPECT_THAT(message_of<ConfigError>([] {
                const Accelerator accelerator(
                    {.cpu = true, .fsdp_plugin = by_block({.sharding_strategy = ShardingStrategy::hybrid_shard})});
              }),
              HasSubstr("found 3 (LOCAL_WORLD_SIZE) of 4"));
}

/// A hybrid job's rank is killed: the ranks of its own replica and those of the other one end with an error that names
/// it.
void killed_in_backward(const char* shared, const std::string& name) {
  if (!support::is_rank()) {
    const auto results =
        support::run_test_in_ranks(name, {.world_size = 4, .env = {{"ACCELERATE_SHARED_MEMORY", shared}}});
    EXPECT_EQ(results[3].signal, SIGKILL);
    for (const size_t r : {size_t{0}, size_t{1}, size_t{2}}) EXPECT_EQ(results[r].exit_code, 0) << results[r].output;
    return;
  }
  // The group's timeout comes after the deadline of the ranks.
  Accelerator accelerator({.cpu = true, .fsdp_plugin = hybrid(2)});
  Gpt model = make_gpt();
  auto optimizer = make_adamw(model);
  auto [m, opt] = accelerator.prepare(model, optimizer);
  const std::string text = message_of<CommError>([&] {
    for (int64_t step = 0; step < 10000; ++step) {
      auto loss = loss_of(m, mine(batch_of(step)));
      if (support::rank() == 3 && step == 3) loss.register_hook([](const at::Tensor&) { ::kill(::getpid(), SIGKILL); });
      accelerator.backward(loss);
      opt.step(), opt.zero_grad();
    }
  });
  EXPECT_THAT(text, HasSubstr("rank 3"));
}

TEST(FsdpHybridFault, ARankKilledInBackwardEndsTheOthersWithAnError) {
  killed_in_backward("0", "FsdpHybridFault.ARankKilledInBackwardEndsTheOthersWithAnError");
}
TEST(FsdpHybridFault, ARankKilledInBackwardEndsTheOthersWithAnErrorOnSharedMemory) {
  killed_in_backward("1", "FsdpHybridFault.ARankKilledInBackwardEndsTheOthersWithAnErrorOnSharedMemory");
}

}  // namespace
