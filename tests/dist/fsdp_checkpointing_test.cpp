/// activation_checkpointing: models that know nothing of it train as without, bit for bit, and keep less.

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "counting_allocator.hpp"
#include "fsdp_of.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "residency/counters.hpp"
#include "small_gpt.hpp"

namespace {

using namespace accelerate;
using support::message_of;
using support::on_both_stores;
using support::reset_states;
using testing::HasSubstr;
namespace nn = torch::nn;

FullyShardedDataParallelPlugin plugin_of(bool checkpointing, const char* unit = "Block") {
  return {.sharding_strategy = ShardingStrategy::full_shard,
          .backward_prefetch = BackwardPrefetch::backward_pre,
          .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
          .activation_checkpointing = checkpointing,
          .transformer_cls_names_to_wrap = {{unit}}};
}

/// A block that does what makes running again hard.
struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module("norm", nn::BatchNorm1d(width));
    up = register_module("up", nn::Linear(width, 2 * width));
    down = register_module("down", nn::Linear(width, width));
    calls = register_buffer("calls", torch::zeros({1}));
  }
  at::Tensor forward(at::Tensor x) {
    auto y = torch::dropout(norm(x * 1), 0.2, is_training());
    calls.add_(1);                         // a tensor of the module, in place
    const auto parts = up(y).chunk(2, 1);  // several results, views
    auto z = parts[0] * torch::sigmoid(parts[1]);
    z.view({-1}).add_(0.1);  // through a view of its own
    at::Tensor noise;
    {
      torch::NoGradGuard no_grad;
      noise = torch::randn_like(z) * z;  // random numbers of a factory
    }
    z = z + 0.01 * noise;
    z = z * (0.5 + at::bernoulli(torch::full_like(z, 0.5), own));  // of a generator of its own
    z = z + parts[0] * torch::tensor({0.5F, 0.25F})[1];            // filled by pointer
    z = torch::where(z > 0, z, z * z.new_full({1}, 0.5));
    auto sum = torch::cat({down(z), x}, 1).index({torch::indexing::Slice(), torch::indexing::Slice(0, x.size(1))});
    x.mul_(0.9).add_(sum);  // into its input
    if (x.sum().item<float>() > 1e9F) x = x * 0;
    return torch::relu(x) * 1;
  }
  nn::BatchNorm1d norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>(11);
  at::Tensor calls;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Module {
  NetImpl() {
    torch::manual_seed(7);
    first = register_module("first", nn::Linear(6, 8));
    for (int64_t i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(8)));
    last = register_module("last", nn::Linear(8, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool checkpoint_myself = false) {
    auto y = first(x) * 1;
    for (auto& block : blocks)
      y = checkpoint_myself
              ? checkpoint([block](const at::Tensor& z) mutable { return block->forward(z.clone()); }, {}, y)
              : block->forward(y);
    return last(y);
  }
  nn::Linear first{nullptr}, last{nullptr};
  std::vector<Block> blocks;
};
TORCH_MODULE(Net);

struct Training {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> state;
  double calls = 0;
};

Training train(const FullyShardedDataParallelPlugin& plugin, const std::optional<std::string>& precision = {},
               bool checkpoint_myself = false) {
  reset_states();
  Accelerator accelerator({.mixed_precision = precision, .cpu = true, .fsdp_plugin = plugin});
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  auto [m, opt] = accelerator.prepare(net, optimizer);
  torch::manual_seed(20 + support::rank());
  Training training;
  for (int64_t step = 0; step < 4; ++step) {
    auto loss = m(torch::randn({5, 6}), checkpoint_myself).pow(2).mean();
    training.losses.push_back(loss.item<double>());
    accelerator.backward(loss);
    opt.step(), opt.zero_grad();
  }
  for (auto& [name, value] : accelerator.get_state_dict(m))
    if (name.find("norm.running") == std::string::npos && name.find("num_batches") == std::string::npos)
      training.state[name] = value.clone();  // moved twice, as in PyTorch
  training.calls = net->blocks[0]->calls.item<double>();
  return training;
}

void expect_same(const Training& plain, const Training& other, const std::string& what) {
  EXPECT_EQ(plain.losses, other.losses) << what;
  EXPECT_EQ(plain.calls, other.calls) << what << ": in-place changes to buffers happen once";
  for (const auto& [name, value] : plain.state)
    EXPECT_TRUE(torch::equal(other.state.at(name), value)) << what << " " << name;
}

RANKS_TEST(FsdpCheckpointing, TrainsBitByBitAsWithout, 1, 2, 3) {
  on_both_stores([](const std::string& store) {
    expect_same(train(plugin_of(false)), train(plugin_of(true)), store);
    expect_same(train(plugin_of(false), "bf16"), train(plugin_of(true), "bf16"), store + ", bf16");
    expect_same(train(plugin_of(false), {}, true), train(plugin_of(true), {}, true),
                store + ", and the model checkpoints by itself");
    // Units that hold several smaller ones in between.
    expect_same(train(plugin_of(false)), train(plugin_of(true, "Linear")), store + ", other units");
    auto plugin = plugin_of(true);
    plugin.fsdp_version = 2, plugin.sharding_strategy.reset(), plugin.backward_prefetch.reset(),
    plugin.activation_checkpointing_offload = true;
    const int64_t offloaded = counts::read(residency::ResidencyCount::inputs_offloaded);
    expect_same(train(plugin_of(false)), train(plugin), store + ", version 2, offloaded");
    EXPECT_GT(counts::read(residency::ResidencyCount::inputs_offloaded), offloaded);
    auto whole = plugin_of(false), whole_checkpointed = plugin_of(true);
    whole.sharding_strategy = whole_checkpointed.sharding_strategy = ShardingStrategy::no_shard;
    expect_same(train(whole), train(whole_checkpointed), store + ", NO_SHARD");
  });
}

TEST(FsdpCheckpointing, KeepsLess) {
  auto& memory = support::CountingAllocator::install();
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
    int64_t kept[2];
    for (const bool checkpointing : {false, true}) {
      reset_states();
      auto plugin = plugin_of(checkpointing);
      plugin.sharding_strategy = strategy;
      Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
      support::Gpt model(61, 64, 8);
      auto m = accelerator.prepare(model);
      const auto ids = torch::randint(0, 61, {8, 64}, torch::kLong);
      const int64_t before = memory.live();
      auto loss = m(ids).sum();
      kept[checkpointing] = memory.live() - before;
      accelerator.backward(loss);
    }
    // A block saves some 20 times its input; with checkpointing the inputs of 8 blocks are left, and what is outside of
    // them.
    EXPECT_LT(kept[1] * 4, kept[0]) << kept[1] << " bytes instead of " << kept[0];
    std::printf("[ kept     ] %lld bytes instead of %lld\n", static_cast<long long>(kept[1]),
                static_cast<long long>(kept[0]));
  }
}

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {2 * context->get_saved_variables()[0] * gradients[0]};
  }
};

enum class Odds { none, function, thrown };

struct OddImpl : nn::Module {
  OddImpl() { linear = register_module("linear", nn::Linear(3, 3)); }
  at::Tensor forward(const at::Tensor& x, Odds what) {
    const auto y = linear(x);
    if (what == Odds::function) return Square::apply(y);
    if (what == Odds::thrown) throw std::runtime_error("thrown by the model");
    return y.sigmoid();
  }
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Odd);

TEST(FsdpCheckpointing, WhatCannotRunAgainIsAnError) {
  reset_states();
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin_of(true, "Linear")});
  Odd odd;
  auto m = accelerator.prepare(odd);
  EXPECT_THAT(
      message_of<NotBuiltError>([&] {
        m(torch::ones({2, 3}), Odds::function);
      }),
      HasSubstr(
          "activation checkpointing of 'linear': found a tensor saved for backward by something that is no operator"));
  // After an exception nothing is written down any more.
  EXPECT_THROW(m(torch::ones({2, 3}), Odds::thrown), std::runtime_error);
  auto x = torch::ones({2}, torch::requires_grad());
  Square::apply(x).sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({2}, 2.0)));
  accelerator.backward(m(torch::ones({2, 3}), Odds::none).sum());
  EXPECT_TRUE(support::fsdp_of(m)->local_shard(odd->linear->weight).grad().defined());
  // Written to between forward and backward.
  const auto input = torch::ones({2, 3});
  auto loss = m(input, Odds::none).sum();
  input.add_(1);
  EXPECT_THAT(message_of<ShapeError>([&] { accelerator.backward(loss); }),
              HasSubstr("activation checkpointing of 'linear'"));
}

TEST(FsdpCheckpointing, NeedsUnits) {
  reset_states();
  auto one_unit = plugin_of(true);
  one_unit.auto_wrap_policy = AutoWrapPolicy::no_wrap;
  Accelerator accelerator({.cpu = true, .fsdp_plugin = one_unit});
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.prepare(Odd()); }), HasSubstr("auto_wrap_policy makes none"));
}

}  // namespace
