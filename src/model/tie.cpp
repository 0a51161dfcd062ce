#include "accelerate/model/tie.hpp"

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "utils/raise.hpp"

namespace accelerate::detail {
namespace {

/// LibTorch keeps a module's registered parameters protected; a derived class may name them.
struct RegisteredParameters : torch::nn::Module {
  static at::Tensor& of(torch::nn::Module& module, const std::string& name) {
    auto& parameters = module.*(&RegisteredParameters::parameters_);
    std::vector<std::string> known;
    for (auto& item : parameters) {
      if (!item.value().defined()) continue;  // a Linear without bias has one by name
      if (item.key() == name) return item.value();
      known.push_back(item.key());
    }
    raise<ConfigError>("tie: {} has no parameter '{}' of its own, expected one of {}", module.name(), name,
                       fmt::join(known, ", "));
  }
};

}  // namespace

void tie(torch::nn::Module& from, const std::string& from_name, torch::nn::Module& to, const std::string& to_name,
         at::Tensor* member) {
  const at::Tensor& source = RegisteredParameters::of(from, from_name);
  at::Tensor& target = RegisteredParameters::of(to, to_name);
  if (source.sizes() != target.sizes() || source.scalar_type() != target.scalar_type())
    raise<ShapeError>("tie: {}'s '{}' is {} {} and {}'s '{}' is {} {}, expected the same shape and dtype", from.name(),
                      from_name, c10::toString(source.scalar_type()), source.sizes(), to.name(), to_name,
                      c10::toString(target.scalar_type()), target.sizes());
  // An assignment in LibTorch's way may have gone before: then the member is the source already.
  if (!member || !(member->is_same(target) || member->is_same(source)))
    raise<ConfigError>(
        "tie: the forward of {} uses '{}' through a member that is {}, expected a public member `weight` or `bias` of "
        "that name; register the other module's tensor under this name in the constructor instead",
        to.name(), to_name, member ? "another tensor than the registered one" : "out of reach");
  target = source;
  *member = source;
}

}  // namespace accelerate::detail
