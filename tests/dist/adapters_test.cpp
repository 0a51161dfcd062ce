// Adapters and 8-bit optimizers in real jobs: every way of training gives what one process with all rows gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "accelerate/accelerator/inference.hpp"
#include "accelerate/accelerator/model_summary.hpp"
#include "accelerate/adapters.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/optim/adam8bit.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/residency.hpp"
#include "both_stores.hpp"
#include "codes/kernels/multiply.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "residency/homes/encoded.hpp"
#include "residency/member.hpp"
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

// LibTorch's set_data() leaves nothing of what made an operator on the weight ask its adapter.
RANKS_TEST(AdapterRanks, PrepareFindsThoseOfReplacedWeights, 1) {
  Gpt expected = make_gpt(), gpt = make_gpt();
  const auto expected_adapter = adapt(expected), adapter = adapt(gpt);
  for (const auto& block : gpt->blocks) block->qkv->weight.set_data(block->qkv->weight.clone());
  Accelerator accelerator({.device_placement = false, .cpu = true});  // moving the model would find them, too
  auto model = accelerator.prepare(gpt);
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(model(rows(0)).equal(expected(rows(0))));
}

RANKS_TEST(AdapterRanks, WhatIsShardedIsRefusedByName, 2) {
  Gpt gpt = make_gpt();
  Accelerator accelerator({.cpu = true, .fsdp_plugin = sharded()});
  const auto adapter = adapt(gpt);
  auto model = accelerator.prepare(gpt);
  EXPECT_THAT(message_of<ConfigError>([&] { adapter.merge(); }), HasSubstr("residency"));
}

// ---- on weights in few bits

std::shared_ptr<const DispatchedModel> quantize(Gpt& gpt, const BnbQuantizationConfig& how) {
  return std::make_shared<const DispatchedModel>(load_and_quantize_model(ModelRef(gpt), how, {}, {}));
}
BnbQuantizationConfig int8() {
  return {.load_in_8bit = true, .torch_dtype = at::kFloat, .skip_modules = std::vector<std::string>{}};
}
BnbQuantizationConfig nf4() {
  return {.load_in_4bit = true,
          .bnb_4bit_quant_type = "nf4",
          .bnb_4bit_use_double_quant = true,
          .bnb_4bit_compute_dtype = at::kFloat,
          .torch_dtype = at::kFloat,
          .skip_modules = std::vector<std::string>{}};
}

/// As expect_trained_as_alone(), of codes; here also what is resumed from a checkpoint in the middle.
/// @param others  ranks other than 0 begin with other weights in the layers that are quantized
void expect_codes_trained_as_alone(const AcceleratorOptions& options, const BnbQuantizationConfig& how, bool others) {
  Gpt alone = make_gpt();
  const auto alone_codes = quantize(alone, how);
  const auto reference = adapt(alone);
  auto reference_optimizer = adamw(alone);
  std::vector<double> losses;
  for (int64_t step = 0; step < 4; ++step) {
    const auto loss = loss_of(alone, rows(step));
    loss.backward();
    reference_optimizer.step(), reference_optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  const auto folder = std::filesystem::path(support::scratch_dir()) / "state";
  std::vector<double> found;
  const auto train = [&](int64_t first, int64_t last, bool resume) {
    Accelerator accelerator(options);
    Gpt gpt = make_gpt();
    if (others && support::rank() > 0) {
      const torch::NoGradGuard no_grad;
      for (auto& block : gpt->blocks)
        for (auto& layer : {block->qkv, block->out, block->up, block->down}) layer->weight.mul_(1.5);
    }
    const auto codes = quantize(gpt, how);
    const auto adapter = adapt(gpt);
    auto optimizer = adamw(gpt);
    const auto kept_once = [&] {
      return codes::kernels::is_kept_once(residency::encoded_weight(gpt->blocks[0]->qkv->weight)->codes);
    };
    const bool once = kept_once();
    EXPECT_EQ(once, how.load_in_8bit && codes::kernels::has_fast_instructions()) << "rows of 24 are no blocks of 64";
    auto [model, opt] = accelerator.prepare(gpt, optimizer);
    if (!options.fsdp_plugin) EXPECT_EQ(kept_once(), once) << "rank 0's codes are held beside their packed form";
    if (resume) accelerator.load_state(folder);
    residency::reset_stats();
    for (int64_t step = first; step < last; ++step) {
      const auto loss = loss_of(model, mine(rows(step)));
      accelerator.backward(loss);
      opt.step(), opt.zero_grad();
      found.push_back(accelerator.reduce(loss.detach(), "mean").item<double>());
    }
    const auto stats = residency::stats();
    EXPECT_GT(stats.products_on_codes, 0);
    if (options.fsdp_plugin) {
      const auto* weight = residency::encoded_weight(gpt->blocks[0]->qkv->weight);
      EXPECT_NE(residency::Member::of(weight->codes.data), nullptr) << "they come and go with their unit";
    }
    if (last == 2) accelerator.save_state(folder);
    const auto state = accelerator.get_state_dict(model);
    if (options.fsdp_plugin)
      for (const auto& [name, value] : state)
        EXPECT_EQ(residency::encoded_weight(value), nullptr) << name << " would be asked of all ranks when it is read";
    if (last == 4 && accelerator.is_main_process()) {
      for (const auto& item : alone->named_parameters())
        EXPECT_LT((state.at(item.key()) - item.value()).abs().max().item<double>(), 2e-4) << item.key();
      adapter.save(std::filesystem::path(support::scratch_dir()) / "adapter", state);
      Gpt loaded = make_gpt();
      const auto loaded_codes = quantize(loaded, how);
      load_adapter(loaded, std::filesystem::path(support::scratch_dir()) / "adapter");
      const torch::NoGradGuard no_grad;
      // Products round their inputs to 8 bits: weights that differ by 2e-4 move one of them a step, 1 % here.
      EXPECT_LT((loaded(rows(9)) - alone(rows(9))).abs().max().item<double>(), 2e-2);
    }
    AcceleratorState::reset();
  };
  train(0, 2, false);
  train(2, 4, true);
  for (size_t step = 0; step < losses.size(); ++step) EXPECT_NEAR(found[step], losses[step], 2e-5) << step;
}

RANKS_TEST(CodesRanks, ReplicasTrainAdaptersOnThem, 1, 2) {
  expect_codes_trained_as_alone({.cpu = true}, nf4(), /*others=*/false);
}
RANKS_TEST(CodesRanks, ReplicasTakeThoseOfRank0, 2) {
  expect_codes_trained_as_alone({.cpu = true}, int8(), /*others=*/true);
}
RANKS_TEST(CodesRanks, TheyAreSharded, 1, 2) {
  expect_codes_trained_as_alone({.cpu = true, .fsdp_plugin = sharded()}, nf4(), /*others=*/false);
}
RANKS_TEST(CodesRanks, TheyAreShardedAndRecomputed, 2) {
  auto plugin = sharded();
  plugin.activation_checkpointing = true;
  expect_codes_trained_as_alone({.cpu = true, .fsdp_plugin = plugin}, int8(), /*others=*/true);
}

FullyShardedDataParallelPlugin sharded_by(ShardingStrategy strategy) {
  auto plugin = sharded();
  plugin.sharding_strategy = strategy;
  return plugin;
}
RANKS_TEST(CodesRanks, ReplicasOfShardsTrainAdaptersOnThem, 4) {
  support::on_both_stores([](const std::string&) {
    for (const auto strategy : {ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_zero2}) {
      auto plugin = sharded_by(strategy);
      plugin.dp_replicate_size = 2;
      expect_codes_trained_as_alone({.cpu = true, .fsdp_plugin = plugin}, nf4(), /*others=*/true);
    }
  });
}
RANKS_TEST(CodesRanks, TheyMayBeWholeInUnits, 2) {
  for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::shard_grad_op})
    expect_codes_trained_as_alone({.cpu = true, .fsdp_plugin = sharded_by(strategy)}, int8(), /*others=*/true);
}

RANKS_TEST(CodesRanks, OtherEncodingsAreRefusedByName, 2) {
  Gpt gpt = make_gpt();
  const auto codes = quantize(gpt, support::rank() == 0 ? nf4() : int8());
  Accelerator accelerator({.cpu = true});
  EXPECT_THAT(message_of<ShapeError>([&] { accelerator.prepare(gpt); }),
              AllOf(HasSubstr("int8_rowwise"), HasSubstr("nf4, blocks of 64, nested")));
}

/// Without codes of scales, whose sizes are easier to say.
BnbQuantizationConfig plain_nf4() {
  auto config = nf4();
  config.bnb_4bit_use_double_quant = false;
  return config;
}

RANKS_TEST(CodesRanks, ShardsAreThoseOfCodes, 2) {
  ::setenv("ACCELERATE_SHARED_MEMORY", "0", 1);  // ranks of one host would share the bytes, and fetch nothing
  Gpt gpt = make_gpt();
  const auto codes = quantize(gpt, plain_nf4());
  Accelerator accelerator({.cpu = true, .fsdp_plugin = sharded()});
  auto model = accelerator.prepare(gpt);
  int64_t whole = 0, here = 0, others = 0;
  for (const auto& tensor : accelerator.summary(gpt).tensors)
    if (tensor.place == "nf4 codes, sharded") whole += tensor.bytes, here += tensor.bytes_here;
    else others += tensor.bytes;
  // 4.5 bits an element: a byte for two, and a scale for 64.
  EXPECT_EQ(whole, 24 * 24 * (3 + 1 + 4 + 4) * 3 * 9 / 2 / 8);
  EXPECT_EQ(here, whole / 2);
  residency::reset_stats();
  const torch::NoGradGuard no_grad;
  model(rows(0));
  const auto fetched = residency::stats().bytes_fetched;
  constexpr int64_t kPadding = 64 * 40;  // at most, of all tensors
  EXPECT_GE(fetched, whole);
  EXPECT_LE(fetched, whole + others + kPadding) << "weights would be seven times as much";
}

RANKS_TEST(CodesRanks, ShardedOnesGoWithThePreparedModel, 2) {
  Gpt gpt = make_gpt();
  const auto codes = quantize(gpt, nf4());
  {
    Accelerator accelerator({.cpu = true, .fsdp_plugin = sharded()});
    auto model = accelerator.prepare(gpt);
  }
  AcceleratorState::reset();
  EXPECT_THAT(message_of<ConfigError>([&] {
                torch::linear(torch::ones({1, 24}), gpt->blocks[0]->qkv->weight);
              }),
              HasSubstr("was destroyed"));
}

RANKS_TEST(CodesRanks, StagesKeepTheirOwn, 2) {
  const PartialState state({.cpu = true});
  auto config = plain_nf4();
  config.exact_products = true;
  Gpt gpt = make_gpt(), alone = make_gpt();
  const auto codes = quantize(gpt, config), reference = quantize(alone, config);
  const torch::NoGradGuard no_grad;
  // As many rows as a chunk has, because kernels may round others differently.
  const auto expected = torch::cat({alone(rows(0).narrow(0, 0, 2)), alone(rows(0).narrow(0, 2, 2))});
  auto model = prepare_pippy(gpt, {.gather_output = true}, rows(0));
  const auto found = model(rows(0));
  EXPECT_TRUE(torch::equal(found, expected));
  const auto report = model.report();
  EXPECT_LT(report.held_bytes, 0.7 * static_cast<double>(report.model_bytes));
  // 4.5 bits an element instead of 32.
  EXPECT_LT(report.model_bytes, 24 * 24 * 12 * 3 + 20000);
}

RANKS_TEST(CodesRanks, CheckpointsLeaveThemOut, 2) {
  const auto folder = std::filesystem::path(support::scratch_dir()) / "state";
  Gpt gpt = make_gpt();
  const auto codes = quantize(gpt, nf4());
  Accelerator accelerator({.cpu = true});
  auto model = accelerator.prepare(gpt);
  accelerator.save_state(folder);
  const auto names = SafetensorsFile(folder / "model.safetensors").names();
  EXPECT_THAT(names, testing::Contains("h0.l1.weight"));
  EXPECT_THAT(names, testing::Not(testing::Contains("h0.qkv.weight")));
}

RANKS_TEST(CodesRanks, ACheckpointOfOtherWeightsIsRefused, 1) {
  const auto folder = std::filesystem::path(support::scratch_dir()) / "state";
  {
    Gpt plain = make_gpt();
    Accelerator accelerator({.cpu = true});
    auto model = accelerator.prepare(plain);
    accelerator.save_state(folder);
  }
  AcceleratorState::reset();
  Gpt gpt = make_gpt();
  const auto codes = quantize(gpt, nf4());
  Accelerator accelerator({.cpu = true});
  auto model = accelerator.prepare(gpt);
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }),
              AllOf(HasSubstr("few bits"), HasSubstr("same files")));
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
