#include "optim/kernels/operators.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace accelerate::optim::kernels {

std::vector<StepSlice> StepLists::slices() const {
  std::vector<StepSlice> slices(parameters.size());
  const auto bytes = [](at::TensorList list, size_t i) { return list.empty() ? nullptr : list[i].mutable_data_ptr(); };
  for (size_t i = 0; i < parameters.size(); ++i)
    slices[i] = {.count = parameters[i].numel(),
                 .parameter_type = parameters[i].scalar_type(),
                 .gradient_type = (gradients.empty() ? parameters : gradients)[i].scalar_type(),
                 .state_type = (first.empty() ? parameters : first)[i].scalar_type(),
                 .parameter = parameters[i].mutable_data_ptr(),
                 .gradient = bytes(gradients, i),
                 .first = bytes(first, i),
                 .second = bytes(second, i),
                 .largest = bytes(largest, i)};
  return slices;
}

namespace {

void adam(at::TensorList parameters, at::TensorList gradients, at::TensorList first, at::TensorList second,
          at::TensorList largest, double lr, double beta1, double beta2, double eps, double weight_decay,
          bool decoupled, int64_t number, bool bias_correction, double divisor) {
  const AdamStep rule{lr, beta1, beta2, eps, weight_decay, decoupled, number, bias_correction};
  step(rule, StepLists{parameters, gradients, first, second, largest}.slices(), divisor);
}
void sgd(at::TensorList parameters, at::TensorList gradients, at::TensorList momenta, double lr, double momentum,
         double dampening, double weight_decay, bool nesterov, bool is_first, double divisor) {
  const SgdStep rule{lr, momentum, dampening, weight_decay, nesterov, is_first};
  step(rule, StepLists{parameters, gradients, momenta}.slices(), divisor);
}
void adagrad(at::TensorList parameters, at::TensorList gradients, at::TensorList sums, double lr, double lr_decay,
             double eps, double weight_decay, int64_t number, double divisor) {
  const AdagradStep rule{lr, lr_decay, eps, weight_decay, number};
  step(rule, StepLists{parameters, gradients, sums}.slices(), divisor);
}
void lion(at::TensorList parameters, at::TensorList gradients, at::TensorList momenta, double lr, double beta1,
          double beta2, double weight_decay, double divisor) {
  step(LionStep{lr, beta1, beta2, weight_decay}, StepLists{parameters, gradients, momenta}.slices(), divisor);
}

void define_operators() {
  // Not by TORCH_LIBRARY: a static library's object file that nobody calls is not linked.
  static const torch::Library library = [] {
    torch::Library definitions(torch::Library::DEF, "accelerate_kernels", std::nullopt, __FILE__, __LINE__);
    definitions.def(
        "step_adam_(Tensor(a!)[] parameters, Tensor(b!)[] gradients, Tensor(c!)[] first, Tensor(d!)[] second, "
        "Tensor(e!)[] largest, float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
        "int number, bool bias_correction, float divisor) -> ()");
    definitions.def(
        "step_sgd_(Tensor(a!)[] parameters, Tensor(b!)[] gradients, Tensor(c!)[] momenta, float lr, float momentum, "
        "float dampening, float weight_decay, bool nesterov, bool is_first, float divisor) -> ()");
    definitions.def(
        "step_adagrad_(Tensor(a!)[] parameters, Tensor(b!)[] gradients, Tensor(c!)[] sums, float lr, float lr_decay, "
        "float eps, float weight_decay, int number, float divisor) -> ()");
    definitions.def(
        "step_lion_(Tensor(a!)[] parameters, Tensor(b!)[] gradients, Tensor(c!)[] momenta, float lr, float beta1, "
        "float beta2, float weight_decay, float divisor) -> ()");
    definitions.impl("step_adam_", c10::DispatchKey::CPU, TORCH_FN(adam));
    definitions.impl("step_sgd_", c10::DispatchKey::CPU, TORCH_FN(sgd));
    definitions.impl("step_adagrad_", c10::DispatchKey::CPU, TORCH_FN(adagrad));
    definitions.impl("step_lion_", c10::DispatchKey::CPU, TORCH_FN(lion));
    return definitions;
  }();
}

/// The kernel's operator, called as a function of its type.
template <auto kKernel, class... Arguments> void call(const char* name, const Arguments&... arguments) {
  define_operators();
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(name, "")
                             .template typed<std::remove_pointer_t<decltype(kKernel)>>();
  const c10::impl::ExcludeDispatchKeyGuard no_graph(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  op.call(arguments...);
}

}  // namespace

void step_(const AdamStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList first,
           at::TensorList second, at::TensorList largest, double divisor) {
  call<&adam>("accelerate_kernels::step_adam_", parameters, gradients, first, second, largest, rule.lr, rule.beta1,
              rule.beta2, rule.eps, rule.weight_decay, rule.decoupled, rule.step, rule.bias_correction, divisor);
}
void step_(const SgdStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList momentum,
           double divisor) {
  call<&sgd>("accelerate_kernels::step_sgd_", parameters, gradients, momentum, rule.lr, rule.momentum, rule.dampening,
             rule.weight_decay, rule.nesterov, rule.first, divisor);
}
void step_(const AdagradStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList sums,
           double divisor) {
  call<&adagrad>("accelerate_kernels::step_adagrad_", parameters, gradients, sums, rule.lr, rule.lr_decay, rule.eps,
                 rule.weight_decay, rule.step, divisor);
}
void step_(const LionStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList momentum,
           double divisor) {
  call<&lion>("accelerate_kernels::step_lion_", parameters, gradients, momentum, rule.lr, rule.beta1, rule.beta2,
              rule.weight_decay, divisor);
}

}  // namespace accelerate::optim::kernels
