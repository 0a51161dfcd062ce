#pragma once

/// Handwritten digits for the examples, and a network that can tell them apart.

#include <accelerate/accelerate.hpp>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace accelerate_examples {

using Digit = torch::data::Example<>;  ///< data: [1, 28, 28] in 0 to 1, target: 0 to 9

struct DigitSets {
  std::vector<Digit> train, eval;
};

/// Lines of 784 pixels and the label, in a random order that is the same on every rank.
inline DigitSets read_digits(const std::string& path, int64_t eval_size) {
  std::ifstream in(path);
  if (!in) throw accelerate::ConfigError("--data '" + path + "' can't be opened; scripts/fetch_data.sh gets it");
  std::vector<Digit> digits;
  for (std::string line; std::getline(in, line);) {
    const torch::Tensor numbers = torch::empty({785});
    float* out = numbers.data_ptr<float>();
    const char *at = line.data(), *end = at + line.size();
    for (int64_t i = 0; i < 785; ++i, ++at) {
      const auto [next, error] = std::from_chars(at, end, out[i]);
      if (error != std::errc() || (i < 784 && (next == end || *next != ',')))
        throw accelerate::ConfigError("'" + path + "' line " + std::to_string(digits.size() + 1) +
                                      " is not 785 numbers");
      at = next;
    }
    digits.emplace_back(numbers.slice(0, 0, 784).view({1, 28, 28}) / 255, numbers[784].to(torch::kLong));
  }
  if (eval_size >= static_cast<int64_t>(digits.size()))
    throw accelerate::ConfigError("--held_out leaves none of the " + std::to_string(digits.size()) +
                                  " digits to train on");
  std::shuffle(digits.begin(), digits.end(), std::mt19937(42));
  const auto middle = digits.begin() + eval_size;
  return {{middle, digits.end()}, {digits.begin(), middle}};
}

inline torch::nn::Sequential make_digit_network() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), BatchNorm2d(16), ReLU(), MaxPool2d(2),
                    Conv2d(Conv2dOptions(16, 32, 3).padding(1)), BatchNorm2d(32), ReLU(), MaxPool2d(2), Flatten(),
                    Linear(32 * 7 * 7, 10));
}

}  // namespace accelerate_examples
