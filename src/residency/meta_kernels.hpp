#pragma once

namespace accelerate::meta_memory {

/// Gives the meta device kernels for operators of usual models that LibTorch has only in Python. Once per process;
/// cheap to repeat.
void install_kernels();

}  // namespace accelerate::meta_memory
