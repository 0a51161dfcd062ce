/// ZeRO++: what travels in 8 and 4 bits, and between whom, against the written-out formula and one plain process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "accelerate/accelerate.hpp"
#include "accelerate/comm/comms_log.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/zero_handles.hpp"
#include "accelerate/residency.hpp"
#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "utils/log.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kRows = 20, kColumns = 104, kBlock = 256;  // eight blocks and a part of one
constexpr int k8Bits = 127, k4Bits = 7;

/// The formula, number by number.
at::Tensor as_codes(const at::Tensor& values, int most) {
  const at::Tensor all = values.detach().to(at::kFloat).flatten().clone();
  float* const number = all.data_ptr<float>();
  for (int64_t begin = 0; begin < all.numel(); begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, all.numel());
    float largest = 0;
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::abs(number[i]));
      finite &= std::isfinite(number[i]);
    }
    const auto scale = static_cast<float>(c10::BFloat16(largest / static_cast<float>(most)));
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int64_t i = begin; i < end; ++i)
      number[i] = finite ? std::clamp<float>(std::nearbyint(number[i] * inverse), -most, most) * scale
                         : std::numeric_limits<float>::quiet_NaN();
  }
  return all.view(values.sizes());
}

/// Its argument is the gradient of its weight, and the weight is the gradient of its argument.
struct MatrixImpl : torch::nn::Module {
  MatrixImpl() {
    weight = register_parameter("weight", torch::randn({kRows, kColumns}));
    bias = register_parameter("bias", torch::zeros({7}));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = weight.detach().clone();
    return (weight * x).sum() + bias.sum();
  }
  at::Tensor weight, bias, seen;
};
TORCH_MODULE(Matrix);

struct TwoMatricesImpl : torch::nn::Module {
  TwoMatricesImpl() {
    torch::manual_seed(3);
    first = register_module("first", Matrix());
    second = register_module("second", Matrix());
  }
  at::Tensor forward(const at::Tensor& x) { return first(x) + second(x); }
  Matrix first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoMatrices);

/// Nothing stays, and modules come one by one.
DeepSpeedPlugin with(const std::string& more, const std::string& top = R"(, "gradient_clipping": 0)") {
  return {.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {
    "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0)" +
                          more + "}" + top + "}"};
}
const std::string kWeights = R"(, "zero_quantized_weights": true)",
                  kGradients = R"(, "zero_quantized_gradients": true)", kPairs = R"(, "zero_hpz_partition_size": 2)";
std::string precision_of(at::ScalarType dtype) {
  return std::string(dtype == at::kHalf       ? R"(, "fp16": {"enabled": true, "loss_scale": 1})"
                     : dtype == at::kBFloat16 ? R"(, "bf16": {"enabled": true})"
                                              : "") +
         R"(, "gradient_clipping": 0)";
}

at::Tensor input_of(int64_t rank) {
  torch::manual_seed(70 + rank);
  return torch::randn({kRows, kColumns});
}

/// One of each two neighbours' averages, as codes, of averages of codes; `machine` ranks are on one.
at::Tensor average_as_codes(at::ScalarType dtype, int64_t ranks, int64_t machine) {
  at::Tensor all = torch::zeros({kRows, kColumns});
  for (int64_t first = 0; first < ranks; first += machine) {
    at::Tensor some = torch::zeros({kRows, kColumns});
    for (int64_t rank = first; rank < first + machine; ++rank) some.add_(as_codes(input_of(rank).to(dtype), k4Bits));
    some.div_(static_cast<double>(machine));
    all.add_(machine < ranks ? as_codes(some, k4Bits) : some);
  }
  return all.div_(static_cast<double>(ranks / machine)).to(dtype);
}

int64_t times(const std::string& operation, int64_t bytes) {
  for (const auto& record : comm::comms_records())
    if (record.operation == operation && record.bytes == bytes) return record.count;
  return 0;
}

}  // namespace

RANKS_TEST(ZeroPlusPlus, WeightsTravelInEightBits, 2, 3, 5) {
  const auto ranks = static_cast<double>(support::world_size());
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(at::toString(dtype));
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = with(kWeights, precision_of(dtype))});
    TwoMatrices model;
    at::Tensor master = model->first->weight.detach().to(dtype).to(at::kFloat);
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
    for (int64_t step = 0; step < 3; ++step) {
      // Averages are exact.
      at::Tensor x = torch::full({kRows, kColumns}, ranks * static_cast<double>(support::rank() + step), dtype);
      x.requires_grad_();
      accelerator.backward(m(x));
      const at::Tensor expected = as_codes(master, k8Bits).to(dtype);
      EXPECT_TRUE(m->first->seen.equal(expected));
      EXPECT_TRUE(x.grad().equal(expected + as_codes(safe_get_full_fp32_param(m->second->weight), k8Bits).to(dtype)))
          << "in backward";
      opt.step(), opt.zero_grad();
      double sum = 0;
      for (int64_t rank = 0; rank < support::world_size(); ++rank) sum += static_cast<double>(rank + step);
      master = master - 0.25 * sum;
      EXPECT_TRUE(safe_get_full_fp32_param(m->first->weight).equal(master)) << "what is stepped on keeps its precision";
      torch::NoGradGuard no_grad;
      m(x);
      EXPECT_TRUE(m->first->seen.equal(as_codes(master, k8Bits).to(dtype))) << "in evaluation";
    }
    // A rank that writes one element changes no other one.
    {
      GatheredParameters whole({m->first->weight}, /*modifier_rank=*/0);
      torch::NoGradGuard no_grad;
      if (support::rank() == 0) m->first->weight[2][3] = 0.5;
      whole.close();
    }
    master[2][3] = 0.5;
    EXPECT_TRUE(safe_get_full_fp32_param(m->first->weight).equal(master));
  }
}

RANKS_TEST(ZeroPlusPlus, GradientsTravelInFourBits, 2, 3, 5) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(at::toString(dtype));
    support::reset_states();
    Accelerator accelerator({.cpu = true, .deepspeed_plugin = with(kGradients, precision_of(dtype))});
    TwoMatrices model;
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
    accelerator.backward(m(input_of(support::rank()).to(dtype)));
    EXPECT_TRUE(safe_get_full_grad(m->first->weight)
                    .to(dtype)
                    .equal(average_as_codes(dtype, support::world_size(), support::world_size())));
    EXPECT_TRUE(safe_get_full_grad(m->first->bias).equal(torch::ones({7}))) << "of one dimension: as it is";
  }
}

/// Parameters up to stage3_param_persistence_threshold are gathered once a step, as in DeepSpeed.
RANKS_TEST(ZeroPlusPlus, WhatStaysTravelsAsItIs, 2) {
  Accelerator accelerator({.cpu = true,
                           .deepspeed_plugin = DeepSpeedPlugin{
                               .hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
                               "zero_optimization": {"stage": 3, "zero_quantized_weights": true}})"}});
  TwoMatrices model;
  const at::Tensor exact = model->first->weight.detach().clone();
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
  m(input_of(0));
  EXPECT_TRUE(m->first->seen.equal(exact));
}

/// Two of four ranks are on a machine.
TEST(ZeroPlusPlus, BetweenMachinesAveragesTravel) {
  constexpr int64_t kRanks = 4, kNear = 2;
  if (!support::is_rank())
    return support::expect_ranks_pass("ZeroPlusPlus.BetweenMachinesAveragesTravel",
                                      {.world_size = kRanks, .env = {{"LOCAL_WORLD_SIZE", std::to_string(kNear)}}});
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(at::toString(dtype));
    support::reset_states();
    Accelerator accelerator({.cpu = true,
                             .deepspeed_plugin = with(kWeights + kGradients + kPairs,
                                                      precision_of(dtype) + R"(, "comms_logger": {"enabled": true})")});
    TwoMatrices model;
    const at::Tensor master = model->first->weight.detach().to(dtype).to(at::kFloat);
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
    constexpr int64_t kBlocks = 12;  // nine, and so many that each rank has whole ones
    const auto bytes8 = [](int64_t blocks) { return blocks * (kBlock + 2); };
    const auto bytes4 = [](int64_t blocks) { return blocks * (kBlock / 2 + 2); };
    for (int64_t step = 0; step < 2; ++step) {
      comm::reset_comms_log();
      const at::Tensor x = input_of(support::rank()).to(dtype).requires_grad_();
      const at::Tensor loss = m(x);
      EXPECT_EQ(times("all_gather", bytes8(kBlocks / kRanks)), 2) << "from all, in forward";
      EXPECT_EQ(times("all_gather", bytes8(kBlocks / kNear)), 0);
      const at::Tensor seen = m->first->seen + m->second->seen;
      EXPECT_TRUE(m->first->seen.equal(as_codes(master, k8Bits).to(dtype)));
      accelerator.backward(loss);
      EXPECT_TRUE(x.grad().equal(seen)) << "the same codes, from the neighbour";
      EXPECT_EQ(times("all_gather", bytes8(kBlocks / kRanks)), 2);
      // The second one has stayed; so does the first one as soon as it is known to follow at once.
      EXPECT_EQ(times("all_gather", bytes8(kBlocks / kNear)), step == 0 ? 1 : 0);
      EXPECT_EQ(times("reduce_scatter", bytes4(kBlocks)), 2) << "on the machine";
      EXPECT_EQ(times("reduce_scatter", bytes4(kBlocks / kNear)), 2) << "between machines";
      EXPECT_TRUE(safe_get_full_grad(m->first->weight).to(dtype).equal(average_as_codes(dtype, kRanks, kNear)));
      opt.zero_grad();
    }
    // Bytes that leave a machine: of 3 M of stage 3 in 16 bits 0.75 M, and the scales.
    if (dtype == at::kBFloat16) {
      const double all = 2.0 * kBlocks * kBlock;
      const double leaves = static_cast<double>(bytes8(kBlocks) + 0 + kNear * bytes4(kBlocks / kNear)) / all;
      EXPECT_NEAR(leaves, 0.75, 0.01);
    }
    // A number that is not finite is none on any rank.
    at::Tensor broken = input_of(support::rank()).to(dtype);
    if (support::rank() == 3) broken[0][1] = std::numeric_limits<double>::infinity();
    accelerator.backward(m(broken));
    const at::Tensor gradient = safe_get_full_grad(m->first->weight).flatten();
    EXPECT_TRUE(gradient.narrow(0, 0, kBlock).isnan().all().item<bool>());
    EXPECT_TRUE(gradient.narrow(0, kBlock, kBlock).isfinite().all().item<bool>());
  }
}

RANKS_TEST(ZeroPlusPlus, AnOverflowIsSeenByAll, 2, 3) {
  Accelerator accelerator(
      {.cpu = true,
       .deepspeed_plugin = with(kGradients, R"(, "fp16": {"enabled": true, "initial_scale_power": 4, "hysteresis": 1},
                                         "gradient_clipping": 0)")});
  TwoMatrices model;
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
  const at::Tensor before = safe_get_full_fp32_param(m->first->weight).clone();
  at::Tensor x = input_of(support::rank()).to(at::kHalf);
  if (support::rank() == 1) x[0][1] = 60000;  // times the scale
  accelerator.backward(m(x));
  opt.step();
  EXPECT_TRUE(accelerator.optimizer_step_was_skipped());
  EXPECT_TRUE(safe_get_full_fp32_param(m->first->weight).equal(before));
  opt.zero_grad();
  accelerator.backward(m(input_of(support::rank()).to(at::kHalf)));
  opt.step();
  EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
  EXPECT_FALSE(safe_get_full_fp32_param(m->first->weight).equal(before));
}

namespace {

std::vector<at::Tensor> trained_alone(int64_t ranks) {
  ThreeLayers model;
  auto optimizer = with_momentum(model->parameters());
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < kMicroSteps; ++micro)
      for (int64_t rank = 0; rank < ranks; ++rank)
        (loss_of(model(batch_of(step, micro, rank))) / static_cast<double>(ranks * kMicroSteps)).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5);
    optimizer.step();
  }
  return model->parameters();
}

std::vector<at::Tensor> trained_with(const std::string& more) {
  support::reset_states();
  Accelerator accelerator(
      {.cpu = true, .deepspeed_plugin = with(more, R"(, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5)")});
  ThreeLayers model;
  auto [m, opt] = accelerator.prepare(model, with_momentum(model->parameters()));
  train(accelerator, m, opt);
  std::vector<at::Tensor> weights;
  for (const auto& parameter : m->parameters()) weights.push_back(safe_get_full_fp32_param(parameter));
  return weights;
}

}  // namespace

/// Neighbours keep what has been gathered for backward; the numbers are those of stage 3.
RANKS_TEST(ZeroPlusPlus, PairsTrainAsOneProcess, 2, 4) {
  const auto expected = trained_alone(support::world_size());
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    const std::string said = support::warnings_of([&] { expect_equal(trained_with(kPairs), expected, 1e-5); });
    // Two ranks of two are all; in shared memory nothing goes.
    if (support::world_size() == 4 && store == "shared memory 1" && support::rank() == 0)
      EXPECT_THAT(said, HasSubstr("zero_hpz_partition_size has no effect"));
    else EXPECT_THAT(said, Not(HasSubstr("has no effect")));
  });
}

/// All of it, with accumulation and clipping: as far off as the codes are, whatever the transport is.
RANKS_TEST(ZeroPlusPlus, TrainsNearOneProcess, 2, 4) {
  const auto expected = trained_alone(support::world_size());
  std::vector<at::Tensor> before;
  support::on_both_stores([&](const std::string& store) {
    SCOPED_TRACE(store);
    const auto found = trained_with(kWeights + kGradients + kPairs);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_LT((found[i] - expected[i]).abs().max().item<double>(), 0.05) << i;
      EXPECT_TRUE(expected[i].dim() < 2 || !torch::allclose(found[i], expected[i], 1e-4, 1e-4)) << i;
      EXPECT_TRUE(before.empty() || found[i].equal(before[i])) << "the transport must not matter";
    }
    before = found;
  });
}

// ---- frozen weights

namespace {

TwoMatrices with_frozen_first() {
  TwoMatrices model;
  model->first->weight.requires_grad_(false);
  return model;
}
const std::string kFrozen = R"(, "zero_quantized_nontrainable_weights": true)";

}  // namespace

RANKS_TEST(ZeroPlusPlus, FrozenWeightsAreKeptInEightBits, 1, 2, 3) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(at::toString(dtype));
    support::reset_states();
    Accelerator accelerator(
        {.cpu = true,
         .deepspeed_plugin = with(kFrozen + R"(, "stage3_gather_16bit_weights_on_model_save": true)",
                                  precision_of(dtype) + R"(, "comms_logger": {"enabled": true})")});
    auto model = with_frozen_first();
    const at::Tensor kept = as_codes(model->first->weight.to(dtype), k8Bits);
    const at::Tensor trained = model->second->weight.detach().to(dtype).to(at::kFloat);
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->second->parameters(), 0.25));
    comm::reset_comms_log();
    at::Tensor x = input_of(0).to(dtype).requires_grad_();
    accelerator.backward(m(x));
    EXPECT_TRUE(m->first->seen.equal(kept.to(dtype))) << "the same on any number of ranks";
    EXPECT_TRUE(x.grad().equal(m->first->seen + m->second->seen));
    const int64_t ranks = support::world_size();
    EXPECT_EQ(times("all_gather", (ranks == 2 ? 10 : 9) / ranks * (kBlock + 2)) > 0, ranks > 1);
    EXPECT_FALSE(m->first->weight.grad().defined());
    opt.step();
    EXPECT_TRUE(torch::allclose(safe_get_full_fp32_param(m->second->weight), trained - 0.25 * input_of(0).to(dtype)));
    // The values that are read, and saved, are those that are kept.
    EXPECT_TRUE(safe_get_full_fp32_param(m->first->weight).to(dtype).equal(kept.to(dtype)));
    const auto state = accelerator.get_state_dict(m);
    EXPECT_TRUE(support::rank() > 0 || state.at("first.weight").to(dtype).equal(kept.to(dtype)));
    const std::string folder = support::scratch_dir() + "/saved" + at::toString(dtype);
    accelerator.save_state(folder);
    // Writes are rounded at once; blocks without a write stay.
    at::Tensor other = kept.clone();
    {
      torch::NoGradGuard no_grad;
      m->first->weight[0].fill_(3);
      other[0].fill_(3);
    }
    other = as_codes(other, k8Bits);
    EXPECT_TRUE(safe_get_full_fp32_param(m->first->weight).to(dtype).equal(other.to(dtype)));
    m(x);
    EXPECT_TRUE(m->first->seen.equal(other.to(dtype)));
    accelerator.load_state(folder);
    m(x);
    EXPECT_TRUE(m->first->seen.equal(kept.to(dtype))) << "as it was";
    m->first->weight.requires_grad_();
    EXPECT_THAT(support::message_of<ConfigError>([&] { m(x); }),
                HasSubstr("'first.weight' requires a gradient, but it was frozen in prepare()"));
  }
}

namespace {

/// The bytes of one rank of four, in a dry run: parameters after prepare(), and what a forward leaves.
std::pair<int64_t, int64_t> bytes_of_rank(const std::string& more) {
  support::reset_states();
  const auto report = dry_run({.num_processes = 4}, [&](const DryRunMark& mark) {
    Accelerator accelerator({.deepspeed_plugin = with(more, R"(, "bf16": {"enabled": true})")});
    auto model = with_frozen_first();
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->second->parameters(), 0.25));
    mark("prepare");
    const auto loss = m(torch::zeros({kRows, kColumns}, at::TensorOptions(accelerator.device()).dtype(at::kBFloat16)));
    mark("forward");
  });
  support::reset_states();
  return {report.phase("prepare").at_end[MemoryUse::parameters], report.phase("forward").at_end.total()};
}

}  // namespace

TEST(ZeroPlusPlusMemory, OfCodesAndOfSecondCopiesIsCounted) {
  constexpr int64_t kElements = 12 * kBlock;  // of a matrix, with padding for four ranks
  const auto plain = bytes_of_rank(""), coded = bytes_of_rank(kFrozen), near = bytes_of_rank(kPairs);
  // In place of fp32 numbers a byte each, and scales.
  const int64_t of_few = (kRows * kColumns + 4 * 16 - 1) / (4 * 16) * (4 * 16);
  EXPECT_EQ(plain.first - coded.first, of_few / 4 * 4 - kElements / kBlock / 4 * (kBlock + 2));
  // The first one's half, in bf16.
  EXPECT_EQ(near.second - plain.second, of_few / 2 * 2);
}

// ---- by FSDP's names

namespace {

FullyShardedDataParallelPlugin fsdp_with(FullyShardedDataParallelPlugin plugin) {
  plugin.fsdp_version = 2;
  plugin.auto_wrap_policy = AutoWrapPolicy::size_based_wrap;
  plugin.min_num_params = 100;
  return plugin;
}

}  // namespace

RANKS_TEST(FsdpFewBits, AreThoseOfZeroPlusPlus, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    Accelerator accelerator(
        {.cpu = true,
         .fsdp_plugin = fsdp_with(
             {.quantized_weights = true, .quantized_gradients = true, .quantized_nontrainable_weights = true})});
    auto model = with_frozen_first();
    const at::Tensor first = model->first->weight.detach().clone(), second = model->second->weight.detach().clone();
    auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->second->parameters(), 0.25));
    accelerator.backward(m(input_of(support::rank())));
    EXPECT_TRUE(m->first->seen.equal(as_codes(first, k8Bits)));
    EXPECT_TRUE(m->second->seen.equal(as_codes(second, k8Bits)));
    EXPECT_TRUE(
        m->second->weight.grad().equal(average_as_codes(at::kFloat, support::world_size(), support::world_size())));
    const auto receipts = accelerator.receipts();
    for (const char* field : {"quantized_weights", "quantized_gradients", "quantized_nontrainable_weights"}) {
      const auto& receipt = receipts[std::string("fsdp_plugin.") + field];
      EXPECT_EQ(receipt.state, ReceiptState::acted) << field << ": " << receipt.effect;
    }
  });
}

/// From the variables that the launcher sets.
RANKS_TEST(FsdpFewBits, ComeFromTheEnvironment, 2) {
  const support::Variable weights("FSDP_QUANTIZED_WEIGHTS", "true"), gradients("FSDP_QUANTIZED_GRADIENTS", "true"),
      frozen("FSDP_QUANTIZED_NONTRAINABLE_WEIGHTS", "true");
  Accelerator accelerator({.cpu = true, .fsdp_plugin = fsdp_with({})});
  auto model = with_frozen_first();
  const at::Tensor first = model->first->weight.detach().clone(), second = model->second->weight.detach().clone();
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->second->parameters(), 0.25));
  accelerator.backward(m(input_of(support::rank())));
  EXPECT_TRUE(m->first->seen.equal(as_codes(first, k8Bits)));
  EXPECT_TRUE(m->second->seen.equal(as_codes(second, k8Bits)));
  EXPECT_TRUE(m->second->weight.grad().equal(average_as_codes(at::kFloat, 2, 2)));
}

/// Operators that write to a weight change its exact value.
RANKS_TEST(FsdpFewBits, WritesAreOfExactValues, 2) {
  Accelerator accelerator({.cpu = true, .fsdp_plugin = fsdp_with({.quantized_weights = true})});
  TwoMatrices model;
  const at::Tensor exact = model->first->weight.detach().clone();
  auto [m, opt] = accelerator.prepare(model, torch::optim::SGD(model->parameters(), 0.25));
  {
    torch::NoGradGuard no_grad;
    m->first->weight.mul_(0.5);
  }
  EXPECT_TRUE(safe_get_full_fp32_param(m->first->weight).equal(exact * 0.5));
  EXPECT_TRUE((m->first->weight * 1).equal(as_codes(exact * 0.5, k8Bits))) << "which is read as it travels";
}

TEST(FsdpFewBits, AreRefusedWhereNothingTravels) {
  for (auto field :
       {&FullyShardedDataParallelPlugin::quantized_weights, &FullyShardedDataParallelPlugin::quantized_gradients}) {
    FullyShardedDataParallelPlugin plugin{.sharding_strategy = ShardingStrategy::no_shard};
    plugin.*field = true;
    EXPECT_THAT(support::message_of<ConfigError>([&] { parallel::resolve(plugin); }),
                HasSubstr("is true, but NO_SHARD leaves the model whole"));
  }
}
