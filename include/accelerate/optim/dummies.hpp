#pragma once

/// Stand for an optimizer and a schedule that the settings of a training name, and not the program: those of a
/// DeepSpeed configuration. Source: accelerate 1.15.0, utils.DummyOptim and DummyScheduler.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/optim/scheduler.hpp"

namespace accelerate {

/// prepare() makes the configuration's `optimizer` of it, for these parameters. Copies stand for the same one.
struct DummyOptim {
  explicit DummyOptim(std::vector<at::Tensor> params, double lr = 1e-3, double weight_decay = 0)
      : lr(lr), weight_decay(weight_decay) {
    param_groups.emplace_back(std::move(params));
  }
  /// Groups without options of their own.
  explicit DummyOptim(std::vector<torch::optim::OptimizerParamGroup> param_groups, double lr = 1e-3,
                      double weight_decay = 0)
      : param_groups(std::move(param_groups)), lr(lr), weight_decay(weight_decay) {}

  std::vector<torch::optim::OptimizerParamGroup> param_groups;
  double lr;            ///< for "auto"
  double weight_decay;  ///< for "auto"
  std::shared_ptr<char> identity = std::make_shared<char>();
};

/// prepare() makes the configuration's `scheduler` of it, or that of a function of the program.
struct DummyScheduler {
  using Callable = std::function<optim::Scheduler(torch::optim::Optimizer&)>;

  DummyOptim optimizer;
  /// For "auto": steps of one process, divided by their number unless batches are split.
  std::optional<int64_t> total_num_steps = std::nullopt;
  int64_t warmup_num_steps = 0;
  /// Makes the schedule, where the configuration has none.
  Callable lr_scheduler_callable = nullptr;
};

}  // namespace accelerate
