#include "residency/meta_kernels.hpp"

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {

void install_kernels() {
  // Not by TORCH_LIBRARY_IMPL: a static library's object file that nobody calls is not linked.
  static const torch::Library library = [] {
    torch::Library registration(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    add_indexing(registration);
    add_losses(registration);
    add_normalisation(registration);
    add_reductions(registration);
    add_unary(registration);
    add_windows(registration);
    return registration;
  }();
  static const torch::Library with_gradients = [] {
    torch::Library registration(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMeta, __FILE__, __LINE__);
    add_attention(registration);
    return registration;
  }();
}

}  // namespace accelerate::meta_memory
