#include "precision/fp8/linear.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "residency/member.hpp"
#include "residency/own_operators.hpp"
#include "residency/pins.hpp"
#include "utils/raise.hpp"

namespace accelerate::fp8 {
namespace {

using residency::Member;
using residency::OwnOperators;
using residency::TorchLayers;

/// The facts that a node of the graph needs besides tensors.
struct ProductJob final : torch::CustomClassHolder {
  ProductJob(ProductPass pass, Fp8Weight* weight, bool turned)
      : pass(std::move(pass)), weight(weight), turned(turned) {}
  const ProductPass pass;
  Fp8Weight* const weight;
  const bool turned;  ///< the parameter is [inputs, outputs]

  Core& core() const { return *pass.core; }
  at::Tensor forward_scale(Forward tensor) const {
    return core().forward ? core().forward->column(pass.scales, weight->slot, tensor) : at::Tensor();
  }
};

struct Operands {
  Operand first, second;
};

/// Operands made of one tensor: for the product that sums over its columns, and for the one that sums over its rows.
/// One of them may not be needed. Codes that serve both are made once.
Operands make_operands(const at::Tensor& matrix, const Cast* over_columns, const Cast* over_rows,
                       const at::Tensor& scale, bool values) {
  Operands made;
  if (over_columns) made.first = make_operand(matrix, *over_columns, scale, values);
  if (!over_rows) return made;
  const bool same = over_columns && over_columns->for_all_products() && *over_columns == *over_rows;
  made.second = same ? made.first.turned() : make_operand(matrix.t(), *over_rows, scale, values);
  return made;
}

at::Tensor amax_of(const Operands& operands) {
  return operands.first.amax.defined() ? operands.first.amax : operands.second.amax;
}

/// The weight's operands: kept ones, or new ones.
/// @param backward  which are for the gradient of x
Operands weight_operands(const ProductJob& job, const at::Tensor& w, bool backward) {
  Core& core = job.core();
  const bool keeps = job.pass.is_first_microbatch.has_value() && !Member::of(w);
  auto& kept = job.weight->kept;
  if (keeps && !*job.pass.is_first_microbatch && kept && kept->turned == job.turned) {
    if (kept->version != job.weight->tensor.unsafeGetTensorImpl()->version_counter().current_version())
      raise<ConfigError>(
          "FP8Scope: weight '{}' has changed since the scope with is_first_microbatch = true, whose codes were to be "
          "used again; open the first scope after each step of the optimizer with is_first_microbatch = true",
          job.weight->name);
    ++core.counts.weight_cache_hits;
    return {kept->for_y, kept->for_x};
  }
  ++core.counts.weight_encodes;
  const Operands made = make_operands(w, &core.plan.w, backward || keeps ? &core.plan.w_for_x : nullptr,
                                      job.forward_scale(kWeight), true);
  if (const at::Tensor amax = amax_of(made); job.pass.records && amax.defined())
    core.forward->record(job.weight->slot, kWeight, amax);
  if (keeps && !job.pass.replays) {
    // Not what the codes stand for: that would be four times as much.
    auto without_values = [](Operand operand) {
      operand.values = at::Tensor();
      return operand;
    };
    kept = Fp8Weight::Kept{without_values(made.first), without_values(made.second), job.turned,
                           job.weight->tensor.unsafeGetTensorImpl()->version_counter().current_version()};
  }
  return made;
}

at::Tensor as_matrix(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

struct Made {
  at::Tensor y;
  Operand x_for_w, w_for_x;
};
/// @param grad_x, grad_w  make what their products need, too
Made compute(const ProductJob& job, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias, bool grad_x,
             bool grad_w) {
  const ProductPlan& plan = job.core().plan;
  const at::Tensor rows = as_matrix(x.detach());
  const auto of_x = make_operands(rows, &plan.x, grad_w ? &plan.x_for_w : nullptr, job.forward_scale(kInput), true);
  if (const at::Tensor amax = amax_of(of_x); job.pass.records && amax.defined())
    job.core().forward->record(job.weight->slot, kInput, amax);
  const auto of_w = weight_operands(job, w.detach(), grad_x);
  at::DimVector sizes(x.sizes());
  sizes.back() = w.size(0);
  at::Tensor y = multiply(of_x.first, of_w.first, bias.defined() ? at::kFloat : x.scalar_type());
  if (bias.defined()) y = y.add_(bias.detach()).to(x.scalar_type());
  if (plan.x.scaling == Scaling::none) ++job.core().counts.high_products;
  else ++job.core().counts.fp8_products;
  return {y.view(sizes), of_x.second, of_w.second};
}

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& given_bias, const c10::intrusive_ptr<ProductJob>& job) {
    const OwnOperators own(TorchLayers::kernels);  // autograd refuses to add to a view that one of our functions made
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const bool grad_x = x.requires_grad(), grad_w = w.requires_grad();
    // A weight whose bytes come and go is there again in backward; its codes would stay meanwhile.
    const bool comes_again = Member::of(w) != nullptr;
    const auto made = compute(*job, x, w, bias, grad_x && !comes_again, grad_w);
    std::vector<at::Tensor> saved;
    const auto save = [&](const Operand& operand) {
      for (const at::Tensor& tensor : operand.saved()) saved.push_back(tensor);
    };
    save(grad_w ? made.x_for_w : Operand());
    save(grad_x && !comes_again ? made.w_for_x : Operand());
    saved.push_back(grad_x && comes_again ? w : at::Tensor());
    context->save_for_backward(std::move(saved));
    context->saved_data["job"] = c10::IValue::make_capsule(job);
    context->saved_data["x"] = c10::IValue(x.sizes());
    context->saved_data["dtypes"] =
        std::vector<int64_t>{static_cast<int64_t>(x.scalar_type()), static_cast<int64_t>(w.scalar_type()),
                             static_cast<int64_t>(bias.defined() ? bias.scalar_type() : at::kFloat), bias.defined()};
    return made.y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (at::GradMode::is_enabled())
      throw ConfigError(
          "backward: create_graph was asked for, but products in fp8 have no second derivative: codes are no function "
          "that has one. Compute that loss outside of the fp8 scope");
    const auto job = c10::static_intrusive_pointer_cast<ProductJob>(context->saved_data["job"].toCapsule());
    const auto saved = context->get_saved_variables();
    const OwnOperators own(TorchLayers::kernels);
    const Core& core = job->core();
    const bool grad_x = context->needs_input_grad(0), grad_w = context->needs_input_grad(1);
    const auto dtypes = context->saved_data["dtypes"].toIntVector();
    const auto dtype = [&](size_t i) { return static_cast<at::ScalarType>(dtypes[i]); };
    const at::Tensor g = as_matrix(gradients[0]);
    const auto scale =
        core.backward ? core.backward->column(core.backward->scales(), job->weight->slot, kGradOutput) : at::Tensor();
    const auto of_g =
        make_operands(g, grad_x ? &core.plan.g_for_x : nullptr, grad_w ? &core.plan.g_for_w : nullptr, scale, true);
    if (const at::Tensor amax = amax_of(of_g); amax.defined())
      job->core().backward->record(job->weight->slot, kGradOutput, amax);
    at::Tensor of_x, of_w, of_bias;
    if (grad_x) {
      Operand w_for_x = Operand::restored(&saved[Operand::kSaved]);
      residency::Pins pins;
      if (const at::Tensor& w = saved[2 * Operand::kSaved]; w.defined()) {
        pins.add(Member::of(w)->unit(), /*writes=*/false);
        w_for_x = make_operand(w.detach().t(), core.plan.w_for_x, job->forward_scale(kWeight), true);
      }
      of_x = multiply(of_g.first, w_for_x, dtype(0)).view(context->saved_data["x"].toDimVector());
    }
    if (grad_w) {
      of_w = multiply(of_g.second, Operand::restored(saved.data()), dtype(1));
      if (core.plan.rounds_gradient) of_w = rounded_to(of_w, codes::Float8::e4m3);
    }
    if (dtypes[3] && context->needs_input_grad(2)) of_bias = g.sum(0).to(dtype(2));
    return {of_x, of_w, of_bias, at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const ProductPass& pass, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                  const FoundWeight& found) {
  const auto job = c10::make_intrusive<ProductJob>(pass, found.weight, found.turned);
  const bool graph = at::GradMode::is_enabled() &&
                     (x.requires_grad() || w.requires_grad() || (bias.defined() && bias.requires_grad()));
  if (graph) return Linear::apply(x, w, bias.defined() ? std::optional(bias) : std::nullopt, job);
  const OwnOperators own(TorchLayers::kernels);
  return compute(*job, x, w, bias, false, false).y;
}

}  // namespace accelerate::fp8
