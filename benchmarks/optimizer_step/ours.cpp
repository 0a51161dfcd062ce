// A step of AdamW on one fp32 tensor, next to what memory allows: a loop that reads four numbers and writes three of
// them for each element, and no more. All in turns, on the same memory.
//
//   loop       the plain loop
//   kernel     our kernel
//   optimizer  torch::optim::AdamW by AcceleratedOptimizer, which steps with the kernel
//   aten       LibTorch's fused kernel
//
// usage: optimizer_step [MILLIONS OF ELEMENTS [ROUNDS]]     threads by OMP_NUM_THREADS; prints JSON: milliseconds, the
// best round and the median, and how far the kernel's answer is from LibTorch's
#include <ATen/ops/_fused_adamw.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "accelerate/optim.hpp"
#include "accelerate/state.hpp"
#include "optim/kernels/step.hpp"
#include "utils/parallel.hpp"

namespace {

using accelerate::optim::kernels::AdamStep;
using accelerate::optim::kernels::StepSlice;
using at::Tensor;

constexpr double kLr = 1e-4, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01;

struct State {
  explicit State(int64_t count)
      : parameter(torch::randn({count})),
        gradient(torch::randn({count})),
        first(torch::zeros({count})),
        second(torch::zeros({count})) {}
  Tensor parameter, gradient, first, second;

  void loop() const {
    float* const p = parameter.mutable_data_ptr<float>();
    float* const m = first.mutable_data_ptr<float>();
    float* const v = second.mutable_data_ptr<float>();
    const float* const g = gradient.const_data_ptr<float>();
    accelerate::parallel_ranges(parameter.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
#pragma GCC ivdep
      for (int64_t i = begin; i < end; ++i) p[i] += g[i], m[i] += g[i], v[i] += g[i];
    });
  }
  void kernel() const {
    const StepSlice all{.count = parameter.numel(),
                        .parameter = parameter.mutable_data_ptr(),
                        .gradient = gradient.mutable_data_ptr(),
                        .first = first.mutable_data_ptr(),
                        .second = second.mutable_data_ptr()};
    accelerate::optim::kernels::step(AdamStep{kLr, kBeta1, kBeta2, kEps, kDecay, true, 1}, {all});
  }
  void aten() const {
    const std::vector<Tensor> p{parameter}, g{gradient}, m{first}, v{second}, none, steps{at::scalar_tensor(1.0)};
    at::_fused_adamw_(p, g, m, v, none, steps, kLr, kBeta1, kBeta2, kDecay, kEps, false, false);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = (argc > 1 ? std::atoll(argv[1]) : 100) * 1'000'000;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  const State a(1'000'003);
  torch::manual_seed(1);
  const State b(1'000'003);
  a.kernel(), b.aten();
  const double off = (a.parameter - b.parameter).abs().max().item<double>();

  const State state(count);
  state.parameter.set_requires_grad(true);
  state.parameter.mutable_grad() = state.gradient;
  const accelerate::AcceleratedOptimizer optimizer(std::make_shared<torch::optim::AdamW>(
      std::vector<Tensor>{state.parameter},
      torch::optim::AdamWOptions(kLr).betas({kBeta1, kBeta2}).eps(kEps).weight_decay(kDecay)));
  const std::vector<std::pair<std::string, std::function<void()>>> contestants{{"loop", [&] { state.loop(); }},
                                                                               {"kernel", [&] { state.kernel(); }},
                                                                               {"optimizer", [&] { optimizer.step(); }},
                                                                               {"aten", [&] { state.aten(); }}};
  std::map<std::string, std::vector<double>> times;
  for (int round = 0; round < rounds; ++round) {
    for (const auto& [name, run] : contestants) {
      state.second.fill_(1);  // the loop has made it anything
      const auto start = std::chrono::steady_clock::now();
      run();
      times[name].push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
  }
  std::printf("{\"off\": %.3g, \"fused\": %s", off, optimizer.step_was_fused() ? "true" : "false");
  for (auto& [name, all] : times) {
    std::sort(all.begin(), all.end());
    std::printf(", \"%s\": [%.2f, %.2f]", name.c_str(), all.front(), all[all.size() / 2]);
  }
  std::printf("}\n");
}
