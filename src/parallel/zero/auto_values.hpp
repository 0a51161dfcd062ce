#pragma once

/// The values that prepare() writes where a DeepSpeed configuration says "auto". Needs no LibTorch.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::zero {

/// DummyOptim: the optimizer is made of the configuration.
struct DummyOptimizerFacts {
  double lr = 0.001, weight_decay = 0;
};
/// An optimizer of the program.
struct ProgramOptimizerFacts {
  std::string class_name;  ///< torch's: "AdamW"
  double lr = 0.001;
};

/// DummyScheduler: the schedule is made of the configuration, or by the program's function.
struct DummySchedulerFacts {
  std::optional<int64_t> total_num_steps;
  int64_t warmup_num_steps = 0;
  bool has_callable = false;
};
struct ProgramSchedulerFacts {};

/// The facts about a training that are known when its objects are prepared.
struct AutoFacts {
  int64_t ranks = 1;
  std::optional<int64_t> hidden_size;                      ///< of the model; of several sizes the largest
  bool has_model_config = false;                           ///< for the error where there is no hidden_size
  std::vector<std::optional<int64_t>> loader_batch_sizes;  ///< of each loader; nothing: it has none
  std::variant<std::monostate, DummyOptimizerFacts, ProgramOptimizerFacts> optimizer;
  std::variant<std::monostate, DummySchedulerFacts, ProgramSchedulerFacts> scheduler;
  bool split_batches = false;
  bool is_train_batch_min = true;
  int64_t gradient_accumulation_steps = 1;
  std::string mixed_precision = "no";
  int64_t sp_size = 1;
};

/// The sources of a training's optimizer and schedule.
struct Filled {
  bool optimizer_of_configuration = false;
  bool scheduler_of_configuration = false;
  bool scheduler_by_callable = false;  ///< of the DummyScheduler
  /// The program's optimizer is stepped by the kernel of this name on the states in host memory: Adam (L2), AdamW,
  /// Adagrad or Lion. Empty: as it is.
  std::string host_kernel;
  /// Differences between the configuration and the program, a line each: the configuration's value holds.
  std::vector<std::string> warnings;
};

/// Fills the configuration of a resolved plugin. "auto" that nothing fills is removed in the sections that DeepSpeed
/// reads with a class, where its own default then holds.
/// @throws ConfigError for "auto" elsewhere, for an optimizer or a schedule that both the configuration and the program
/// have or neither, and as DeepSpeedPlugin::set_mixed_precision.
/// Source: accelerate 1.15.0, Accelerator._prepare_deepspeed. Conformance: deepspeed_auto.json
ACCELERATE_API Filled fill_auto(DeepSpeedPlugin& plugin, const AutoFacts& facts);

}  // namespace accelerate::zero
