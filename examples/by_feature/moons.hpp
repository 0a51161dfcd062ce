#pragma once

/// Made-up data for the examples of this folder: points on two half circles that reach into each other, and a network
/// that can tell them apart.

#include <torch/torch.h>

#include <cmath>
#include <vector>

namespace accelerate_examples {

using Point = torch::data::Example<>;  ///< data: [2], target: 0 or 1

/// The same points on every rank.
inline std::vector<Point> moons(int64_t count, uint64_t seed = 0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto noise = torch::randn({count, 2}, generator) * 0.1;
  std::vector<Point> points;
  for (int64_t i = 0; i < count; ++i) {
    const double angle = M_PI * static_cast<double>(i / 2) / static_cast<double>(count / 2);
    const auto at = i % 2 ? torch::tensor({1 - std::cos(angle), 0.5 - std::sin(angle)}, torch::kFloat)
                          : torch::tensor({std::cos(angle), std::sin(angle)}, torch::kFloat);
    points.emplace_back(at + noise[i], torch::tensor(i % 2));
  }
  return points;
}

inline torch::nn::Sequential make_network() {
  return torch::nn::Sequential(torch::nn::Linear(2, 32), torch::nn::Tanh(), torch::nn::Linear(32, 2));
}

}  // namespace accelerate_examples
