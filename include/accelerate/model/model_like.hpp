#pragma once

/// The types that count as models. LibTorch's modules are known by name only: this header costs nothing to include.

#include <concepts>
#include <memory>
#include <type_traits>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace accelerate {

namespace detail {
template <class M> concept ModuleHolderLike = requires(const M& m) {
  typename M::ContainedType;
  { m.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};
template <class M> concept ModulePointer = requires(const M& m) {
  typename M::element_type;
  requires std::same_as<M, std::shared_ptr<typename M::element_type>>;
  requires std::derived_from<typename M::element_type, torch::nn::Module>;
};
template <class M> concept ScriptModule = std::derived_from<M, torch::jit::Module>;
}  // namespace detail

/// A torch::nn::ModuleHolder, a std::shared_ptr to a subclass of torch::nn::Module, or a torch::jit::Module. A holder
/// may have a forward of its own, as AutoModelForCausalLM does.
template <class M>
concept ModelLike = detail::ModuleHolderLike<M> || detail::ModulePointer<M> || detail::ScriptModule<M>;

/// A handle that Accelerator::prepare, dispatch_model or one of their kin has returned: unwrap() is the model.
template <class M> concept WrappedModel = requires(const M& m) {
  requires ModelLike<std::remove_cvref_t<decltype(m.unwrap())>>;
};

}  // namespace accelerate
