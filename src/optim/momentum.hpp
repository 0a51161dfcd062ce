#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

/// The momentum of SGD and RMSprop, or beta1 of Adam and AdamW: what schedules move against the rate.
namespace accelerate::optim {

template <class Options> bool set_beta1(torch::optim::OptimizerOptions& options, double value) {
  auto* typed = dynamic_cast<Options*>(&options);
  if (typed) typed->betas({value, std::get<1>(typed->betas())});
  return typed;
}

template <class Options> bool set_momentum_of(torch::optim::OptimizerOptions& options, double value) {
  auto* typed = dynamic_cast<Options*>(&options);
  if (typed) typed->momentum(value);
  return typed;
}

inline bool uses_beta1(const torch::optim::OptimizerOptions& options) {
  return dynamic_cast<const torch::optim::AdamOptions*>(&options) ||
         dynamic_cast<const torch::optim::AdamWOptions*>(&options);
}

/// Sets momentum or beta1; false when the optimizer has neither.
inline bool set_momentum(torch::optim::OptimizerOptions& options, double value) {
  return set_beta1<torch::optim::AdamWOptions>(options, value) ||
         set_beta1<torch::optim::AdamOptions>(options, value) ||
         set_momentum_of<torch::optim::SGDOptions>(options, value) ||
         set_momentum_of<torch::optim::RMSpropOptions>(options, value);
}

}  // namespace accelerate::optim
