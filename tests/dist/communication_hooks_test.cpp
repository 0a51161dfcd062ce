// Communication hooks: averages of recorded gradients against PyTorch's own hooks, users' hooks, resumed runs,
// refusals.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using testing::HasSubstr;
using Type = DDPCommunicationHookType;

namespace {

constexpr int64_t kSteps = 8;
// Two are larger than a bucket; two have one shape; some are too small to compress.
const std::vector<std::vector<int64_t>> kShapes = {{600, 500}, {500}, {600, 450}, {64, 48}, {64, 48}, {40, 3, 5}, {7}};

struct RecordedImpl : torch::nn::Module {
  RecordedImpl() {
    for (size_t i = 0; i < kShapes.size(); ++i)
      weights.push_back(register_parameter("w" + std::to_string(i), torch::zeros(kShapes[i])));
  }
  torch::Tensor forward(const std::vector<torch::Tensor>& gradients) {
    auto loss = (weights[0] * gradients[0]).sum();
    for (size_t i = 1; i < weights.size(); ++i) loss = loss + (weights[i] * gradients[i]).sum();
    return loss;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Recorded);

std::vector<torch::Tensor> gradients_of(int64_t step, int64_t r) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + 10 * step + r));
  std::vector<torch::Tensor> all;
  for (const auto& shape : kShapes) all.push_back(torch::randn(shape, generator));
  return all;
}

template <class M> void run_step(Accelerator& accelerator, M& model, Recorded& net, int64_t step) {
  net->zero_grad();
  accelerator.backward(model(gradients_of(step, rank())));
}

struct Config {
  const char* name;
  DistributedDataParallelKwargs kwargs;
  nlohmann::json options = nlohmann::json::object();
  double tolerance = 1e-6;
};

std::vector<Config> configs() {
  const auto power = [](const PowerSGDOptions& options, Type type = Type::power_sgd) {
    return DistributedDataParallelKwargs{.bucket_cap_mb = 1, .comm_hook = type, .comm_state_option = options};
  };
  auto wrapped = power({.start_powerSGD_iter = 2});
  wrapped.comm_wrapper = Type::bf16;
  return {
      {"fp16", {.bucket_cap_mb = 1, .comm_hook = Type::fp16}},
      {"bf16", {.bucket_cap_mb = 1, .comm_hook = Type::bf16}},
      {"wrapped_fp16", {.bucket_cap_mb = 1, .comm_hook = Type::bf16, .comm_wrapper = Type::fp16}},
      {"rank_1", power({.start_powerSGD_iter = 3}), {{"start_powerSGD_iter", 3}}},
      {"rank_4",
       power({.matrix_approximation_rank = 4, .start_powerSGD_iter = 2}),
       {{"matrix_approximation_rank", 4}, {"start_powerSGD_iter", 2}}},
      {"batched_shapes",
       power({.matrix_approximation_rank = 2, .start_powerSGD_iter = 2, .batch_tensors_with_same_shape = true}),
       {{"matrix_approximation_rank", 2}, {"start_powerSGD_iter", 2}, {"batch_tensors_with_same_shape", true}}},
      {"cold",
       power({.start_powerSGD_iter = 2, .warm_start = false, .random_seed = 7}),
       {{"start_powerSGD_iter", 2}, {"warm_start", false}, {"random_seed", 7}}},
      {"forgetful",
       power({.start_powerSGD_iter = 2, .use_error_feedback = false}),
       {{"start_powerSGD_iter", 2}, {"use_error_feedback", false}}},
      {"epsilon",
       power({.start_powerSGD_iter = 2, .min_compression_rate = 0.1, .orthogonalization_epsilon = 1e-1}),
       {{"start_powerSGD_iter", 2}, {"min_compression_rate", 0.1}, {"orthogonalization_epsilon", 1e-1}}},
      {"one_matrix", power({.start_powerSGD_iter = 3}, Type::batched_power_sgd), {{"start_powerSGD_iter", 3}}},
      {"wrapped_power", wrapped, {{"start_powerSGD_iter", 2}}},
  };
}

const char* hook_name(Type type) {
  constexpr const char* kNames[] = {"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"};
  return kNames[static_cast<size_t>(type)];
}

}  // namespace

TEST(CommunicationHooks, AverageAsPyTorchsDo) {
  if (!support::is_rank()) {
    SKIP_WITHOUT_PYTHON();
    nlohmann::json plan{{"shapes", kShapes}, {"steps", kSteps}, {"ranks", 2}};
    for (const auto& config : configs())
      plan["configurations"][config.name] = {{"hook", hook_name(config.kwargs.comm_hook)},
                                             {"wrapper", hook_name(config.kwargs.comm_wrapper)},
                                             {"options", config.options}};
    const std::string folder = support::scratch_dir();
    std::ofstream(folder + "/plan.json") << plan;
    const auto peer = support::run_python("tests/dist/communication_hooks_peer.py", {folder});
    ASSERT_EQ(peer.exit_code, 0) << peer.output;
    return support::expect_ranks_pass("CommunicationHooks.AverageAsPyTorchsDo", {.world_size = 2});
  }
  for (const auto& config : configs()) {
    SCOPED_TRACE(config.name);
    const auto expected = load_safetensors(support::scratch_dir() + "/" + config.name + ".safetensors");
    Accelerator accelerator({.cpu = true, .kwargs_handlers = {config.kwargs}});
    Recorded net;
    auto model = accelerator.prepare(net);
    for (int64_t step = 0; step < kSteps; ++step) {
      run_step(accelerator, model, net, step);
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const auto found = net->weights[i].grad().flatten().slice(0, 0, c10::nullopt, 13);
        const auto& theirs = expected.at(std::to_string(step) + "." + std::to_string(i));
        ASSERT_LE((found - theirs).abs().max().item<double>(), config.tolerance)
            << "step " << step << ", parameter " << i;
      }
    }
    const auto exact = (gradients_of(kSteps - 1, 0)[0] + gradients_of(kSteps - 1, 1)[0]) / 2;
    EXPECT_GT((net->weights[0].grad() - exact).abs().max().item<double>(), 1e-6) << "nothing was compressed";
  }
}

// All ranks get the same of several buckets, on more ranks than two.
RANKS_TEST(CommunicationHooks, RanksAgree, 3) {
  for (const auto& config : configs()) {
    SCOPED_TRACE(config.name);
    Accelerator accelerator({.cpu = true, .kwargs_handlers = {config.kwargs}});
    Recorded net;
    auto model = accelerator.prepare(net);
    for (int64_t step = 0; step < 5; ++step) run_step(accelerator, model, net, step);
    for (const auto& weight : net->weights) {
      const auto all = accelerator.gather(weight.grad().unsqueeze(0));
      EXPECT_TRUE(all[0].equal(all[1]) && all[0].equal(all[2]));
    }
  }
}

// Results are those of matrices one by one; products are fewer, as the two of 64 x 48 make one.
RANKS_TEST(CommunicationHooks, MatricesOfOneShapeAreMultipliedAtOnce, 2) {
  static std::atomic<int64_t> products;
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        if (call.name() == std::string_view("aten::bmm")) ++products;
        return nullptr;
      }));
  const auto products_of_a_step = [](bool batched) {
    const PowerSGDOptions options{.start_powerSGD_iter = 2, .batch_tensors_with_same_shape = batched};
    Accelerator accelerator({.cpu = true,
                             .kwargs_handlers = {DistributedDataParallelKwargs{.comm_hook = Type::power_sgd,
                                                                               .comm_state_option = options}}});
    Recorded net;
    auto model = accelerator.prepare(net);
    for (int64_t step = 0; step < 3; ++step) {
      products = 0;
      run_step(accelerator, model, net, step);
    }
    return products.load();
  };
  EXPECT_EQ(products_of_a_step(false), 3 * 5) << "a left factor, a right one and their product for each matrix";
  EXPECT_EQ(products_of_a_step(true), 3 * 4);
  at::removeCallback(handle);
}

RANKS_TEST(CommunicationHooks, AResumedRunIsTheUninterruptedOneBitByBit, 2) {
  for (const auto type : {Type::power_sgd, Type::batched_power_sgd}) {
    SCOPED_TRACE(hook_name(type));
    const DistributedDataParallelKwargs kwargs{
        .bucket_cap_mb = 1, .comm_hook = type, .comm_state_option = {.start_powerSGD_iter = 2}};
    const std::string folder = support::scratch_dir() + "/" + hook_name(type);
    std::vector<std::vector<torch::Tensor>> expected;
    {
      Accelerator accelerator({.cpu = true, .kwargs_handlers = {kwargs}});
      Recorded net;
      auto model = accelerator.prepare(net);
      for (int64_t step = 0; step < 9; ++step) {
        if (step == 5) accelerator.save_state(folder);
        run_step(accelerator, model, net, step);
        if (step < 5) continue;
        expected.emplace_back();
        for (const auto& weight : net->weights) expected.back().push_back(weight.grad().clone());
      }
    }
    Accelerator accelerator({.cpu = true, .kwargs_handlers = {kwargs}});
    Recorded net;
    auto model = accelerator.prepare(net);
    accelerator.load_state(folder);
    for (int64_t step = 5; step < 9; ++step) {
      run_step(accelerator, model, net, step);
      for (size_t i = 0; i < kShapes.size(); ++i)
        ASSERT_TRUE(net->weights[i].grad().equal(expected[static_cast<size_t>(step - 5)][i]))
            << "step " << step << ", parameter " << i;
    }
    Accelerator plain({.cpu = true});
    Recorded other;
    auto without = plain.prepare(other);
    EXPECT_THAT(message_of<CheckpointError>([&] { plain.load_state(folder); }),
                HasSubstr("state of communication hooks"));
  }
}

namespace {

struct MatrixImpl : torch::nn::Module {
  MatrixImpl() { weight = register_parameter("weight", torch::zeros({36, 36})); }
  torch::Tensor forward(const torch::Tensor& gradient) { return (weight * gradient).sum(); }
  torch::Tensor weight;
};
TORCH_MODULE(Matrix);

}  // namespace

// PyTorch's keeps the NaN of one overflow, and of one gradient of zeros, for ever.
RANKS_TEST(CommunicationHooks, PowerSgdGoesOnAfterOverflowsAndZeros, 2, 3) {
  const std::vector<std::pair<Type, int64_t>> kinds{
      {Type::power_sgd, 1}, {Type::power_sgd, 4}, {Type::batched_power_sgd, 1}};
  for (const auto& [type, approximation] : kinds) {
    SCOPED_TRACE(approximation);
    SCOPED_TRACE(hook_name(type));
    Accelerator accelerator(
        {.kwargs_handlers = {DistributedDataParallelKwargs{
             .comm_hook = type,
             .comm_state_option = {.matrix_approximation_rank = approximation, .start_powerSGD_iter = 2}}}});
    Matrix net;
    auto model = accelerator.prepare(net);
    // One direction, which any rank of approximation holds.
    const auto direction = torch::outer(torch::arange(1, 37).to(torch::kFloat), torch::ones({36}));
    const double inf = std::numeric_limits<double>::infinity();
    for (const double factor : {1.0, 1.0, 1.0, 2.0, inf, 1.0, 0.0, 0.0, 2.0, 1.0}) {
      const double ours = factor == inf ? (rank() == 1 ? inf : 1.0) : factor * static_cast<double>(1 + rank());
      net->zero_grad();
      accelerator.backward(model(direction * ours));
      if (factor == inf) continue;  // the program throws it away
      const double mean = factor * static_cast<double>(1 + accelerator.num_processes()) / 2;
      EXPECT_LE((net->weight.grad() - direction * mean).abs().max().item<double>(), 1e-3) << factor;
    }
  }
}

RANKS_TEST(CommunicationHooks, UsersHooksAverage, 2, 3) {
  int calls = 0;
  const parallel::CommunicationHook hook = [&](parallel::GradientBucket& bucket, parallel::HookGroup& group) {
    ++calls;
    EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
    const auto sum = group.wait(group.all_reduce(bucket.buffer.clone()));
    const auto rows = group.wait(group.all_gather(bucket.buffer)).view({group.world_size(), -1});
    EXPECT_LE((rows.sum(0) - sum).abs().max().item<double>(), 1e-5);
    return group.all_reduce(bucket.buffer.div(group.world_size())).then([](const at::Tensor& mean) {
      return mean * 2;
    });
  };
  Accelerator accelerator(
      {.cpu = true,
       .kwargs_handlers = {DistributedDataParallelKwargs{.bucket_cap_mb = 1, .communication_hook = hook}}});
  Recorded net;
  auto model = accelerator.prepare(net);
  for (int64_t step = 0; step < 3; ++step) {
    run_step(accelerator, model, net, step);
    auto mean = torch::zeros(kShapes[2]);
    for (int64_t r = 0; r < support::world_size(); ++r) mean += gradients_of(step, r)[2];
    EXPECT_LE((net->weights[2].grad() - mean * 2 / support::world_size()).abs().max().item<double>(), 1e-5);
  }
  EXPECT_GT(calls, 3);
  EXPECT_EQ(accelerator.receipts()["DistributedDataParallelKwargs.communication_hook"].state, ReceiptState::acted);
}

RANKS_TEST(CommunicationHooks, AResultOfAnotherSizeIsNamed, 2) {
  const parallel::CommunicationHook hook = [](parallel::GradientBucket& bucket, parallel::HookGroup&) {
    return parallel::GradientFuture(bucket.buffer.narrow(0, 0, 3));
  };
  Accelerator accelerator(
      {.cpu = true, .kwargs_handlers = {DistributedDataParallelKwargs{.communication_hook = hook}}});
  Recorded net;
  auto model = accelerator.prepare(net);
  EXPECT_THAT(message_of<ConfigError>([&] { run_step(accelerator, model, net, 0); }),
              HasSubstr("found a result of 3 elements"));
}

// A rank that is killed while others compress ends their wait.
TEST(CommunicationHooks, AKilledRankEndsTheWait) {
  if (!support::is_rank()) {
    const auto results = support::run_test_in_ranks("CommunicationHooks.AKilledRankEndsTheWait", {.world_size = 2});
    EXPECT_EQ(results[1].signal, SIGKILL) << results[1].output;
    EXPECT_EQ(results[0].exit_code, 0) << results[0].output;
    return;
  }
  Accelerator accelerator(
      {.cpu = true,
       .kwargs_handlers = {DistributedDataParallelKwargs{
           .bucket_cap_mb = 1, .comm_hook = Type::power_sgd, .comm_state_option = {.start_powerSGD_iter = 2}}}});
  Recorded net;
  auto model = accelerator.prepare(net);
  EXPECT_THAT(message_of<CommError>([&] {
                for (int64_t step = 0; step < 10; ++step) {
                  if (rank() == 1 && step == 4) raise(SIGKILL);
                  run_step(accelerator, model, net, step);
                }
              }),
              HasSubstr("rank 1"));
}

RANKS_TEST(CommunicationHooks, StatisticsAreWrittenAsOftenAsAskedFor, 2) {
  testing::internal::CaptureStderr();
  Accelerator accelerator(
      {.cpu = true,
       .kwargs_handlers = {DistributedDataParallelKwargs{
           .bucket_cap_mb = 1,
           .comm_hook = Type::power_sgd,
           .comm_state_option = {.start_powerSGD_iter = 2, .compression_stats_logging_frequency = 3}}}});
  Recorded net;
  auto model = accelerator.prepare(net);
  for (int64_t step = 0; step < 7; ++step) run_step(accelerator, model, net, step);
  const std::string text = testing::internal::GetCapturedStderr();
  const std::string expected = rank() == 0 ? "PowerSGD: after 2 steps" : "";
  EXPECT_THAT(text, HasSubstr(expected));
  EXPECT_EQ(text.find("after 5 steps") != std::string::npos, rank() == 0);
  EXPECT_EQ(text.find("after 3 steps"), std::string::npos);
}

TEST(CommunicationHookSettings, WhatCanNotWorkIsRefusedByName) {
  const auto refusal = [](const DistributedDataParallelKwargs& kwargs) {
    return message_of<ConfigError>([&] { Accelerator accelerator({.cpu = true, .kwargs_handlers = {kwargs}}); });
  };
  EXPECT_THAT(refusal({.dim = 1}), HasSubstr("dim is 1, expected 0"));
  EXPECT_THAT(refusal({.check_reduction = true}), HasSubstr("check_reduction is true, expected false"));
  EXPECT_THAT(refusal({.comm_wrapper = Type::fp16}), HasSubstr("comm_wrapper is fp16 without a comm_hook"));
  EXPECT_THAT(refusal({.comm_hook = Type::fp16, .comm_wrapper = Type::power_sgd}),
              HasSubstr("comm_wrapper is power_sgd, expected no, fp16 or bf16"));
  EXPECT_THAT(refusal({.comm_hook = Type::fp16, .comm_state_option = {.warm_start = false}}),
              HasSubstr("comm_state_option is set, but comm_hook is fp16"));
  EXPECT_THAT(refusal({.comm_hook = Type::power_sgd, .comm_state_option = {.start_powerSGD_iter = 1}}),
              HasSubstr("start_powerSGD_iter is 1, expected at least 2"));
  EXPECT_THAT(refusal({.comm_hook = Type::power_sgd, .comm_state_option = {.matrix_approximation_rank = 0}}),
              HasSubstr("matrix_approximation_rank is 0"));
  EXPECT_THAT(
      refusal({.comm_hook = Type::batched_power_sgd, .comm_state_option = {.batch_tensors_with_same_shape = true}}),
      HasSubstr("batch_tensors_with_same_shape is set, but batched_power_sgd"));
  const InitProcessGroupKwargs file{.init_method = "file:///tmp/x"};
  PartialState::reset();
  EXPECT_THAT(message_of<ConfigError>([&] { Accelerator accelerator({.cpu = true, .kwargs_handlers = {file}}); }),
              HasSubstr("init_method is 'file:///tmp/x', expected env://"));
}

RANKS_TEST(CommunicationHookSettings, InitMethodSaysWhereRanksMeet, 2) {
  const std::string port = std::getenv("MASTER_PORT");
  setenv("MASTER_PORT", "99999", 1);  // no port
  Accelerator accelerator(
      {.cpu = true, .kwargs_handlers = {InitProcessGroupKwargs{.init_method = "tcp://127.0.0.1:" + port}}});
  EXPECT_EQ(accelerator.gather(torch::full({1}, rank())).sum().item<int64_t>(), 1);
}

RANKS_TEST(CommunicationHookSettings, AreNotForShardedModels, 2) {
  const auto refusal = [](const DistributedDataParallelKwargs& kwargs) {
    return message_of<ConfigError>([&] {
      Accelerator accelerator(
          {.cpu = true, .fsdp_plugin = FullyShardedDataParallelPlugin{}, .kwargs_handlers = {kwargs}});
    });
  };
  EXPECT_THAT(refusal({.comm_hook = Type::power_sgd}), HasSubstr("comm_hook is power_sgd, but models are sharded"));
  EXPECT_THAT(refusal({.dim = 2}), HasSubstr("dim is 2"));
  const parallel::CommunicationHook hook = [](parallel::GradientBucket& bucket, parallel::HookGroup&) {
    return parallel::GradientFuture(bucket.buffer);
  };
  EXPECT_THAT(refusal({.communication_hook = hook}), HasSubstr("communication_hook is set, but models are sharded"));
}
