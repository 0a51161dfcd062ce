#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>

#include "accelerate/optim/adam8bit.hpp"
#include "accelerate/optim/deepspeed_adam.hpp"
#include "accelerate/optim/lamb.hpp"
#include "accelerate/optim/lion.hpp"

/// The momentum of SGD and RMSprop, or beta1 of Adam and its kin: what schedules move against the rate.
namespace accelerate::optim {

using Betas = std::tuple<double, double>;

/// Betas of options of one of these classes; null for another's.
template <class... Classes> struct OptionsWithBetas {
  static bool has(const torch::optim::OptimizerOptions& options) {
    return (... || dynamic_cast<const Classes*>(&options));
  }
  /// @param change  a function of Betas&. @return whether there are any
  template <class Change> static bool change(torch::optim::OptimizerOptions& options, const Change& change) {
    const auto of = [&](auto* typed) {
      if (typed) change(typed->betas());
      return typed != nullptr;
    };
    return (... || of(dynamic_cast<Classes*>(&options)));
  }
};
using KnownBetas = OptionsWithBetas<torch::optim::AdamWOptions, torch::optim::AdamOptions, AdamW8bitOptions,
                                    DeepSpeedAdamOptions, LionOptions, LambOptions>;

template <class Options> bool set_momentum_of(torch::optim::OptimizerOptions& options, double value) {
  auto* typed = dynamic_cast<Options*>(&options);
  if (typed) typed->momentum(value);
  return typed;
}

inline bool uses_beta1(const torch::optim::OptimizerOptions& options) { return KnownBetas::has(options); }

/// False when the optimizer has none.
inline bool set_betas(torch::optim::OptimizerOptions& options, const Betas& betas) {
  return KnownBetas::change(options, [&](Betas& found) { found = betas; });
}

/// Sets momentum or beta1; false when the optimizer has neither.
inline bool set_momentum(torch::optim::OptimizerOptions& options, double value) {
  return KnownBetas::change(options, [&](Betas& found) { std::get<0>(found) = value; }) ||
         set_momentum_of<torch::optim::SGDOptions>(options, value) ||
         set_momentum_of<torch::optim::RMSpropOptions>(options, value);
}

}  // namespace accelerate::optim
