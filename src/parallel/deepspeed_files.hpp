#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace accelerate::parallel {

/// A DeepSpeed configuration's settings about checkpoints, for code that writes them.
struct DeepSpeedFiles {
  int64_t stage = 0;
  int64_t sub_group_size = 0;                 ///< stage 3: elements of a rank that are flat together
  bool round_robin = false;                   ///< stages 1 and 2: the order of parameters
  std::optional<at::ScalarType> param_dtype;  ///< of what modules compute with; unset: that of the masters
  double clip_grad = 0;
  bool dynamic_loss_scale = false;
  int64_t train_batch_size = 1;
  bool tags_must_agree = false;  ///< else ranks with another tag get a warning
  bool checks_tags = true;
  /// One rank of each machine writes the files that one rank writes for all otherwise: machines have disks of their
  /// own.
  bool each_node_writes = false;
  bool load_from_fp32_weights = true;  ///< false: masters begin as the 16-bit weights
  bool load_universal = false;         ///< what is loaded must be a universal checkpoint
  c10::IValue ds_config;               ///< a dict
  std::string ds_version;
};

}  // namespace accelerate::parallel
