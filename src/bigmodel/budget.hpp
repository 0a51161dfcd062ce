#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/bigmodel/dispatch.hpp"
#include "bigmodel/quantizer.hpp"
#include "bigmodel/weight_sources.hpp"

/// Which weights stay, which come and go, and how much memory there is for that.
namespace accelerate::bigmodel {

struct DispatchSettings {
  std::string caller;
  at::Device main = at::kCPU;
  bool offload_buffers = false;
  std::vector<std::string> skip_keys, whole_classes;
  bool force_hooks = false;
  std::optional<MaxMemory> max_memory;
  OffloadOptions offload;
  const Quantizer* quantizer = nullptr;
};

/// The plan of weights that move as one.
struct UnitPlan {
  std::string name;
  at::Device device = at::kCPU;
  std::vector<PlacedWeight*> weights;
  int64_t bytes = 0;
};

struct Budget {
  std::map<std::string, int64_t> bytes;  ///< by device: for what comes and goes
  std::vector<UnitPlan> units;           ///< point into the weights
  bool spread = false;                   ///< over devices
};

/// Decides where each weight computes, which ones come and go, and in which units. @throws ConfigError where memory is
/// less than what has to be there at a time
Budget plan_budget(const ModelRef& model, const DispatchSettings& settings, std::vector<PlacedWeight>& weights);

}  // namespace accelerate::bigmodel
