#pragma once

/// Optimizers of this library by the names that DeepSpeed has for their options and states: what optimizer_state.cpp
/// says of LibTorch's classes.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>

#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/optim/deepspeed_adam.hpp"
#include "accelerate/optim/lamb.hpp"
#include "accelerate/optim/lion.hpp"
#include "accelerate/optim/muon.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {

/// `options` are those that DeepSpeed has in its parameter groups, `settings` those of the whole optimizer there, which
/// are no part of a state.
struct DescribeLion {
  using Options = LionOptions;
  using State = LionParamState;
  static constexpr const char* kName = "Lion";
  static constexpr bool kStateFromStart = false;
  template <class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("betas", o.betas()), v("weight_decay", o.weight_decay());
  }
  template <class V> static void settings(Options&, V&&) {}
  template <class V> static void state(State& s, const Options&, V&& v) {
    v("step", s.step()), v("exp_avg", s.exp_avg(), true);
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() { return {}; }
};

struct DescribeDeepSpeedAdam {
  using Options = DeepSpeedAdamOptions;
  using State = DeepSpeedAdamParamState;
  static constexpr const char* kName = "DeepSpeedAdam";
  static constexpr bool kStateFromStart = false;
  template <class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("betas", o.betas()), v("eps", o.eps()), v("weight_decay", o.weight_decay());
    v("bias_correction", o.bias_correction());
  }
  template <class V> static void settings(Options& o, V&& v) {
    v("adam_w_mode", o.adam_w_mode()), v("fp32_optimizer_states", o.fp32_optimizer_states());
  }
  template <class V> static void state(State& s, const Options&, V&& v) {
    v("step", s.step()), v("exp_avg", s.exp_avg(), true), v("exp_avg_sq", s.exp_avg_sq(), true);
  }
  static at::ScalarType state_type(const Options& o, const at::Tensor& parameter) {
    const auto type = parameter.scalar_type();
    return o.fp32_optimizer_states() && (type == at::kHalf || type == at::kBFloat16) ? at::kFloat : type;
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() { return {{"amsgrad", false}}; }
};

struct DescribeLamb {
  using Options = LambOptions;
  using State = LambParamState;
  static constexpr const char* kName = "Lamb";
  static constexpr bool kStateFromStart = false;
  template <class V> static void options(Options& o, V&& v) {
    v("lr", o.lr()), v("betas", o.betas()), v("eps", o.eps()), v("weight_decay", o.weight_decay());
    v("bias_correction", o.bias_correction()), v("max_coeff", o.max_coeff()), v("min_coeff", o.min_coeff());
  }
  template <class V> static void settings(Options& o, V&& v) { v("eps_inside_sqrt", o.eps_inside_sqrt()); }
  template <class V> static void state(State& s, const Options&, V&& v) {
    v("step", s.step()), v("exp_avg", s.exp_avg(), true), v("exp_avg_sq", s.exp_avg_sq(), true);
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() { return {{"max_grad_norm", 0.0}}; }
};

struct DescribeMuon {
  using Options = MuonOptions;
  using State = MuonParamState;
  static constexpr const char* kName = "Muon";
  static constexpr bool kStateFromStart = false;
  template <class V> static void options(Options& o, V&& v) {
    v("use_muon", o.use_muon()), v("lr", o.lr()), v("weight_decay", o.weight_decay());
    if (o.use_muon()) v("momentum", o.momentum()), v("ns_method", o.ns_method());
    else v("betas", o.betas()), v("eps", o.eps());
  }
  template <class V> static void settings(Options& o, V&& v) { v("adam_w_mode", o.adam_w_mode()); }
  static bool same_kind(const Options& a, const Options& b) { return a.use_muon() == b.use_muon(); }
  template <class V> static void state(State& s, const Options& o, V&& v) {
    v("momentum_buffer", s.momentum_buffer(), o.use_muon());
    if (!o.use_muon()) v("step", s.step());
    v("exp_avg", s.exp_avg(), !o.use_muon()), v("exp_avg_sq", s.exp_avg_sq(), !o.use_muon());
  }
  static std::vector<std::pair<const char*, c10::IValue>> fixed() { return {}; }
};

/// Looks for what is out of range.
struct FindProblem {
  std::string& problem;
  void operator()(const char* name, double value) const {
    const bool below_one = std::string(name) == "momentum";
    if (problem.empty() && !(value >= 0 && (below_one ? value < 1 : std::isfinite(value))))
      problem =
          fmt::format("found {} {}, expected a number of at least 0{}", name, value, below_one ? " and below 1" : "");
  }
  void operator()(const char* name, const std::tuple<double, double>& betas) const {
    for (const double beta : {std::get<0>(betas), std::get<1>(betas)})
      if (problem.empty() && !(beta >= 0 && beta < 1))
        problem = fmt::format("found {} in {}, expected numbers of at least 0 and below 1", beta, name);
  }
  void operator()(const char*, bool) const {}
  void operator()(const char* name, const std::string& value) const {
    if (problem.empty() && value != "gram" && value != "standard")
      problem = fmt::format("found {} '{}', expected gram or standard", name, value);
  }
};

/// Nothing, or what is out of range.
template <class D>
requires requires(typename D::Options& o, const FindProblem& v) { D::settings(o, v); }
std::string problem_of_own(typename D::Options options) {
  std::string problem;
  D::options(options, FindProblem{problem});
  if constexpr (requires { options.max_coeff(); })
    if (problem.empty() && options.min_coeff() > options.max_coeff())
      problem = fmt::format("found min_coeff {} and max_coeff {}, expected the former to be no larger",
                            options.min_coeff(), options.max_coeff());
  return problem;
}

/// Lists the fields of options.
struct ListFields {
  using Field = std::variant<double*, bool*, std::string*, std::tuple<double, double>*>;
  std::vector<Field>& fields;
  template <class T> void operator()(const char*, T& value) const { fields.emplace_back(&value); }
};

/// The options of a group, which has some of D's. @param inherits  what is as in a fresh object is taken from
/// `defaults`
/// @throws ConfigError for those of another class, or out of range
template <class D>
std::unique_ptr<torch::optim::OptimizerOptions> options_of_own(const torch::optim::OptimizerParamGroup& group,
                                                               const torch::optim::OptimizerOptions& defaults,
                                                               bool inherits = true) {
  using Options = typename D::Options;
  const auto fields_of = [](Options& options) {
    std::vector<ListFields::Field> fields;
    D::options(options, ListFields{fields}), D::settings(options, ListFields{fields});
    return fields;
  };
  auto result = std::make_unique<Options>(static_cast<const Options&>(defaults));
  if (group.has_options()) {
    const auto* given = dynamic_cast<const Options*>(&group.options());
    if (!given)
      raise<ConfigError>(
          "{}: found options of class {} in a parameter group, expected {}Options: those of other optimizers have "
          "other fields, or mean something else by them. Give the group {}Options, or none",
          D::kName, c10::demangle(typeid(group.options()).name()), D::kName, D::kName);
    Options unset, otherwise = *result;
    *result = *given;
    if (inherits) {
      const auto values = fields_of(*result), fresh = fields_of(unset), inherited = fields_of(otherwise);
      for (size_t i = 0; i < values.size(); ++i)
        std::visit(
            [&](auto* value) {
              using Pointer = decltype(value);
              if (*value == *std::get<Pointer>(fresh[i])) *value = *std::get<Pointer>(inherited[i]);
            },
            values[i]);
    }
  }
  if (const auto problem = problem_of_own<D>(*result); !problem.empty())
    raise<ConfigError>("{}: {}", D::kName, problem);
  return result;
}

}  // namespace accelerate::optim
