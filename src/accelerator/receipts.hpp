#pragma once

#include <optional>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/parallel/parallelism_config.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "observe/receipt_rows.hpp"

namespace accelerate::receipts {

/// The facts that the facade itself decides.
struct OwnFacts {
  RunFacts run = {};
  AcceleratorOptions given = {};
  GradientAccumulationPlugin accumulation = {};  ///< given
  GradientAccumulationPlugin accumulating = {};  ///< that holds, as what follows does
  bool counts_micro_steps = true;                ///< false: the program decides when it steps
  ProjectConfiguration project = {};
  PrecisionType precision = PrecisionType::NO;
  bool autocast = true;  ///< AutocastKwargs::enabled
  TorchDynamoPlugin compiling = {};
  std::optional<ParallelismConfig> layout = {};    ///< nothing: nobody asked for one
  std::optional<at::DeviceType> accelerator = {};  ///< that LibTorch can use here
  int64_t machines = 1, schedulers = 0, fp8_products = 0;
  bool main_process = true, sharded = false, debug = false;
};
std::vector<Receipt> of_accumulation(const OwnFacts& facts);
std::vector<Receipt> of_projects(const OwnFacts& facts);
std::vector<Receipt> of_precision(const OwnFacts& facts);
std::vector<Receipt> of_launch(const OwnFacts& facts);

}  // namespace accelerate::receipts
