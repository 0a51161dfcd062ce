#pragma once

/// Features of this build and this machine: the reference's is_..._available(), as far as it means something without
/// Python. None is collective, none needs an Accelerator.

#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Whether LibTorch was built for such devices and finds one: "cuda", "xpu", "mps", "npu", "mlu", "musa", "sdaa",
/// "hpu", ...; "cpu" always is. @throws ConfigError for a name that LibTorch does not know.
ACCELERATE_API bool is_device_available(const std::string& type);
inline bool is_cuda_available() { return is_device_available("cuda"); }
inline bool is_xpu_available() { return is_device_available("xpu"); }
inline bool is_mps_available() { return is_device_available("mps"); }
/// Whether the device on which an Accelerator computes (the accelerator that LibTorch finds, else the CPU) has tensors
/// of that dtype: one is made.
ACCELERATE_API bool is_bf16_available();
ACCELERATE_API bool is_fp16_available();

/// Whether ranks can communicate by it: a matter of the build.
ACCELERATE_API bool is_gloo_available();
ACCELERATE_API bool is_nccl_available();
ACCELERATE_API bool is_mpi_available();

/// Whether the library of that name can be loaded by the dynamic loader ("libcurl.so.4").
ACCELERATE_API bool is_shared_library_available(const std::string& name);
/// REST trackers need it.
inline bool is_libcurl_available() { return is_shared_library_available("libcurl.so.4"); }

/// Whether the Python that trackers with an SDK in Python run in (ACCELERATE_PYTHON, else python3 on the PATH) finds a
/// package of that name; it is not imported. Asks once for each name, which takes a tenth of a second and at most ten;
/// false where there is no such Python.
/// @param name  as in `import`: letters, digits, underscores, dots. @throws ConfigError for another.
ACCELERATE_API bool is_python_package_available(const std::string& name);
inline bool is_wandb_available() { return is_python_package_available("wandb"); }
inline bool is_comet_ml_available() { return is_python_package_available("comet_ml"); }
inline bool is_clearml_available() { return is_python_package_available("clearml"); }
inline bool is_aim_available() { return is_python_package_available("aim"); }
inline bool is_swanlab_available() { return is_python_package_available("swanlab"); }
inline bool is_trackio_available() { return is_python_package_available("trackio"); }
/// Trackers of the library's own need nothing.
inline bool is_tensorboard_available() { return true; }

}  // namespace accelerate
