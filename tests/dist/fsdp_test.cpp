/// Sharded training against plain training of the same model on the same global batch, over strategies, wrap policies and numbers of ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "accelerate/residency.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;
namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width, int64_t heads) : heads(heads) {
    l1 = register_module("l1", nn::LayerNorm(nn::LayerNormOptions({width})));
    l2 = register_module("l2", nn::LayerNorm(nn::LayerNormOptions({width})));
    // No bias: a key's has no effect and a gradient of pure rounding noise, which AdamW would scale up to full steps.
    qkv = register_module("qkv", nn::Linear(nn::LinearOptions(width, 3 * width).bias(false)));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    auto q = qkv(l1(x)).view({b, t, 3, heads, d / heads}).permute({2, 0, 3, 1, 4});
    x = x + out(at::scaled_dot_product_attention(q[0], q[1], q[2], {}, 0.0, true).transpose(1, 2).reshape({b, t, d}));
    return x + down(torch::gelu(up(l2(x))));
  }
  nn::LayerNorm l1{nullptr}, l2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  int64_t heads;
};
TORCH_MODULE(Block);

/// Head tied to the embedding; one parameter of a single element; odd sizes.
struct GptImpl : nn::Module {
  explicit GptImpl(int64_t vocabulary = 61, int64_t width = 24, int64_t layers = 3) {
    wte = register_module("wte", nn::Embedding(vocabulary, width));
    for (int64_t i = 0; i < layers; ++i) blocks.push_back(register_module("h" + std::to_string(i), Block(width, 4)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    scale = register_parameter("scale", torch::ones({1}));
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = wte(ids);
    for (auto& block : blocks) x = block->forward(x);
    return torch::linear(norm(x) * scale, wte->weight);
  }
  nn::Embedding wte{nullptr};
  std::vector<Block> blocks;
  nn::LayerNorm norm{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Gpt);

constexpr int64_t kGlobalBatch = 12, kTokens = 9, kVocabulary = 61;

at::Tensor batch_of(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step));
  return torch::randint(0, kVocabulary, {kGlobalBatch, kTokens}, generator, torch::kLong);
}
at::Tensor mine(const at::Tensor& global, const Accelerator& accelerator) {
  const int64_t share = kGlobalBatch / accelerator.num_processes();
  return global.narrow(0, accelerator.process_index() * share, share);
}
template <class Model>
at::Tensor loss_of(Model& model, const at::Tensor& ids) {
  const auto logits = model(ids.narrow(1, 0, kTokens - 1));
  return torch::cross_entropy_loss(logits.reshape({-1, kVocabulary}), ids.narrow(1, 1, kTokens - 1).reshape({-1}));
}
Gpt make_gpt() {
  torch::manual_seed(11);
  return Gpt();
}
/// Two groups with their own settings, as everybody trains transformers.
torch::optim::AdamW make_adamw(Gpt& model) {
  std::vector<at::Tensor> decay, rest;
  for (const auto& p : model->parameters()) (p.dim() > 1 ? decay : rest).push_back(p);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decay, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(0.1)));
  groups.emplace_back(rest, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-2).weight_decay(0.0)));
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(3e-3));
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

/// fp32 sums in another order: 20 steps of AdamW keep losses within 1e-5 and parameters within 1e-4 (a sign change of a tiny gradient moves a weight by up to lr).
void expect_close(const Run& plain, const Run& sharded, const std::string& what) {
  ASSERT_EQ(plain.losses.size(), sharded.losses.size());
  for (size_t i = 0; i < plain.losses.size(); ++i) EXPECT_NEAR(plain.losses[i], sharded.losses[i], 1e-5) << what << " step " << i;
  if (support::rank() != 0) return;
  for (const auto& [name, value] : plain.state) {
    const auto found = sharded.state.find(name);
    ASSERT_NE(found, sharded.state.end()) << what << " " << name;
    EXPECT_LT((found->second - value).abs().max().item<double>(), 1e-4) << what << " " << name;
  }
}

const std::vector<std::pair<std::string, FullyShardedDataParallelPlugin>> kPlugins = {
    {"full_shard by class", {.sharding_strategy = ShardingStrategy::full_shard, .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap, .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"full_shard, prefetching", {.sharding_strategy = ShardingStrategy::full_shard, .backward_prefetch = BackwardPrefetch::backward_pre, .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap, .forward_prefetch = true, .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"full_shard, post", {.sharding_strategy = ShardingStrategy::full_shard, .backward_prefetch = BackwardPrefetch::backward_post, .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap, .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"shard_grad_op by size", {.sharding_strategy = ShardingStrategy::shard_grad_op, .auto_wrap_policy = AutoWrapPolicy::size_based_wrap, .min_num_params = 2000}},
    {"full_shard, one unit", {.sharding_strategy = ShardingStrategy::full_shard, .auto_wrap_policy = AutoWrapPolicy::no_wrap}},
    {"no_shard", {.sharding_strategy = ShardingStrategy::no_shard}},
    {"version 2", {.fsdp_version = 2, .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap, .transformer_cls_names_to_wrap = {{"Block"}}}},
    {"version 2, not resharded", {.fsdp_version = 2, .reshard_after_forward = false, .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap, .transformer_cls_names_to_wrap = {{"Block"}}}},
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
    for (const auto& [name, value] : unsharded.state) EXPECT_TRUE(torch::equal(sharded.state.at(name), value)) << what << " " << name;
  }
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

}  // namespace
