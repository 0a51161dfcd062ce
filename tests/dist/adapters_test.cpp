// Adapters and 8-bit optimizers in real jobs: every way of training gives what one process with all rows gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "accelerate/adapters.hpp"
#include "accelerate/optim/adam8bit.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "small_gpt.hpp"

namespace {

using namespace accelerate;
using support::Gpt;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kRows = 4, kLength = 9;

at::Tensor rows(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(50 + step));
  return torch::randint(0, 61, {kRows, kLength}, generator);
}
at::Tensor mine(const at::Tensor& all) {
  const int64_t share = all.size(0) / support::world_size();
  return all.narrow(0, support::rank() * share, share);
}
template <class Model> at::Tensor loss_of(Model& model, const at::Tensor& ids) {
  return torch::cross_entropy_loss(model(ids.slice(1, 0, -1)).flatten(0, 1), ids.slice(1, 1).flatten());
}

Gpt make_gpt() {
  torch::manual_seed(3);
  return Gpt();
}
LoraAdapter adapt(Gpt& gpt) {
  torch::manual_seed(4);
  return add_adapter(
      gpt, {.r = 4, .lora_alpha = 8, .target_modules = {"qkv", "up", "down"}, .init_lora_weights = LoraInit::random});
}
std::vector<at::Tensor> trained(Gpt& gpt) {
  std::vector<at::Tensor> result;
  for (const auto& p : gpt->parameters())
    if (p.requires_grad()) result.push_back(p);
  return result;
}
torch::optim::AdamW adamw(Gpt& gpt) { return torch::optim::AdamW(trained(gpt), torch::optim::AdamWOptions(1e-2)); }

/// Trains with the options and on one process alone, and compares losses and what is trained.
void expect_trained_as_alone(const AcceleratorOptions& options) {
  Gpt alone = make_gpt(), gpt = make_gpt();
  const auto reference = adapt(alone), adapter = adapt(gpt);
  auto reference_optimizer = adamw(alone), optimizer = adamw(gpt);
  Accelerator accelerator(options);
  auto [model, opt] = accelerator.prepare(gpt, optimizer);
  for (int64_t step = 0; step < 5; ++step) {
    const auto expected = loss_of(alone, rows(step));
    expected.backward();
    reference_optimizer.step(), reference_optimizer.zero_grad();
    const auto loss = loss_of(model, mine(rows(step)));
    accelerator.backward(loss);
    opt.step(), opt.zero_grad();
    EXPECT_NEAR(accelerator.reduce(loss.detach(), "mean").item<double>(), expected.item<double>(), 2e-5) << step;
  }
  const auto state = accelerator.get_state_dict(model);
  const auto folder = std::filesystem::path(support::scratch_dir()) / "adapter";
  if (!accelerator.is_main_process()) return;
  for (const auto& item : alone->named_parameters()) {
    const auto difference = (state.at(item.key()) - item.value()).abs().max().item<double>();
    if (item.value().requires_grad()) EXPECT_LT(difference, 2e-4) << item.key();
    else EXPECT_EQ(difference, 0) << item.key() << " is frozen";
  }
  adapter.save(folder, state);
  Gpt loaded = make_gpt();
  load_adapter(loaded, folder);
  const torch::NoGradGuard no_grad;
  EXPECT_LT((loaded(rows(9)) - alone(rows(9))).abs().max().item<double>(), 2e-3);
}

RANKS_TEST(AdapterRanks, ReplicasTrainThem, 1, 2) { expect_trained_as_alone({.cpu = true}); }

FullyShardedDataParallelPlugin sharded() {
  return {.sharding_strategy = ShardingStrategy::full_shard,
          .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
          .transformer_cls_names_to_wrap = {{"Block"}}};
}

RANKS_TEST(AdapterRanks, ShardedModelsTrainThem, 1, 2) {
  expect_trained_as_alone({.cpu = true, .fsdp_plugin = sharded()});
}

RANKS_TEST(AdapterRanks, RecomputedUnitsHaveThem, 2) {
  auto plugin = sharded();
  plugin.activation_checkpointing = true;
  expect_trained_as_alone({.cpu = true, .fsdp_plugin = plugin});
}

RANKS_TEST(AdapterRanks, WhatIsShardedIsRefusedByName, 2) {
  Gpt gpt = make_gpt();
  Accelerator accelerator({.cpu = true, .fsdp_plugin = sharded()});
  const auto adapter = adapt(gpt);
  auto model = accelerator.prepare(gpt);
  EXPECT_THAT(message_of<ConfigError>([&] { adapter.merge(); }), HasSubstr("residency"));
}

// ---- 8-bit optimizers

optim::AdamW8bit in_few_bits(Gpt& gpt) {
  return optim::AdamW8bit(gpt->parameters(), optim::AdamW8bitOptions(1e-2).min_8bit_size(500));
}

RANKS_TEST(Adam8bitRanks, ACheckpointGoesOnToTheBit, 1, 2) {
  const auto folder = std::filesystem::path(support::scratch_dir()) / "state";
  const auto train = [&](bool resume) {
    Gpt gpt = make_gpt();
    auto optimizer = in_few_bits(gpt);
    Accelerator accelerator({.cpu = true});
    auto [model, opt] = accelerator.prepare(gpt, optimizer);
    if (resume) accelerator.load_state(folder);
    for (int64_t step = resume ? 4 : 0; step < 8; ++step) {
      if (step == 4 && !resume) accelerator.save_state(folder);
      accelerator.backward(loss_of(model, mine(rows(step))));
      opt.step(), opt.zero_grad();
    }
    return gpt;
  };
  const auto straight = train(false), resumed = train(true);
  const auto expected = straight->named_parameters();
  for (const auto& item : resumed->named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), expected[item.key()])) << item.key();
}

RANKS_TEST(Adam8bitRanks, ReplicasStayEqual, 2) {
  Gpt gpt = make_gpt();
  auto optimizer = in_few_bits(gpt);
  Accelerator accelerator({.cpu = true});
  auto [model, opt] = accelerator.prepare(gpt, optimizer);
  for (int64_t step = 0; step < 4; ++step) {
    accelerator.backward(loss_of(model, mine(rows(step))));
    opt.step(), opt.zero_grad();
  }
  for (const auto& p : gpt->parameters()) {
    const auto all = accelerator.gather(p.detach().unsqueeze(0));
    EXPECT_TRUE(torch::equal(all[0], all[1]));
  }
}

RANKS_TEST(Adam8bitRanks, ShardsAreRefusedByName, 1, 2) {
  Gpt gpt = make_gpt();
  auto optimizer = in_few_bits(gpt);
  Accelerator accelerator({.cpu = true, .fsdp_plugin = sharded()});
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.prepare(gpt, optimizer); }),
              AllOf(HasSubstr("AdamW8bit"), HasSubstr("sharded")));
}

RANKS_TEST(Adam8bitRanks, AStateByNamesIsRefusedByName, 1) {
  Gpt gpt = make_gpt();
  auto optimizer = in_few_bits(gpt);
  Accelerator accelerator({.cpu = true});
  auto [model, opt] = accelerator.prepare(gpt, optimizer);
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.get_optimizer_state_dict(opt); }), HasSubstr("AdamW8bit"));
}

}  // namespace
