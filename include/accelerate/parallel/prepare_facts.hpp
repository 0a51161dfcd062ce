#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/optim/dummies.hpp"

namespace accelerate::parallel {

/// The facts about prepare()'s arguments from which settings that were left open follow.
struct PrepareFacts {
  std::vector<std::optional<int64_t>> batch_sizes = {};  ///< of the loaders; nothing where one has none
  std::vector<ModelRef> models = {};
  bool split_batches = false;
  std::vector<DummyOptim> dummy_optimizers = {};
  std::vector<DummyScheduler> dummy_schedulers = {};
  std::vector<const torch::optim::Optimizer*> optimizers = {};  ///< the program's own
  int64_t schedulers = 0;                                       ///< likewise
};

}  // namespace accelerate::parallel
