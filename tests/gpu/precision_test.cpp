/// Half precision with loss scaling, and the optimizers' fused kernels.
#include <accelerate/accelerate.hpp>

#include "gpu.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuPrecision : public GpuTest {};
class GpuFusedOptimizers : public GpuTest {};

/// Notes the type in which its layer computed.
struct WatchedImpl : torch::nn::Module {
  WatchedImpl() : linear(register_module("linear", torch::nn::Linear(16, 16))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = linear(x);
    computed_in = y.scalar_type();
    return y;
  }
  torch::nn::Linear linear;
  at::ScalarType computed_in = at::ScalarType::Undefined;
};
TORCH_MODULE(Watched);

TEST_F(GpuPrecision, AutocastChoosesTheTypeAndGivesFp32Back) {
  for (const auto& [name, type] :
       {std::pair("no", at::kFloat), std::pair("bf16", at::kBFloat16), std::pair("fp16", at::kHalf)}) {
    start_again();
    Accelerator accelerator({.mixed_precision = name});
    Watched net;
    const auto m = accelerator.prepare_model(net);
    const auto y = m(numbers({4, 16}, 1));
    EXPECT_EQ(net->computed_in, type) << name;
    EXPECT_EQ(y.scalar_type(), at::kFloat) << name;
    EXPECT_EQ(net->linear->weight.scalar_type(), at::kFloat) << name;
    const auto exact = torch::linear(numbers({4, 16}, 1), net->linear->weight, net->linear->bias);
    EXPECT_TRUE(close(y, exact, type == at::kFloat ? 1e-6 : type == at::kHalf ? 4e-3 : 3e-2)) << name;
  }
}

TEST_F(GpuPrecision, AnOverflowSkipsTheStepAndHalvesTheScale) {
  Accelerator accelerator({.mixed_precision = "fp16", .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024}}});
  Mlp net(16, 2);
  auto [m, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-2));
  const auto step = [&, &m = m, &optimizer = optimizer](double factor) {
    accelerator.backward(factor * loss_of(m(numbers({8, 16}, 1))));
    optimizer.step();
    optimizer.zero_grad();
  };
  step(1);
  EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
  EXPECT_EQ(accelerator.scaler()->get_scale(), 1024);
  const auto before = net->layers[0]->weight.detach().clone();
  step(1e30);  // far beyond fp16
  EXPECT_TRUE(accelerator.optimizer_step_was_skipped());
  EXPECT_TRUE(optimizer.step_was_skipped());
  EXPECT_EQ(accelerator.scaler()->get_scale(), 512);
  EXPECT_TRUE(same_bits(net->layers[0]->weight, before));
  step(1);
  EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
  EXPECT_FALSE(same_bits(net->layers[0]->weight, before));
}

/// Clipping sees gradients without the scale.
TEST_F(GpuPrecision, ClippingUnscalesFirst) {
  const auto norm_with = [](const char* precision) {
    start_again();
    Accelerator accelerator({.mixed_precision = precision});
    Mlp net(16, 2);
    auto [m, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 1e-2));
    accelerator.backward(loss_of(m(numbers({8, 16}, 1))));
    return accelerator.clip_grad_norm_(net->parameters(), 1e6).item<double>();
  };
  const double exact = norm_with("no");
  EXPECT_NEAR(norm_with("fp16"), exact, 0.01 * exact);
}

/// The scale is on the device of the loss, the offloaded masters and their gradients are on the host.
TEST_F(GpuPrecision, MastersOnTheHostAreUnscaledThere) {
  const auto train = [](bool offload, bool clip) {
    start_again();
    Accelerator accelerator(
        {.mixed_precision = "fp16",
         .fsdp_plugin = FullyShardedDataParallelPlugin{.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                                                       .cpu_offload = CPUOffload(offload),
                                                       .transformer_cls_names_to_wrap = {{"Linear"}}},
         .kwargs_handlers = {GradScalerKwargs{.init_scale = 1024}}});
    Mlp net(64, 3);
    auto [m, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-2));
    std::vector<double> losses;
    for (uint64_t step = 0; step < 6; ++step) {
      const auto loss = loss_of(m(numbers({16, 64}, 1)));
      losses.push_back(loss.item<double>());
      accelerator.backward(step == 2 ? 1e30 * loss : loss);
      if (clip) accelerator.clip_grad_norm_(net->parameters(), 1e6);
      optimizer.step();
      EXPECT_EQ(optimizer.step_was_skipped(), step == 2) << step;
      optimizer.zero_grad();
    }
    EXPECT_EQ(accelerator.scaler()->get_scale(), 512);
    return losses;
  };
  for (const bool clip : {false, true}) {
    const auto expected = train(false, clip), found = train(true, clip);
    EXPECT_EQ(found[3], found[2]) << "the third step was skipped";
    EXPECT_LT(found[5], 0.9 * found[0]);
    // Optimizers' kernels round otherwise on the host, and some weights then become another number of fp16.
    for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 2e-3 * expected[i]) << i;
  }
}

/// The same gradients through the fused kernels and through LibTorch's steps; with `scale`, multiplied by it, and
/// divided by the kernel.
template <class Optimizer, class Options> void compare_fused(const Options& options, double scale = 0) {
  Mlp fused_net(64, 3), plain_net(64, 3);
  fused_net->to(device());
  plain_net->to(device());
  const auto scaler = scale > 0 ? std::make_shared<optim::GradScaler>(GradScalerKwargs{.init_scale = scale}) : nullptr;
  const PartialState state;
  Optimizer plain(plain_net->parameters(), options);
  const AcceleratedOptimizer fused(std::make_shared<Optimizer>(fused_net->parameters(), options), true, scaler,
                                   {.fused = true});
  for (uint64_t step = 0; step < 6; ++step) {
    if (scaler) scaler->scale(torch::ones({}, device()));
    const auto a = fused_net->parameters(), b = plain_net->parameters();
    for (size_t i = 0; i < a.size(); ++i) {
      b[i].mutable_grad() = numbers(b[i].sizes(), 10 * step + i);
      a[i].mutable_grad() = scale > 0 ? b[i].grad() * scale : b[i].grad().clone();
    }
    fused.step();
    EXPECT_TRUE(fused.step_was_fused());
    plain.step();
    // One rounding in the kernel for about ten in the plain step, of 6e-8 each, added up over six steps.
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(close(a[i], b[i], 5e-6)) << "step " << step << ", " << i;
  }
}

TEST_F(GpuFusedOptimizers, AdamW) { compare_fused<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2)); }
TEST_F(GpuFusedOptimizers, AdamWWithAmsgrad) {
  compare_fused<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true));
}
TEST_F(GpuFusedOptimizers, Adam) {
  compare_fused<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).weight_decay(0.1));
}
TEST_F(GpuFusedOptimizers, SgdWithMomentum) {
  compare_fused<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
}
TEST_F(GpuFusedOptimizers, PlainSgd) { compare_fused<torch::optim::SGD>(torch::optim::SGDOptions(1e-2)); }
TEST_F(GpuFusedOptimizers, TheKernelDividesByTheScale) {
  compare_fused<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2), 1024);
  compare_fused<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9), 1024);
}

}  // namespace
}  // namespace gpu_test
