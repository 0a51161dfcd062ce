// find_executable_batch_size around a loop that accumulates: an attempt that fails in the middle of a group leaves
// neither gradients nor a place in the group behind. SGD without clipping: adaptive steps hide gradients too many.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "both_stores.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

using namespace accelerate;
using support::rank;
using support::world_size;

namespace {

enum class Fails { before_backward, within_backward, within_forward };

/// Memory runs out here while `fails` says so.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(5);
    body = register_module("body", torch::nn::Linear(3, 3));
    head = register_module("head", torch::nn::Linear(3, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = torch::tanh(body(x));
    if (fails && at == Fails::within_forward) out_of_memory();
    if (fails && at == Fails::within_backward)
      h.register_hook([](const torch::Tensor& gradient) -> torch::Tensor {
        out_of_memory();
        return gradient;
      });
    return head(h);
  }
  [[noreturn]] static void out_of_memory() { throw std::runtime_error("CUDA error: out of memory"); }

  torch::nn::Linear body{nullptr}, head{nullptr};
  bool fails = false;
  Fails at = Fails::before_backward;
};
TORCH_MODULE(Net);

torch::Tensor rows_of(int64_t micro_step, int64_t size, int64_t r) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * micro_step + r));
  return torch::randn({size, 3}, generator);
}
torch::Tensor loss_of(const torch::Tensor& y) { return (y - 0.3).pow(2).mean(); }

constexpr int64_t kGroup = 4, kMicroSteps = 8, kFits = 2;

void expect_a_fresh_start(Fails at, const AcceleratorOptions& options) {
  Accelerator accelerator(options);
  Net net, plain;
  net->at = at;
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.3));
  int64_t attempts = 0, steps = 0;
  find_executable_batch_size(
      [&](int64_t size) {
        ++attempts;
        steps = 0;
        for (int64_t micro_step = 0; micro_step < kMicroSteps; ++micro_step) {
          const auto scope = accelerator.accumulate(model);
          net->fails = size > kFits && micro_step == 1;  // no step was taken yet
          const auto loss = loss_of(model(rows_of(micro_step, size, rank())));
          if (net->fails && at == Fails::before_backward) NetImpl::out_of_memory();
          accelerator.backward(loss);
          optimizer.step();
          if (accelerator.sync_gradients()) ++steps;
          optimizer.zero_grad();
        }
      },
      {.starting_batch_size = 8, .reduce_batch_size_fn = [](int64_t size) { return size / 2; }});
  EXPECT_EQ(attempts, 3);
  EXPECT_EQ(steps, kMicroSteps / kGroup);

  torch::optim::SGD sgd(plain->parameters(), 0.3);
  for (int64_t micro_step = 0; micro_step < kMicroSteps; ++micro_step) {
    for (int64_t r = 0; r < world_size(); ++r)
      (loss_of(plain(rows_of(micro_step, kFits, r))) / static_cast<double>(world_size() * kGroup)).backward();
    if ((micro_step + 1) % kGroup != 0) continue;
    sgd.step();
    sgd.zero_grad();
  }
  const auto found = accelerator.get_state_dict(model);
  if (rank() == 0)
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(torch::allclose(found.at(item.key()), item.value(), 1e-5, 1e-6)) << item.key();
}

void on_all_failures(AcceleratorOptions options) {
  options.gradient_accumulation_steps = kGroup;
  for (const Fails at : {Fails::before_backward, Fails::within_backward, Fails::within_forward}) {
    SCOPED_TRACE(static_cast<int>(at));
    support::reset_states();
    expect_a_fresh_start(at, options);
  }
}

}  // namespace

RANKS_TEST(FailedAttempt, LeavesNothingOfItsGroup, 1, 2, 3) { on_all_failures({}); }

RANKS_TEST(FailedAttempt, LeavesNothingOfItsGroupWhereModelsAreSharded, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    on_all_failures({.fsdp_plugin = FullyShardedDataParallelPlugin{}});
  });
}

/// Where nobody waits for anybody within an attempt.
RANKS_TEST(FailedAttempt, OfOneRankIsOneOfAll, 1, 2, 3, 5) {
  const PartialState state;
  std::vector<int64_t> tried;
  const auto fits = find_executable_batch_size(
      [&](int64_t size) {
        tried.push_back(size);
        if (rank() == world_size() - 1 && size > 2) NetImpl::out_of_memory();
        return size;
      },
      {.starting_batch_size = 8, .reduce_batch_size_fn = [](int64_t size) { return size / 2; }});
  EXPECT_EQ(fits, 2);
  EXPECT_EQ(tried, (std::vector<int64_t>{8, 4, 2}));
  if (rank() != 0) return;
  find_executable_batch_size(
      [&](int64_t size) {
        if (size > 1) NetImpl::out_of_memory();
      },
      {.starting_batch_size = 8, .all_ranks = false});
}

RANKS_TEST(FailedAttempt, OfOneRankWithinACollectiveIsNamed, 2, 3) {
  Accelerator accelerator;
  Net net;
  net->at = Fails::within_forward;
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.3));
  EXPECT_THAT(support::message_of<CommError>([&, model = model] {
                find_executable_batch_size(
                    [&](int64_t size) {
                      net->fails = rank() == 1;
                      accelerator.backward(loss_of(model(rows_of(0, size, rank()))));
                    },
                    8);
              }),
              testing::HasSubstr("find_executable_batch_size"));
}
