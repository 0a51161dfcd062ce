#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/monitor/snapshot.hpp"

namespace accelerate::launcher {

/// NVIDIA's management library, if this machine has it. Nothing is linked: it is opened at the first look, which may
/// take a moment where no program uses the driver.
class Gpus {
 public:
  Gpus() = default;
  ~Gpus();
  Gpus(const Gpus&) = delete;
  /// @param names  one for each rank: a number, as `nvidia-smi` counts, or "GPU-<uuid>"; empty: none
  /// @return nothing for what has no such GPU
  std::vector<std::optional<GpuUse>> look(const std::vector<std::string>& names);

 private:
  struct Library;
  Library* library_ = nullptr;
  bool tried_ = false;
};

/// The peak of the GPU, in floating-point operations a second, if its name is known: with bf16's matrix units, without
/// sparsity. Nothing for parts of a GPU (MIG).
std::optional<double> peak_flops_of(const GpuUse& gpu);

/// The GPU of each local rank: the entries of CUDA_VISIBLE_DEVICES, else 0, 1, 2, ...
std::vector<std::string> gpu_names(const std::string& visible_devices, int64_t local_world_size);

}  // namespace accelerate::launcher
