#pragma once

/// Weights that two modules share.
///
/// In LibTorch `head->weight = embedding->weight` ties nothing: what the module has registered under the name, which is
/// saved, moved and trained, is still the old tensor.

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "accelerate/model/callable.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

namespace detail {
/// @param member  the module's own handle on the parameter
ACCELERATE_API void tie(torch::nn::Module& from, const std::string& from_name, torch::nn::Module& to,
                        const std::string& to_name, at::Tensor* member);

/// The data member that LibTorch's modules have for their parameter of this name; null: there is none.
template <class Module> at::Tensor* parameter_member(Module& module, std::string_view name) {
  if constexpr (requires { requires std::same_as<decltype(module.weight), at::Tensor>; })
    if (name == "weight") return &module.weight;
  if constexpr (requires { requires std::same_as<decltype(module.bias), at::Tensor>; })
    if (name == "bias") return &module.bias;
  return nullptr;
}
}  // namespace detail

/// Makes `to`'s parameter the very tensor that is `from`'s: both names lead to one weight from now on, with one
/// gradient.
///
///     accelerate::tie(embedding, "weight", head, "weight");  // in the constructor of a module that has both
///
/// Any modules whose parameter is the public member `weight` or `bias` of its name, as in torch::nn. Before the model
/// is prepared, dispatched or given to an optimizer. Not collective.
/// @throws ConfigError for a name that is not registered, or whose member is out of reach or another tensor; ShapeError
/// when shapes or dtypes differ. Nothing is changed then.
template <ModelLike From, ModelLike To>
requires(!detail::ScriptModule<From> && !detail::ScriptModule<To>) void tie(const From& from,
                                                                            const std::string& from_name, const To& to,
                                                                            const std::string& to_name) {
  From source = from;  // handles: copies share the module
  To target = to;
  auto& module = *detail::module_of(target);
  detail::tie(*detail::module_of(source), from_name, module, to_name, detail::parameter_member(module, to_name));
}

}  // namespace accelerate
