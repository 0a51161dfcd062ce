#pragma once

#include <torch/library.h>

namespace accelerate::meta_memory {

// Each adds the kernels of its file. Sizes, strides and dtypes are those of the CPU's kernels.
void add_indexing(torch::Library& library);
void add_losses(torch::Library& library);
void add_normalisation(torch::Library& library);
void add_reductions(torch::Library& library);
void add_unary(torch::Library& library);
void add_windows(torch::Library& library);
// And of AutogradMeta: how gradients are made, too.
void add_attention(torch::Library& library);

}  // namespace accelerate::meta_memory
