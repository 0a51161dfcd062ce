/// Sharded training against plain training of the same model on the same global batch, over strategies, wrap policies
/// and numbers of ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "accelerate/accelerate.hpp"
#include "accelerate/residency.hpp"
#include "comm/group.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "small_gpt.hpp"

namespace {

using namespace accelerate;
using support::Gpt;
using support::make_adamw;
namespace nn = torch::nn;

constexpr int64_t kGlobalBatch = 12, kTokens = 9, kVocabulary = 61;

at::Tensor batch_of(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step));
  return torch::randint(0, kVocabulary, {kGlobalBatch, kTokens}, generator, torch::kLong);
}
at::Tensor mine(const at::Tensor& global, const Accelerator& accelerator) {
  const int64_t share = kGlobalBatch / accelerator.num_processes();
  return global.narrow(0, accelerator.process_index() * share, share);
}
template <class Model> at::Tensor loss_of(Model& model, const at::Tensor& ids) {
  const auto logits = model(ids.narrow(1, 0, kTokens - 1));
  return torch::cross_entropy_loss(logits.reshape({-1, kVocabulary}), ids.narrow(1, 1, kTokens - 1).reshape({-1}));
}
Gpt make_gpt() {
  torch::manual_seed(11);
  return Gpt();
}
struct Run {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> state;
};

Run train_plain(int64_t steps) {
  Gpt model = make_gpt();
  auto optimizer = make_adamw(model);
  Run run;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(model, batch_of(step));
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    run.losses.push_back(loss.item<double>());
  }
  for (const auto& item : model->named_parameters()) run.state[item.key()] = item.value().detach().clone();
  return run;
}

/// Without a plugin: the same through Accelerator, unsharded.
Run train_sharded(const std::optional<FullyShardedDataParallelPlugin>& plugin, int64_t steps) {
  AcceleratorState::reset();
  GradientState::reset();
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
  Gpt model = make_gpt();
  auto optimizer = make_adamw(model);
  auto [m, opt] = accelerator.prepare(model, optimizer);
  Run run;
  for (int64_t step = 0; step < steps; ++step) {
    opt.zero_grad();
    auto loss = loss_of(m, mine(batch_of(step), accelerator));
    accelerator.backward(loss);
    accelerator.clip_grad_norm_(m->parameters(), 1.0);
    opt.step();
    run.losses.push_back(accelerator.reduce(loss.detach(), "mean").template item<double>());
  }
  run.state = accelerator.get_state_dict(m);
  return run;
}

/// fp32 sums in another order: 20 steps of AdamW keep losses within 1e-5 and parameters within 1e-4 (a sign change of a
/// tiny gradient moves a weight by up to lr).
void expect_close(const Run& plain, const Run& sharded, const std::string& what) {
  ASSERT_EQ(plain.losses.size(), sharded.losses.size());
  for (size_t i = 0; i < plain.losses.size(); ++i)
    EXPECT_NEAR(plain.losses[i], sharded.losses[i], 1e-5) << what << " step " << i;
  if (support::rank() != 0) return;
  for (const auto& [name, value] : plain.state) {
    const auto found = sharded.state.find(name);
    ASSERT_NE(found, sharded.state.end()) << what << " " << name;
    EXPECT_LT((found->second - value).abs().max().item<double>(), 1e-4) << what << " " << name;
  }
}

const std::vector<std::pair<std::string, FullyShardedDataParallelPlugin>> kPlugins = {
    {"full_shard by class",
     {.sharding_strategy = ShardingStrategy::full_shard,
      .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
      .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"full_shard, prefetching",
     {.sharding_strategy = ShardingStrategy::full_shard,
      .backward_prefetch = BackwardPrefetch::backward_pre,
      .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
      .forward_prefetch = true,
      .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"full_shard, post",
     {.sharding_strategy = ShardingStrategy::full_shard,
      .backward_prefetch = BackwardPrefetch::backward_post,
      .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
      .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"shard_grad_op by size",
     {.sharding_strategy = ShardingStrategy::shard_grad_op,
      .auto_wrap_policy = AutoWrapPolicy::size_based_wrap,
      .min_num_params = 2000}},
    {"full_shard, one unit",
     {.sharding_strategy = ShardingStrategy::full_shard, .auto_wrap_policy = AutoWrapPolicy::no_wrap}},
    {"no_shard", {.sharding_strategy = ShardingStrategy::no_shard}},
    {"version 2",
     {.fsdp_version = 2,
      .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
      .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"version 2, not resharded",
     {.fsdp_version = 2,
      .reshard_after_forward = false,
      .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
      .transformer_cls_names_to_wrap = {{"Block"}}}},
};

RANKS_TEST(Fsdp, EqualsPlainTraining, 1, 2, 3, 4) {
  const Run plain = train_plain(20);
  const Run unsharded = support::world_size() == 1 ? train_sharded(std::nullopt, 20) : Run{};
  for (const auto& [what, plugin] : kPlugins) {
    const Run sharded = train_sharded(plugin, 20);
    expect_close(plain, sharded, what);
    if (support::world_size() > 1) continue;
    // One rank computes what one process computes, bit for bit.
    EXPECT_EQ(unsharded.losses, sharded.losses) << what;
    for (const auto& [name, value] : unsharded.state)
      EXPECT_TRUE(torch::equal(sharded.state.at(name), value)) << what << " " << name;
  }
}

/// Two forwards, then a loss of each model: the first backward is none of the second model's.
RANKS_TEST(Fsdp, ModelsWithLossesOfTheirOwn, 1, 2, 3) {
  const auto train = [](Accelerator* accelerator) {
    torch::manual_seed(3);
    nn::Sequential first(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 3)), second(nn::Linear(6, 5), nn::Linear(5, 1));
    torch::optim::SGD one(first->parameters(), 0.1), two(second->parameters(), 0.2);
    std::vector<at::Tensor> losses;
    const auto steps = [&](auto& a, auto& b, auto& opt_a, auto& opt_b, const auto& share, const auto& backward) {
      for (int64_t step = 0; step < 4; ++step) {
        auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(7 + step));
        const auto x = share(torch::randn({kGlobalBatch, 6}, generator));
        opt_a.zero_grad(), opt_b.zero_grad();
        const auto of_a = a(x), of_b = b(x);
        const auto loss_a = of_a.pow(2).mean(), loss_b = (of_b - 1).pow(2).mean();
        backward(loss_a), backward(loss_b);
        opt_a.step(), opt_b.step();
        losses.push_back(torch::stack({loss_a, loss_b}).detach());
      }
    };
    if (!accelerator) {
      const auto call = [](auto& model) { return [&](const at::Tensor& x) { return model->forward(x); }; };
      const auto a = call(first), b = call(second);
      steps(
          a, b, one, two, [](const at::Tensor& x) { return x; }, [](const at::Tensor& loss) { loss.backward(); });
      return torch::stack(losses);
    }
    auto [a, b, opt_a, opt_b] = accelerator->prepare(first, second, one, two);
    steps(
        a, b, opt_a, opt_b, [&](const at::Tensor& x) { return mine(x, *accelerator); },
        [&](const at::Tensor& loss) { accelerator->backward(loss); });
    return accelerator->reduce(torch::stack(losses), "mean");
  };
  const auto plain = train(nullptr);
  for (const int64_t version : {1, 2}) {
    AcceleratorState::reset();
    GradientState::reset();
    Accelerator accelerator({.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{.fsdp_version = version}});
    // Sums in another order: a few roundings of fp32 in losses of about 1.
    EXPECT_LT((train(&accelerator) - plain).abs().max().item<double>(), 1e-5) << version;
  }
}

/// The other model's parameters stay for its own backward, and nothing is sent for it before.
TEST(Fsdp, ABackwardIsOnlyTheModelsThatItWentThrough) {
  const auto report = dry_run({.num_processes = 2}, [](const DryRunMark& mark) {
    Accelerator accelerator({.fsdp_plugin = FullyShardedDataParallelPlugin{}});
    auto [a, b] = accelerator.prepare(nn::Linear(6, 3), nn::Linear(6, 3));
    for (int step = 0; step < 2; ++step) {
      const auto x = torch::zeros({2, 6}, accelerator.device());
      const auto of_a = a(x).mean(), of_b = b(x).mean();
      mark("forwards");
      accelerator.backward(of_a);
      mark("first");
      accelerator.backward(of_b);
      mark("second");
    }
  });
  const auto first = report.phase("first").traffic, second = report.phase("second").traffic;
  EXPECT_GT(first.reduce_scatter, 0);
  EXPECT_EQ(first.reduce_scatter, second.reduce_scatter);
  EXPECT_EQ(first.messages, second.messages);
  EXPECT_EQ(second.all_gather, first.all_gather);
}

RANKS_TEST(Fsdp, ParanoidModeIsBitEqual, 1, 2, 3) {
  for (const size_t which : {size_t{0}, size_t{3}}) {
    const Run normal = train_sharded(kPlugins[which].second, 5);
    residency::set_paranoid(true);
    const Run paranoid = train_sharded(kPlugins[which].second, 5);
    residency::set_paranoid(false);
    EXPECT_EQ(normal.losses, paranoid.losses);
    for (const auto& [name, value] : normal.state) EXPECT_TRUE(torch::equal(paranoid.state.at(name), value)) << name;
  }
}

/// Branches of some megabytes each, more than the memory in which ranks exchange gradients keeps free at a time, and a
/// weight that is used first and last.
struct BranchesImpl : nn::Module {
  static constexpr int64_t kWidth = 1024, kBranches = 8;
  BranchesImpl() {
    tied = register_parameter("tied", torch::randn({kWidth, 2 * kWidth}) / 64);
    for (int64_t i = 0; i < kBranches; ++i)
      branches.push_back(register_module("branch" + std::to_string(i), nn::Linear(kWidth, kWidth)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto inner = x.matmul(tied.t());
    auto sum = torch::zeros_like(inner);
    for (int64_t i = 0; i < kBranches; ++i)
      sum = sum + branches[static_cast<size_t>(backwards ? kBranches - 1 - i : i)](inner).tanh();
    return sum.matmul(tied);
  }
  at::Tensor tied;
  std::vector<nn::Linear> branches;
  bool backwards = false;
};
TORCH_MODULE(Branches);

Branches make_branches() {
  torch::manual_seed(5);
  return Branches();
}
constexpr int64_t kRows = 12;
at::Tensor rows_of(int64_t step) {
  return torch::randn({kRows, 2 * BranchesImpl::kWidth}, at::detail::createCPUGenerator(static_cast<uint64_t>(step)));
}

/// A rank that waits for memory, because a peer is slow to read what lies in it, is not ahead of the others: what
/// compares ranks when they wait for long would take it for one that has gone another way.
RANKS_TEST(Fsdp, WaitsForMemoryAreNotCountedAsCollectives, 2) {
  setenv("ACCELERATE_SHARED_MEMORY", "1", 1);
  Accelerator accelerator(
      {.cpu = true,
       .fsdp_plugin = FullyShardedDataParallelPlugin{.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                                                     .transformer_cls_names_to_wrap = {{"Linear"}}}});
  Branches model = make_branches();
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.05));
  for (auto& branch : m->branches)
    branch->weight.register_hook([&](const at::Tensor&) {
      if (accelerator.process_index() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
  for (int64_t step = 0; step < 3; ++step) {
    accelerator.backward(m(rows_of(step)).square().mean());
    opt.step();
    opt.zero_grad();
  }
  const std::string activity = comm::world_group()->activity()();
  const std::string word = "collective ";
  const int64_t number = std::stoll(activity.substr(activity.find(word) + word.size()));
  const at::Tensor all = accelerator.gather(torch::tensor({number}));
  EXPECT_EQ(all[0].item<int64_t>(), all[1].item<int64_t>()) << activity;
}

/// Parts that stay open for the whole backward, and ranks that complete parts in opposite orders, must not wait for
/// each other's memory; the latter are named, as gathers need one order.
RANKS_TEST(Fsdp, GradientsOfManyMegabytesInAnyOrderNeverBlock, 2, 3) {
  setenv("ACCELERATE_SHARED_MEMORY", "1", 1);
  constexpr double kRate = 0.05;
  Branches plain = make_branches();
  torch::optim::SGD plain_optimizer(plain->parameters(), kRate);
  Accelerator accelerator(
      {.cpu = true,
       .fsdp_plugin = FullyShardedDataParallelPlugin{.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                                                     .transformer_cls_names_to_wrap = {{"Linear"}}}});
  Branches model = make_branches();
  torch::optim::SGD optimizer(model->parameters(), kRate);
  auto [m, opt] = accelerator.prepare(model, optimizer);
  for (int64_t step = 0; step < 4; ++step) {
    const auto rows = rows_of(step);
    plain_optimizer.zero_grad();
    plain(rows).square().mean().backward();
    plain_optimizer.step();

    m->backwards = step % 2 == 1;
    const int64_t share = kRows / accelerator.num_processes();
    opt.zero_grad();
    accelerator.backward(m(rows.narrow(0, accelerator.process_index() * share, share)).square().mean());
    opt.step();
  }
  const auto state = accelerator.get_state_dict(m);
  if (accelerator.is_main_process())
    for (const auto& item : plain->named_parameters())  // sums of fp32 in another order
      EXPECT_LT((state.at(item.key()) - item.value()).abs().max().item<double>(), 1e-6) << item.key();

  m->backwards = accelerator.process_index() == 1;
  accelerator.backward(m(rows_of(0)).square().mean());
  const auto message = support::message_of<CommError>([&] { opt.step(); });
  EXPECT_NE(message.find("in the same order"), std::string::npos) << message;
}

}  // namespace
