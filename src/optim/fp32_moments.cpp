#include "optim/fp32_moments.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <tuple>
#include <typeinfo>

#include "optim/own_step.hpp"

namespace accelerate::optim {
namespace {

using torch::optim::Optimizer;

/// Calls f.operator()<Options, State, kDecoupled>() for the optimizer's class; false when it is neither.
template <class F> bool with_adam(const Optimizer& optimizer, F&& f) {
  using namespace torch::optim;
  if (typeid(optimizer) == typeid(AdamW)) return f.template operator()<AdamWOptions, AdamWParamState, true>(), true;
  if (typeid(optimizer) == typeid(Adam)) return f.template operator()<AdamOptions, AdamParamState, false>(), true;
  return false;
}

}  // namespace

bool has_fp32_moments(const Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  return std::any_of(groups.begin(), groups.end(),
                     [](const auto& group) { return group.has_options() && has_fp32_moments(group.options()); });
}

bool can_have_fp32_moments(const Optimizer& optimizer) {
  return with_adam(optimizer, []<class, class, bool>() {});
}

bool give_fp32_moments(Optimizer& optimizer) {
  bool changed = false;
  with_adam(optimizer, [&]<class Options, class State, bool>() {
    for (auto& group : optimizer.param_groups())
      if (!has_fp32_moments(group.options())) {
        group.set_options(std::make_unique<WithFp32Moments<Options>>(static_cast<const Options&>(group.options())));
        changed = true;
      }
    const auto exact = [](const at::Tensor& moment) {
      return moment.defined() && at::isReducedFloatingType(moment.scalar_type()) ? moment.to(at::kFloat) : moment;
    };
    for (auto& [parameter, held] : optimizer.state()) {
      auto& state = static_cast<State&>(*held);
      state.exp_avg(exact(state.exp_avg())).exp_avg_sq(exact(state.exp_avg_sq()));
    }
  });
  return changed;
}

bool step_with_fp32_moments(Optimizer& optimizer) {
  if (!has_fp32_moments(optimizer)) return false;
  const at::NoGradGuard no_grad;
  return with_adam(optimizer, [&]<class Options, class State, bool kDecoupled>() {
    for (const auto& group : optimizer.param_groups()) {
      const auto& o = static_cast<const Options&>(group.options());
      for (const auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        auto& state = state_at<State>(optimizer, parameter, [&](auto& made) {
          const auto type = moment_type(o, parameter);
          made.step(0);
          made.exp_avg(at::zeros_like(parameter, type)).exp_avg_sq(at::zeros_like(parameter, type));
        });
        adam_step_on(parameter, state,
                     {.lr = o.lr(),
                      .beta1 = std::get<0>(o.betas()),
                      .beta2 = std::get<1>(o.betas()),
                      .eps = o.eps(),
                      .weight_decay = o.weight_decay(),
                      .decoupled = kDecoupled});
      }
    }
  });
}

}  // namespace accelerate::optim
