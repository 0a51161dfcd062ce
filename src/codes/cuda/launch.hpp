#pragma once

#include <c10/core/Device.h>

#include <string>

#include "codes/cuda/arguments.cuh"

namespace accelerate::codes::cuda {

/// A kernel, and what it is to do.
struct Launch {
  std::string kernel;  ///< with what it is compiled for, such as "product<Q4_0,Half,3>"
  unsigned blocks = 0;
  unsigned threads = 0;  ///< of a block
  Arguments arguments;
};

/// Starts a kernel on the device's current stream, and does not wait for it.
/// @return false: there are no kernels here, and operators have to do. The reason is logged, once.
using Launcher = bool (*)(const Launch& launch, const c10::Device& device);

/// Compiles kernels when they are first asked for. Null in builds without CUDA.
extern const Launcher kNvrtc;
/// Makes `launcher` start kernels from now on, instead of kNvrtc. For tests. @return the one before
Launcher exchange_launcher(Launcher launcher);

/// The texts of arguments.cuh and kernels.cuh (kernel_texts.cpp.in).
extern const char* const kArgumentsText;
extern const char* const kKernelsText;

}  // namespace accelerate::codes::cuda
