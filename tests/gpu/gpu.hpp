#pragma once

#include <ATen/DeviceAccelerator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "accelerate/state.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "ranks.hpp"

/// Tests that need a GPU. They run on cuda:0; where there is none, as ACCELERATE_GPU_REHEARSAL says: "fake" on the fake
/// GPU (support/fake_gpu.cpp, which builds for CPUs have), "cpu" on the CPU; without it they are skipped. Accelerators
/// of the cases choose the device by themselves, as users' do.
namespace gpu_test {

inline bool on_cuda() { return torch::cuda::is_available(); }  ///< or on the fake GPU
inline bool rehearsal() { return std::getenv("ACCELERATE_GPU_REHEARSAL") != nullptr; }
inline bool on_gpu() { return on_cuda() && !rehearsal(); }  ///< what is large, long or timed is for real ones
inline at::Device device() { return on_cuda() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU); }

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda() && !rehearsal())
      GTEST_SKIP()
          << "LibTorch finds no GPU here (ACCELERATE_GPU_REHEARSAL=cpu runs these tests on the CPU, to try them)";
    const char* how = std::getenv("ACCELERATE_GPU_REHEARSAL");
    // LibTorch asks for devices once: a question before the fake GPU is there, and none ever is.
    ASSERT_TRUE(on_cuda() || !how || std::string(how) != "fake") << "this program has no fake GPU";
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // without it cuBLAS warns at each call
    // fp32 means fp32 (TF32 has ten bits), and kernels that may add in any order are left alone: equal is equal then.
    at::globalContext().setFloat32MatmulPrecision("highest");
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(false);  // memory is as it is in a user's program
  }
};

/// Parts that need a device beside the host, be it a fake one, end here in a rehearsal on the CPU.
#define NEEDS_DEVICE(why) \
  if (!gpu_test::on_cuda()) GTEST_SKIP() << "a rehearsal on the CPU: " << (why)

/// Parts that need a real GPU end here in a rehearsal.
#define NEEDS_CUDA(why) \
  if (gpu_test::rehearsal()) GTEST_SKIP() << "a rehearsal without a GPU: " << (why)

inline void synchronize() {
  if (on_cuda()) torch::cuda::synchronize();
}

/// A second Accelerator of a case, with other settings than the first.
inline void start_again() {
  accelerate::AcceleratorState::reset();
  accelerate::PartialState::reset();
  accelerate::GradientState::reset();
}

/// Layers of one size, whose kernels give the same bits each time.
struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t width, int64_t depth, uint64_t seed = 5) {
    torch::manual_seed(seed);
    for (int64_t i = 0; i < depth; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Mlp);

/// The same numbers on every device.
inline at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed, const at::Device& where = device()) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)).to(where);
}

/// The case in two processes, both of which have the first GPU. Without shared memory a rehearsal goes the same ways.
inline void in_two_ranks() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  support::expect_ranks_pass(std::string(test->test_suite_name()) + "." + test->name(),
                             {.world_size = 2,
                              .env = {{"ACCELERATE_USE_CPU", on_cuda() ? "false" : "true"},
                                      {"ACCELERATE_TORCH_DEVICE", device().str()},
                                      {"ACCELERATE_SHARED_MEMORY", "false"}}});
}

inline const accelerate::InitProcessGroupKwargs kGlooGroup{.backend = "gloo", .timeout = std::chrono::seconds(60)};

inline at::Tensor loss_of(const at::Tensor& output) { return (output - 0.3).pow(2).mean(); }

inline std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

/// Bit for bit, wherever they lie.
inline testing::AssertionResult same_bits(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor a = found.detach().cpu(), b = expected.detach().cpu();
  if (a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && torch::equal(a, b))
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << "found " << a.dtype() << " " << a.sizes() << ", expected " << b.dtype() << " "
                                     << b.sizes() << "; the largest difference is "
                                     << (a.sizes() == b.sizes()
                                             ? (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>()
                                             : -1);
}

/// Relative to the largest of the expected numbers.
inline testing::AssertionResult close(const at::Tensor& found, const at::Tensor& expected, double tolerance) {
  const at::Tensor a = found.detach().cpu().to(at::kDouble), b = expected.detach().cpu().to(at::kDouble);
  if (a.sizes() != b.sizes()) return testing::AssertionFailure() << a.sizes() << " and " << b.sizes();
  const double difference = (a - b).abs().max().item<double>(), scale = b.abs().max().item<double>();
  if (difference <= tolerance * scale) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the largest difference is " << difference << " at a scale of " << scale;
}

}  // namespace gpu_test
