// Recorded models: what is repeated, and what is refused. The recorder here is one of the CPU, which repeats by doing
// everything again; tests/gpu/cuda_graph_test.cpp has the GPU's.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/model/cuda_graph.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "model/graphed_call.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace {

using support::message_of;
using testing::AllOf;
using testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 3));
};
TORCH_MODULE(Net);

struct Again : GraphRecording {
  explicit Again(std::function<void()> what) : work(std::move(what)) {}
  void replay() override { work(); }
  std::function<void()> work;
};

int recordings = 0;

std::unique_ptr<GraphRecording> record_on_cpu(const at::Device& device, const std::function<void()>& work) {
  EXPECT_TRUE(device.is_cpu());
  EXPECT_FALSE(c10::GradMode::is_enabled());
  EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  ++recordings;
  work();
  return std::make_unique<Again>(work);
}

class CudaGraph : public testing::Test {
 protected:
  CudaGraph() {
    torch::manual_seed(3);
    net = Net();
    net->eval();
    x = torch::randn({2, 4});
    recordings = 0;
  }
  GraphedCall graph_of(const Tensors& inputs) {
    return GraphedCall(
        net, [this](const Tensors& in) { return Tensors{net(in[0])}; }, inputs, record_on_cpu);
  }
  std::string refusal() {
    return message_of<ConfigError>([&] { graph_of({x}); });
  }
  Net net{nullptr};
  at::Tensor x;
};

TEST_F(CudaGraph, WithoutCudaOneIsToldWhatToUse) {
  if (kCudaRecorder) {
    EXPECT_THAT(message_of<ConfigError>([&] { CudaGraphModel(net, x); }),
                AllOf(HasSubstr("first input is on cpu"), HasSubstr("call the model as it is")));
  } else {
    EXPECT_THAT(message_of<NotBuiltError>([&] { CudaGraphModel(net, x); }),
                AllOf(HasSubstr("no CUDA graphs"), HasSubstr("docs/gpu.md"), HasSubstr("call the model as it is"),
                      HasSubstr("CompiledModel")));
  }
}

TEST_F(CudaGraph, RepeatsWithEachCallsInputsAndGivesResultsOfTheirOwn) {
  GraphedCall graph = graph_of({x});
  EXPECT_EQ(recordings, 1);
  const torch::NoGradGuard no_grad;
  const auto y = torch::randn({2, 4}), transposed = torch::randn({4, 2}).t();
  const at::Tensor first = graph({x}).at(0), second = graph({y}).at(0);
  EXPECT_EQ(recordings, 1);
  EXPECT_TRUE(torch::equal(first, net(x))) << "the next call left it alone";
  EXPECT_TRUE(torch::equal(second, net(y)));
  // The graph reads a copy in another order than the transposed one, for which some processors have other kernels.
  EXPECT_TRUE(torch::allclose(graph({transposed}).at(0), net(transposed), 1e-6, 1e-7));
  second.zero_();
  EXPECT_TRUE(torch::equal(graph({y}).at(0), net(y))) << "what callers do to their results stays theirs";
  EXPECT_TRUE(torch::equal(graph({x}).at(0), first)) << "the caller's input is not kept";
}

TEST_F(CudaGraph, WeightsMayChangeInPlace) {
  GraphedCall graph = graph_of({x});
  const torch::NoGradGuard no_grad;
  const at::Tensor before = graph({x}).at(0);
  net->linear->weight.mul_(2);
  EXPECT_TRUE(torch::equal(graph({x}).at(0), net(x)));
  EXPECT_FALSE(torch::equal(before, net(x)));
}

TEST_F(CudaGraph, InputsOfAnotherKindAreRefused) {
  GraphedCall graph = graph_of({x});
  const torch::NoGradGuard no_grad;
  const auto text = [&](const Tensors& inputs) { return message_of<ShapeError>([&] { graph(inputs); }); };
  EXPECT_THAT(text({}), HasSubstr("found 0 inputs, expected 1"));
  EXPECT_THAT(text({x, x}), HasSubstr("found 2 inputs, expected 1"));
  EXPECT_THAT(text({torch::zeros({3, 4})}), HasSubstr("input 0 is Float [3, 4] on cpu, expected Float [2, 4] on cpu"));
  EXPECT_THAT(text({torch::zeros({1, 4})}), HasSubstr("Float [1, 4]")) << "which copying would broadcast";
  EXPECT_THAT(text({x.to(at::kDouble)}), HasSubstr("input 0 is Double [2, 4]"));
  EXPECT_THAT(text({x.to(at::kMeta)}), HasSubstr("on meta"));
  EXPECT_THAT(text({at::Tensor()}), HasSubstr("no tensor"));
  EXPECT_THAT(message_of<ShapeError>([&] {
                graph_of({x, x.to(at::kMeta)});
              }),
              HasSubstr("input 1 is Float [2, 4] on meta, expected a tensor on cpu"));
}

TEST_F(CudaGraph, GradientsAreRefusedWhereTheyWouldBeWanted) {
  GraphedCall graph = graph_of({x});
  EXPECT_THAT(message_of<ConfigError>([&] { graph({x}); }),
              AllOf(HasSubstr("weight 'linear.weight' requires a gradient"), HasSubstr("NoGradGuard")));
  net->linear->weight.requires_grad_(false), net->linear->bias.requires_grad_(false);
  EXPECT_FALSE(graph({x}).at(0).requires_grad());
  const auto wants = x.clone().requires_grad_();
  EXPECT_THAT(message_of<ConfigError>([&] { graph({wants}); }), HasSubstr("an input requires a gradient"));
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(torch::equal(graph({wants}).at(0), net(x)));
}

TEST_F(CudaGraph, TrainingModeIsRefused) {
  net->linear->train();
  EXPECT_THAT(refusal(), AllOf(HasSubstr("Linear ('linear') is in training mode"), HasSubstr("eval()")));
  net->eval();
  GraphedCall graph = graph_of({x});
  const torch::NoGradGuard no_grad;
  net->train();
  EXPECT_THAT(message_of<ConfigError>([&] { graph({x}); }), HasSubstr("training mode"));
  EXPECT_EQ(recordings, 1);
}

TEST_F(CudaGraph, WeightsElsewhereAreRefused) {
  GraphedCall graph = graph_of({x});
  const torch::NoGradGuard no_grad;
  net->linear->bias.set_data(net->linear->bias.clone());  // as module->to(...) does
  EXPECT_THAT(message_of<ConfigError>([&] { graph({x}); }),
              AllOf(HasSubstr("weight 'linear.bias' is elsewhere"), HasSubstr("make a new graph")));
  EXPECT_THAT(message_of<ConfigError>([&] { graph_of({x.to(at::kMeta)}); }),
              HasSubstr("weight 'linear.weight' is on cpu, expected meta"));
}

TEST_F(CudaGraph, WeightsThatComeAndGoAreRefused) {
  GraphedCall graph = graph_of({x});
  const auto offloaded =
      disk_offload(net, support::scratch("weights"), {.execution_device = at::kCPU, .offload = {.always_read = true}});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("weight 'linear.weight' come and go"), HasSubstr("offloaded")));
  const torch::NoGradGuard no_grad;
  EXPECT_THAT(message_of<ConfigError>([&] { graph({x}); }), HasSubstr("weight 'linear.weight' is elsewhere"));
  EXPECT_EQ(recordings, 1);
}

TEST_F(CudaGraph, ResultsElsewhereAreRefused) {
  const auto of = [&](const Tensors& results) {
    return message_of<ShapeError>([&] {
      GraphedCall(
          net, [&](const Tensors&) { return results; }, {x}, record_on_cpu);
    });
  };
  EXPECT_THAT(of({x, x.to(at::kMeta)}), HasSubstr("tensor 1 of the model's result is Float [2, 4] on meta"));
  EXPECT_THAT(of({at::Tensor()}), HasSubstr("tensor 0 of the model's result is no tensor"));
  EXPECT_THAT(of({}), HasSubstr("has no tensor"));
}

TEST_F(CudaGraph, ScopesOfInferenceAndAutocastEndWithoutIt) {
  std::optional<GraphedCall> graph;
  {
    const c10::InferenceMode inference;
    graph.emplace(
        net, [this](const Tensors& in) { return Tensors{net(in[0])}; }, Tensors{x}, record_on_cpu);
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(torch::equal((*graph)({x}).at(0), net(x)));
  const c10::InferenceMode inference;
  EXPECT_TRUE(torch::equal((*graph)({x}).at(0), net(x)));
}

}  // namespace
