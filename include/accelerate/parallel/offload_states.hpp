#pragma once

/// States of a model that ZeRO splits, which may be moved to the host for a while to make room on the device for
/// something else (text that the model generates, another model's step): `m.offload_states(…)`, `m.reload_states()`.
/// Names and meaning are those of DeepSpeed's engine (deepspeed 0.19.8, runtime/engine.py,
/// runtime/zero/offload_config.py).

#include <optional>
#include <vector>

namespace accelerate {

enum class OffloadStateTypeEnum {
  optim_states,           ///< the states that prepared optimizers keep of the model's parameters
  hp_params,              ///< the masters that optimizers step on
  lp_params,              ///< the values that modules compute with, whole or in shards
  lp_grads,               ///< averaged gradients of this rank's shards
  contiguous_grad_buffer  ///< room for gradients that travel; it is freed, and made again when it is needed
};

enum class OffloadDeviceEnum { none, cpu, nvme };

struct OffloadStatesOptions {
  /// Unset: all. Masters and modules' weights that are the same bytes (training in fp32 on one rank) move once both are
  /// named.
  std::optional<std::vector<OffloadStateTypeEnum>> include = {};
  OffloadDeviceEnum device = OffloadDeviceEnum::cpu;  ///< none: nothing happens, with a warning
  bool pin_memory = true;                             ///< page-locked memory there
  /// Returns while bytes are on their way; who reads them on the host synchronises the device first.
  bool non_blocking = false;
};

}  // namespace accelerate
