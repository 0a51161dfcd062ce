/// States of a model under DeepSpeed that leave the GPU for a while.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "gpu.hpp"
#include "message_of.hpp"
#include "parallel/sharding/counts.hpp"
#include "ranks.hpp"
#include "residency/member.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;
using enum OffloadStateTypeEnum;
using testing::HasSubstr;

class GpuOffloadStates : public GpuTest {};

int64_t on_device() {
  synchronize();
  return memory().devices.front().allocated;
}

/// Transfers give their memory back on threads of their own.
bool falls_below(int64_t bytes) {
  for (int i = 0; i < 400; ++i) {
    if (on_device() < bytes) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

struct Training {
  Training(int64_t stage, const std::string& precision, const std::string& more = "")
      : accelerator({.mixed_precision = precision,
                     .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 16,
                       "fp16": {"enabled": "auto", "initial_scale_power": 4}, "bf16": {"enabled": "auto"},
                       "zero_optimization": {"stage3_param_persistence_threshold": 0, "stage": )" +
                                                                         std::to_string(stage) + more + "}}"},
                     .kwargs_handlers = {kGlooGroup}}),
        net(64, 4) {}
  template <class Between> std::vector<at::Tensor> train(Between&& between) {
    auto [m, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-2));
    for (uint64_t step = 0; step < 4; ++step) {
      between(m, step);
      const auto input = numbers({16, 64}, 10 * step + static_cast<uint64_t>(support::is_rank() ? support::rank() : 0));
      accelerator.backward(loss_of(m(input.to(net->layers[0]->weight.scalar_type()))));
      between(m, step);
      optimizer.step();
      optimizer.zero_grad();
    }
    std::vector<at::Tensor> weights;
    for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
    return weights;
  }
  Accelerator accelerator;
  Mlp net;
};

/// Everything leaves, by and by or at once, and what was allocated is given back.
void leaves_and_comes_back() {
  for (int64_t stage = 1; stage <= 3; ++stage)
    for (const std::string precision : {"no", "bf16", "fp16"})
      for (const bool pinned : {false, true}) {
        SCOPED_TRACE("stage " + std::to_string(stage) + ", " + precision + (pinned ? ", pinned" : ""));
        start_again();
        const auto expected = Training(stage, precision).train([](auto&, uint64_t) {});
        start_again();
        const int64_t others = on_cuda() ? on_device() : 0;  // the expected weights, above all
        Training run(stage, precision);
        const auto found = run.train([&](auto& m, uint64_t step) {
          const auto before = on_cuda() ? on_device() : 0;
          const auto frees = [&](std::initializer_list<OffloadStateTypeEnum> which, bool frees_any) {
            const auto until_now = on_cuda() ? on_device() : 0;
            m.offload_states({.include = {which}, .pin_memory = pinned, .non_blocking = step % 2 == 0});
            if (on_cuda() && frees_any) EXPECT_TRUE(falls_below(until_now)) << static_cast<int>(*which.begin());
          };
          frees({optim_states}, step > 0);
          // In fp32 one rank has one copy of the values.
          const bool one_copy = support::is_rank() ? false : precision == "no";
          frees({hp_params}, !one_copy);
          if (step > 0) {
            const at::NoGradGuard no_grad;  // text is generated meanwhile, say
            EXPECT_EQ(m(numbers({2, 64}, 1).to(run.net->layers[0]->weight.scalar_type())).size(1), 64);
          }
          const bool has_gradients = m.core()->engine->gradient(run.net->layers[0]->weight)->value.defined();
          frees({lp_grads}, has_gradients);
          // With several ranks nothing is whole before the first forward.
          frees({lp_params, contiguous_grad_buffer}, step > 0 || !support::is_rank());
          EXPECT_THAT(support::message_of<ConfigError>([&] { m(numbers({2, 64}, 1)); }), HasSubstr("'lp_params'"));
          if (on_cuda())
            EXPECT_TRUE(falls_below(others + (before - others) / 4))
                << on_device() - others << " of " << before - others << " bytes";
          if (step == 1) m.save_checkpoint(support::scratch_dir());
          m.reload_states(step % 2 == 0);
        });
        for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(found[i], expected[i])) << i;
      }
}

/// A share of the masters is stepped on the host (offload_optimizer.ratio), the rest where the model computes.
void a_share_is_stepped_on_the_host() {
  const auto train = [](const std::string& precision, const std::string& offload) {
    start_again();
    return Training(3, precision, offload).train([](auto&, uint64_t) {});
  };
  for (const std::string precision : {"no", "bf16"}) {
    SCOPED_TRACE(precision);
    const auto expected = train(precision, "");
    int64_t before = counts::read(parallel::ShardingCount::parts_offloaded);
    const auto offloaded_at = [&](const std::string& ratio) {
      const auto found = train(precision, R"(, "offload_optimizer": {"device": "cpu", "ratio": )" + ratio + "}");
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::allclose(found[i].to(at::kCPU, at::kFloat), expected[i].to(at::kCPU, at::kFloat), 1e-2, 1e-3))
            << ratio << ", " << i;
      const int64_t now = counts::read(parallel::ShardingCount::parts_offloaded);
      return now - std::exchange(before, now);
    };
    const int64_t all = offloaded_at("1.0");
    if (!on_cuda()) continue;
    EXPECT_EQ(offloaded_at("0.5"), all / 2);
    EXPECT_EQ(offloaded_at("0.0"), 0);
  }
}
TEST_F(GpuOffloadStates, AShareIsSteppedOnTheHost) { a_share_is_stepped_on_the_host(); }

TEST_F(GpuOffloadStates, AShareIsSteppedOnTheHostByTwoRanks) {
  if (!support::is_rank()) return in_two_ranks();
  a_share_is_stepped_on_the_host();
}

TEST_F(GpuOffloadStates, OfOneRank) { leaves_and_comes_back(); }

TEST_F(GpuOffloadStates, OfTwoRanks) {
  if (!support::is_rank()) return in_two_ranks();
  leaves_and_comes_back();
}

/// Code that asks for the bytes themselves is told where they are.
TEST_F(GpuOffloadStates, BytesThatAreAwayAreNamed) {
  NEEDS_DEVICE("nothing leaves");
  start_again();
  Training run(2, "no");
  auto [m, optimizer] = run.accelerator.prepare(run.net, torch::optim::SGD(run.net->parameters(), 0.1));
  m.offload_states();
  EXPECT_THAT(support::message_of<std::exception>([&] { run.net->layers[0]->weight.data_ptr(); }),
              HasSubstr("'layer0.weight' is offloaded"));
  m.reload_states();
  EXPECT_NE(run.net->layers[0]->weight.data_ptr(), nullptr);
}

}  // namespace
}  // namespace gpu_test
