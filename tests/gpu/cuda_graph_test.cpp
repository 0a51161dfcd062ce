/// Recorded models on the device that records them; on others they are refused.
#include <accelerate/accelerate.hpp>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include <chrono>
#include <cstdio>

#include "gpu.hpp"
#include "message_of.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;
using support::message_of;
using testing::HasSubstr;

class GpuCudaGraph : public GpuTest {
 protected:
  static Mlp model_here(int64_t width, int64_t depth) {
    Mlp net(width, depth);
    net->to(device());
    net->eval();
    return net;
  }
};

TEST_F(GpuCudaGraph, IsRefusedWhereThereIsNone) {
  if (on_gpu()) GTEST_SKIP() << "there is one";
  const auto net = model_here(8, 2);
  EXPECT_THAT(message_of<Error>([&] {
                CudaGraphModel(net, numbers({2, 8}, 1));
              }),
              testing::AllOf(HasSubstr("CudaGraphModel: "), HasSubstr("call the model as it is")));
}

TEST_F(GpuCudaGraph, GivesWhatTheModelGives) {
  NEEDS_CUDA("nothing records");
  const at::NoGradGuard no_grad;
  const auto net = model_here(64, 12);
  CudaGraphModel graph(net, numbers({8, 64}, 1));
  Accelerator accelerator;
  const auto prepared = accelerator.prepare(graph);
  std::vector<at::Tensor> found;
  for (uint64_t i = 0; i < 20; ++i) found.push_back(prepared(numbers({8, 64}, i)));
  for (uint64_t i = 0; i < 20; ++i)
    EXPECT_TRUE(close(found[i], Mlp(net)(numbers({8, 64}, i)), 1e-6))
        << "call " << i << ", which later ones left alone";
  net->layers[3]->weight.mul_(2);
  EXPECT_TRUE(close(graph->forward(numbers({8, 64}, 5)), Mlp(net)(numbers({8, 64}, 5)), 1e-6))
      << "weights changed in place";
  EXPECT_THAT(message_of<ShapeError>([&] { graph->forward(numbers({9, 64}, 1)); }), HasSubstr("[9, 64]"));
  EXPECT_THAT(message_of<ShapeError>([&] { graph->forward(numbers({8, 64}, 1, at::kCPU)); }), HasSubstr("on cpu"));
}

/// Calls on other streams wait for each other: they share the recording's memory.
TEST_F(GpuCudaGraph, StreamsDoNotMixTheirCalls) {
  NEEDS_CUDA("nothing records");
  const at::NoGradGuard no_grad;
  const auto net = model_here(512, 8);
  CudaGraphModel graph(net, numbers({64, 512}, 1));
  std::vector<at::Tensor> inputs, found;
  for (uint64_t i = 0; i < 16; ++i) inputs.push_back(numbers({64, 512}, i));
  synchronize();
  for (const auto& input : inputs) {
    const c10::StreamGuard side(
        c10::impl::VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device(), /*isHighPriority=*/false));
    found.push_back(graph->forward(input));
  }
  synchronize();
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(close(found[i], Mlp(net)(inputs[i]), 1e-6)) << "call " << i;
}

struct WaitingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x * x.sum().item<float>(); }
};
TORCH_MODULE(Waiting);

TEST_F(GpuCudaGraph, ForwardsThatWaitForTheDeviceAreRefused) {
  NEEDS_CUDA("nothing records");
  Waiting waiting;
  waiting->eval();
  const auto x = numbers({4, 4}, 1);
  EXPECT_THAT(message_of<ConfigError>([&] { CudaGraphModel(waiting, x); }), HasSubstr("can't record it"));
  synchronize();
  const at::NoGradGuard no_grad;
  const auto net = model_here(16, 2);
  CudaGraphModel graph(net, numbers({4, 16}, 1));  // the device records others as before
  EXPECT_TRUE(close(graph->forward(numbers({4, 16}, 2)), Mlp(net)(numbers({4, 16}, 2)), 1e-6));
}

struct NoiseImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + torch::randn_like(x); }
};
TORCH_MODULE(Noise);

TEST_F(GpuCudaGraph, RandomNumbersGoOnFromCallToCall) {
  NEEDS_CUDA("nothing records");
  const at::NoGradGuard no_grad;
  Noise noise;
  noise->eval();
  const auto x = numbers({64}, 1);
  CudaGraphModel graph(noise, x);
  torch::manual_seed(7);
  const at::Tensor first = graph->forward(x), second = graph->forward(x);
  EXPECT_FALSE(torch::equal(first, second));
  torch::manual_seed(7);
  EXPECT_TRUE(same_bits(noise(x), first));
  EXPECT_TRUE(same_bits(noise(x), second));
}

/// Its purpose: many small kernels. How much sooner they start is for readers of the log of a real GPU.
TEST_F(GpuCudaGraph, TellHowSoonSmallKernelsAreLaunched) {
  NEEDS_CUDA("times of a GPU");
  const at::NoGradGuard no_grad;
  auto net = model_here(64, 100);
  const auto x = numbers({1, 64}, 1);
  CudaGraphModel graph(net, x);
  const auto seconds_of = [](auto&& f) {
    f();
    synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 50; ++i) f();
    synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 50;
  };
  const double eager = seconds_of([&] { net(x); }), graphed = seconds_of([&] { graph->forward(x); });
  std::printf("a forward of 100 small layers: %.3f ms, as a graph %.3f ms\n", 1e3 * eager, 1e3 * graphed);
  EXPECT_TRUE(same_bits(graph->forward(x), net(x)));
}

}  // namespace
}  // namespace gpu_test
