#include "codes/kernels/frozen.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "codes/kernels/exact.hpp"

namespace accelerate::codes::kernels {
namespace {

using Bias = std::optional<at::Tensor>;
using Weight = c10::intrusive_ptr<FrozenWeight>;

at::Tensor exact_product(const at::Tensor& x, const Weight& weight, bool back);

struct FrozenProduct final : torch::autograd::Function<FrozenProduct> {
  /// @param back  x is multiplied with the weight, and not with its transpose
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& /*x*/, const Bias& bias,
                            const Weight& weight, bool back, c10::function_ref<at::Tensor()> product) {
    context->saved_data["weight"] = c10::IValue::make_capsule(weight);
    context->saved_data["back"] = back;
    context->saved_data["has_bias"] = bias && bias->defined();
    const at::AutoDispatchBelowADInplaceOrView no_views;  // autograd refuses to add to one of ours
    return product();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto weight = c10::static_intrusive_pointer_cast<FrozenWeight>(context->saved_data["weight"].toCapsule());
    torch::autograd::variable_list result(5);
    if (context->needs_input_grad(0))
      result[0] = exact_product(gradients[0], weight, !context->saved_data["back"].toBool());
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(1))
      result[1] = gradients[0].reshape({-1, gradients[0].size(-1)}).sum(0);
    return result;
  }
};

at::Tensor exact_product(const at::Tensor& x, const Weight& weight, bool back) {
  const auto product = [&] {
    return weight->with_codes(x.device(), [&](const Codes& codes) {
      return back ? exact_linear_back(x, codes) : exact_linear(x, codes, {});
    });
  };
  return wants_gradient(x, {}) ? FrozenProduct::apply(x, Bias(), weight, back, product) : product();
}

}  // namespace

bool wants_gradient(const at::Tensor& x, const Bias& bias) {
  return c10::GradMode::is_enabled() && (x.requires_grad() || (bias && bias->defined() && bias->requires_grad()));
}

at::Tensor frozen_linear(const at::Tensor& x, const Bias& bias, const Weight& weight,
                         c10::function_ref<at::Tensor()> product) {
  return FrozenProduct::apply(x, bias, weight, /*back=*/false, product);
}

}  // namespace accelerate::codes::kernels
