#include "optim/fused_step.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <typeinfo>
#include <utility>
#include <vector>

#include "optim/describe_own.hpp"
#include "optim/fp32_moments.hpp"
#include "optim/kernels/operators.hpp"
#include "optim/steps_ahead.hpp"

namespace accelerate::optim {
namespace {

using torch::optim::Optimizer;

/// The parameters of one kernel call: those of one group, device and dtype that have taken equally many steps.
template <class State> struct Bucket {
  Bucket(size_t group, at::Device device, at::ScalarType dtype, int64_t step)
      : group(group), device(device), dtype(dtype), step(step) {}
  size_t group;
  at::Device device;
  at::ScalarType dtype;
  int64_t step;
  std::vector<State*> states;
  std::vector<at::Tensor> params, grads, first, second, largest, steps;
  at::Tensor step_tensor;  ///< shared by all entries of `steps`: the kernels only read it
};

double number_of(const std::optional<at::Tensor>& scale) { return scale ? scale->item<double>() : 1.0; }

/// Adam and AdamW. @param Kernel  ATen's, for GPUs
template <class Optimizer_, class Options_, class State_, auto Kernel, bool kDecoupled> struct AdamKernel {
  using Class = Optimizer_;
  using Options = Options_;
  using State = State_;

  static int64_t steps_taken(const State& state) { return state.step(); }
  static const at::Tensor& identity(const State& state) { return state.exp_avg(); }
  static bool tensors_fit(const State& state, const Options& options, const at::Tensor& param) {
    const auto fits = [&](const at::Tensor& t) {
      return t.defined() &&
             (t.scalar_type() == param.scalar_type() || t.scalar_type() == moment_type(options, param)) &&
             t.device() == param.device() && t.strides() == param.strides();
    };
    return fits(state.exp_avg()) && fits(state.exp_avg_sq()) &&
           state.exp_avg().scalar_type() == state.exp_avg_sq().scalar_type() &&
           (!options.amsgrad() || fits(state.max_exp_avg_sq()));
  }
  static std::unique_ptr<State> make_state(const at::Tensor& param, const Options& options) {
    const auto type = moment_type(options, param);
    auto state = std::make_unique<State>();
    state->exp_avg(at::zeros_like(param, type));
    state->exp_avg_sq(at::zeros_like(param, type));
    if (options.amsgrad()) state->max_exp_avg_sq(at::zeros_like(param));
    return state;
  }
  static bool needs_state(const Options&) { return true; }
  static const char* refuses(const at::Device&) { return nullptr; }
  static void add(Bucket<State>& bucket, const State* state, const Options& options) {
    if (!bucket.step_tensor.defined() && !bucket.device.is_cpu())
      bucket.step_tensor = at::scalar_tensor(0.0, at::TensorOptions().dtype(at::kFloat).device(bucket.device));
    bucket.first.push_back(state->exp_avg());
    bucket.second.push_back(state->exp_avg_sq());
    if (options.amsgrad()) bucket.largest.push_back(state->max_exp_avg_sq());
    bucket.steps.push_back(bucket.step_tensor);
  }
  static constexpr bool kCountsSteps = true;
  static kernels::AdamStep rule(const Bucket<State>& bucket, const Options& options) {
    return {options.lr(),  std::get<0>(options.betas()), std::get<1>(options.betas()),
            options.eps(), options.weight_decay(),       kDecoupled,
            bucket.step};
  }
  static void run(Bucket<State>& bucket, const Options& options, const std::optional<at::Tensor>& grad_scale) {
    if (bucket.device.is_cpu())
      return kernels::step_(rule(bucket, options), bucket.params, bucket.grads, bucket.first, bucket.second,
                            bucket.largest, number_of(grad_scale));
    bucket.step_tensor.fill_(static_cast<double>(bucket.step));
    Kernel(bucket.params, bucket.grads, bucket.first, bucket.second, bucket.largest, bucket.steps, options.lr(),
           std::get<0>(options.betas()), std::get<1>(options.betas()), options.weight_decay(), options.eps(),
           options.amsgrad(), /*maximize=*/false, grad_scale, std::nullopt);
  }
  /// The lists stay right after a step.
  static bool lists_outdated(const Bucket<State>&) { return false; }
};

void adam_kernel(at::TensorList params, at::TensorList grads, at::TensorList first, at::TensorList second,
                 at::TensorList largest, at::TensorList steps, double lr, double beta1, double beta2,
                 double weight_decay, double eps, bool amsgrad, bool maximize,
                 const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  at::_fused_adam_(params, grads, first, second, largest, steps, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize,
                   grad_scale, found_inf);
}
void adamw_kernel(at::TensorList params, at::TensorList grads, at::TensorList first, at::TensorList second,
                  at::TensorList largest, at::TensorList steps, double lr, double beta1, double beta2,
                  double weight_decay, double eps, bool amsgrad, bool maximize,
                  const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
  at::_fused_adamw_(params, grads, first, second, largest, steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
                    maximize, grad_scale, found_inf);
}

struct SGDKernel {
  using Class = torch::optim::SGD;
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  /// Only "none" and "some" matter: the first step fills the buffer.
  static int64_t steps_taken(const State&) { return 1; }
  static const at::Tensor& identity(const State& state) { return state.momentum_buffer(); }
  static bool tensors_fit(const State& state, const Options&, const at::Tensor& param) {
    const auto& buffer = state.momentum_buffer();
    return buffer.defined() && buffer.scalar_type() == param.scalar_type() && buffer.device() == param.device() &&
           buffer.strides() == param.strides();
  }
  static bool needs_state(const Options& options) { return options.momentum() != 0; }
  static std::unique_ptr<State> make_state(const at::Tensor& param, const Options&) {
    auto state = std::make_unique<State>();
    state->momentum_buffer(at::empty_like(param));
    return state;
  }
  static void add(Bucket<State>& bucket, const State* state, const Options&) {
    if (state) bucket.first.push_back(state->momentum_buffer());
  }
  static const char* refuses(const at::Device&) { return nullptr; }
  static constexpr bool kCountsSteps = false;
  static kernels::SgdStep rule(const Bucket<State>& bucket, const Options& options) {
    const bool first = !bucket.first.empty() && bucket.step == 0;
    return {options.lr(), options.momentum(), options.dampening(), options.weight_decay(), options.nesterov(), first};
  }
  static void run(Bucket<State>& bucket, const Options& options, const std::optional<at::Tensor>& grad_scale) {
    const auto rule = SGDKernel::rule(bucket, options);
    if (bucket.device.is_cpu())
      return kernels::step_(rule, bucket.params, bucket.grads, bucket.first, number_of(grad_scale));
    at::_fused_sgd_(bucket.params, bucket.grads, bucket.first, options.weight_decay(), options.momentum(), options.lr(),
                    options.dampening(), options.nesterov(),
                    /*maximize=*/false, /*is_first_step=*/rule.first, grad_scale, std::nullopt);
  }
  /// Buffers of a first step join the others from the second one on.
  static bool lists_outdated(const Bucket<State>& bucket) { return !bucket.first.empty() && bucket.step == 0; }
};

struct AdagradKernel {
  using Class = torch::optim::Adagrad;
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;

  static int64_t steps_taken(const State& state) { return state.step(); }
  static const at::Tensor& identity(const State& state) { return state.sum(); }
  static bool tensors_fit(const State& state, const Options&, const at::Tensor& param) {
    const auto& sum = state.sum();
    return sum.defined() && sum.scalar_type() == param.scalar_type() && sum.device() == param.device() &&
           sum.strides() == param.strides();
  }
  static bool needs_state(const Options&) { return true; }
  static std::unique_ptr<State> make_state(const at::Tensor& param, const Options& options) {
    auto state = std::make_unique<State>();
    state->step(0);
    state->sum(at::full_like(param, options.initial_accumulator_value()));
    return state;
  }
  static const char* refuses(const at::Device& device) {
    return device.is_cpu() ? nullptr : "Adagrad has a fused kernel on CPUs only";
  }
  static void add(Bucket<State>& bucket, const State* state, const Options&) { bucket.first.push_back(state->sum()); }
  static constexpr bool kCountsSteps = true;
  static kernels::AdagradStep rule(const Bucket<State>& bucket, const Options& options) {
    return {options.lr(), options.lr_decay(), options.eps(), options.weight_decay(), bucket.step};
  }
  static void run(Bucket<State>& bucket, const Options& options, const std::optional<at::Tensor>& grad_scale) {
    kernels::step_(rule(bucket, options), bucket.params, bucket.grads, bucket.first, number_of(grad_scale));
  }
  static bool lists_outdated(const Bucket<State>&) { return false; }
};

struct LionKernel {
  using Class = Lion;
  using Options = LionOptions;
  using State = LionParamState;

  static int64_t steps_taken(const State& state) { return state.step(); }
  static const at::Tensor& identity(const State& state) { return state.exp_avg(); }
  static bool tensors_fit(const State& state, const Options&, const at::Tensor& param) {
    const auto& momentum = state.exp_avg();
    return momentum.defined() && momentum.scalar_type() == param.scalar_type() && momentum.device() == param.device() &&
           momentum.strides() == param.strides();
  }
  static bool needs_state(const Options&) { return true; }
  static std::unique_ptr<State> make_state(const at::Tensor& param, const Options&) {
    auto state = std::make_unique<State>();
    state->exp_avg(at::zeros_like(param));
    return state;
  }
  static const char* refuses(const at::Device& device) {
    return device.is_cpu() ? nullptr : "Lion has a fused kernel on CPUs only";
  }
  static void add(Bucket<State>& bucket, const State* state, const Options&) {
    bucket.first.push_back(state->exp_avg());
  }
  static constexpr bool kCountsSteps = true;
  static kernels::LionStep rule(const Bucket<State>&, const Options& options) {
    const auto [beta1, beta2] = options.betas();
    return {options.lr(), beta1, beta2, options.weight_decay()};
  }
  static void run(Bucket<State>& bucket, const Options& options, const std::optional<at::Tensor>& grad_scale) {
    kernels::step_(rule(bucket, options), bucket.params, bucket.grads, bucket.first, number_of(grad_scale));
  }
  static bool lists_outdated(const Bucket<State>&) { return false; }
};

struct DeepSpeedAdamKernel {
  using Class = DeepSpeedAdam;
  using Options = DeepSpeedAdamOptions;
  using State = DeepSpeedAdamParamState;

  static int64_t steps_taken(const State& state) { return state.step(); }
  static const at::Tensor& identity(const State& state) { return state.exp_avg(); }
  /// Moments may be more exact than the parameter.
  static bool tensors_fit(const State& state, const Options&, const at::Tensor& param) {
    const auto fits = [&](const at::Tensor& t) {
      const bool exact_enough = t.defined() && (t.scalar_type() == param.scalar_type() ||
                                                (t.scalar_type() == at::kFloat && param.scalar_type() != at::kDouble));
      return exact_enough && t.device() == param.device() && t.strides() == param.strides();
    };
    return fits(state.exp_avg()) && fits(state.exp_avg_sq()) &&
           state.exp_avg().scalar_type() == state.exp_avg_sq().scalar_type();
  }
  static bool needs_state(const Options&) { return true; }
  static std::unique_ptr<State> make_state(const at::Tensor& param, const Options& options) {
    const auto type = DescribeDeepSpeedAdam::state_type(options, param);
    auto state = std::make_unique<State>();
    state->exp_avg(at::zeros_like(param, type));
    state->exp_avg_sq(at::zeros_like(param, type));
    return state;
  }
  static const char* refuses(const at::Device& device) {
    return device.is_cpu() ? nullptr : "DeepSpeedAdam has a fused kernel on CPUs only";
  }
  static void add(Bucket<State>& bucket, const State* state, const Options&) {
    bucket.first.push_back(state->exp_avg());
    bucket.second.push_back(state->exp_avg_sq());
  }
  static constexpr bool kCountsSteps = true;
  static kernels::AdamStep rule(const Bucket<State>& bucket, const Options& options) {
    const auto [beta1, beta2] = options.betas();
    return {options.lr(),
            beta1,
            beta2,
            options.eps(),
            options.weight_decay(),
            options.adam_w_mode(),
            bucket.step,
            options.bias_correction()};
  }
  static void run(Bucket<State>& bucket, const Options& options, const std::optional<at::Tensor>& grad_scale) {
    kernels::step_(rule(bucket, options), bucket.params, bucket.grads, bucket.first, bucket.second, {},
                   number_of(grad_scale));
  }
  static bool lists_outdated(const Bucket<State>&) { return false; }
};

template <class Kernel> class FusedStepOf : public FusedStep {
 public:
  using Options = typename Kernel::Options;
  using State = typename Kernel::State;

  FusedStepOf(Optimizer& optimizer, bool allow_half) : optimizer_(optimizer), allow_half_(allow_half) {}

  const char* prepare() override {
    discard();
    const char* reason = collect();
    if (reason) discard();
    return reason;
  }

  void discard() override {
    entries_.clear();
    for (auto& bucket : buckets_) bucket.grads.clear();
  }

  void run(const std::optional<at::Tensor>& grad_scale) override {
    fill_lists();
    step_on_lists(grad_scale, [&](Bucket<State>& bucket, const Options& options, const auto& scale) {
      if (auto rest = take_over(bucket, options, scale)) {
        if (!rest->params.empty()) Kernel::run(*rest, options, scale);
      } else {
        Kernel::run(bucket, options, scale);
      }
    });
  }

  void end_step() override { ahead_.end_step(); }

  const char* prepare_ahead(const Parameters& which) override {
    coming_.clear();
    const auto& groups = optimizer_.param_groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& options = static_cast<const Options&>(groups[g].options());
      for (const auto& param : groups[g].params()) {
        if (!which.contains(param.unsafeGetTensorImpl())) continue;
        if (!param.is_cpu() && !param.is_meta()) return "a parameter lies on an accelerator";
        State* state = nullptr;
        if (const char* reason = why_not(param, options, state)) return reason;
        if (!param.grad().defined() || (Kernel::needs_state(options) && !state)) continue;  // a step makes the state
        const int64_t step = state ? Kernel::steps_taken(*state) : 0;
        auto same = std::find_if(coming_.begin(), coming_.end(), [&](const auto& bucket) {
          return bucket.group == g && bucket.dtype == param.scalar_type() && bucket.step == step;
        });
        if (same == coming_.end()) same = coming_.emplace(coming_.end(), g, param.device(), param.scalar_type(), step);
        same->params.push_back(param);
        same->grads.push_back(param.grad());
        if (state) Kernel::add(*same, state, options);
      }
    }
    if (ahead_.waits()) coming_.clear();
    return nullptr;
  }

  bool has_ahead() const override { return !coming_.empty(); }

  void compute_ahead(double divisor, const Elsewhere& elsewhere) override {
    const at::NoGradGuard no_grad;
    for (auto& bucket : std::exchange(coming_, {}))
      ahead_.compute(next_rule(bucket, options_of(bucket)), lists_of(bucket), divisor, elsewhere);
  }

  bool fits_ahead(const Parameters& these, const std::optional<at::Tensor>& grad_scale,
                  const Elsewhere& elsewhere) override {
    if (entries_.empty() || ahead_.count(these) != entries_.size()) return false;
    for (const Entry& entry : entries_)
      if (!entry.state &&
          Kernel::needs_state(static_cast<const Options&>(optimizer_.param_groups()[entry.group].options())))
        return false;
    const at::NoGradGuard no_grad;
    fill_lists();
    return std::all_of(buckets_.begin(), buckets_.end(), [&](Bucket<State>& bucket) {
      return ahead_.fits(next_rule(bucket, options_of(bucket)), lists_of(bucket), number_of(grad_scale), elsewhere);
    });
  }

  void take_ahead(const std::optional<at::Tensor>& grad_scale) override {
    step_on_lists(grad_scale, [&](Bucket<State>& bucket, const Options&, const auto& scale) {
      ahead_.take(lists_of(bucket), number_of(scale));
    });
  }

 private:
  /// A parameter that has a gradient in this step.
  struct Entry {
    size_t group;
    const at::Tensor* param;
    at::Tensor grad;
    State* state;  ///< null before its first step, and where no state is needed
  };
  /// The sources that the lists were built from, in the same order.
  struct Origin {
    size_t group;
    const void* param;
    const State* state;
    const void* state_tensor;
    bool amsgrad;
    size_t bucket;
  };

  /// The number of the bucket's step, in its states too.
  static void count_step(Bucket<State>& bucket) {
    if constexpr (Kernel::kCountsSteps) {
      ++bucket.step;
      for (State* state : bucket.states) state->step(bucket.step);
    }
  }
  const Options& options_of(const Bucket<State>& bucket) const {
    return static_cast<const Options&>(optimizer_.param_groups()[bucket.group].options());
  }
  /// Of a step that is not counted yet.
  static auto next_rule(Bucket<State>& bucket, const Options& options) {
    bucket.step += Kernel::kCountsSteps ? 1 : 0;
    const auto rule = Kernel::rule(bucket, options);
    bucket.step -= Kernel::kCountsSteps ? 1 : 0;
    return rule;
  }
  /// The entries' gradients are in the lists.
  void fill_lists() {
    const at::NoGradGuard no_grad;
    if (!lists_are_current()) build_lists();
    for (size_t i = 0; i < entries_.size(); ++i)
      buckets_[layout_[i].bucket].grads.push_back(std::move(entries_[i].grad));
  }
  template <class Step> void step_on_lists(const std::optional<at::Tensor>& grad_scale, const Step& step) {
    const at::NoGradGuard no_grad;
    bool outdated = false;
    for (auto& bucket : buckets_) {
      const auto scale = grad_scale ? std::optional(grad_scale->to(bucket.device)) : std::nullopt;
      count_step(bucket);
      step(bucket, options_of(bucket), scale);
      // Fused kernels don't say that they have written; homes of images, and autograd, want to know.
      for (const at::Tensor& parameter : bucket.params) parameter.unsafeGetTensorImpl()->bump_version();
      if (bucket.device.is_cpu() && number_of(scale) != 1)  // our kernels leave them divided
        for (const at::Tensor& gradient : bucket.grads) gradient.unsafeGetTensorImpl()->bump_version();
      bucket.grads.clear();  // backward reuses a gradient's memory only if nobody else holds it
      outdated |= Kernel::lists_outdated(bucket);
    }
    if (outdated) layout_.clear(), buckets_.clear();  // a step without any gradient needs no lists
    entries_.clear();
  }
  static kernels::StepLists lists_of(const Bucket<State>& bucket) {
    return {bucket.params, bucket.grads, bucket.first, bucket.second, bucket.largest};
  }
  /// Puts values that were computed ahead in place. @return the part that is left to do; nothing: all of it
  std::optional<Bucket<State>> take_over(const Bucket<State>& bucket, const Options& options,
                                         const std::optional<at::Tensor>& scale) {
    if (ahead_.empty() || !bucket.device.is_cpu()) return std::nullopt;
    const auto left = ahead_.take_over(Kernel::rule(bucket, options), lists_of(bucket), number_of(scale));
    if (left.size() == bucket.params.size()) return std::nullopt;
    Bucket<State> rest(bucket.group, bucket.device, bucket.dtype, bucket.step);
    for (const size_t i : left) {
      for (const auto list : {&Bucket<State>::params, &Bucket<State>::grads, &Bucket<State>::first,
                              &Bucket<State>::second, &Bucket<State>::largest})
        if (!(bucket.*list).empty()) (rest.*list).push_back((bucket.*list)[i]);
    }
    return rest;
  }

  static bool amsgrad(const Options& options) {
    if constexpr (requires { options.amsgrad(); }) return options.amsgrad();
    else return false;
  }

  const char* collect() {
    const auto& groups = optimizer_.param_groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& options = static_cast<const Options&>(groups[g].options());
      for (const auto& param : groups[g].params()) {
        const auto& grad = param.grad();
        if (!grad.defined()) continue;
        if (!param.is_cpu() && !param.is_cuda()) return "a parameter is neither on a CPU nor on a CUDA device";
        State* state = nullptr;
        if (const char* reason = why_not(param, options, state)) return reason;
        entries_.push_back({g, &param, grad, state});
      }
    }
    return nullptr;
  }

  /// Why a kernel can't step on the parameter, with its gradient if it has one; null: it can, with the state that is
  /// found (null: there is none, or none is needed).
  const char* why_not(const at::Tensor& param, const Options& options, State*& state) const {
    if (param.layout() != at::kStrided) return "a parameter or gradient is not dense";
    if (const char* reason = param.is_meta() ? nullptr : Kernel::refuses(param.device())) return reason;
    const auto dtype = param.scalar_type();
    if (dtype != at::kFloat && dtype != at::kDouble &&
        !((dtype == at::kHalf || dtype == at::kBFloat16) && (allow_half_ || has_fp32_moments(options))))
      return "a parameter is neither fp32 nor fp64 (fp16 and bf16 only with fused = true)";
    if (const auto& grad = param.grad(); grad.defined()) {
      if (grad.layout() != at::kStrided) return "a parameter or gradient is not dense";
      // Ours widen what they read.
      const bool widened = (param.is_cpu() || param.is_meta()) && dtype == at::kFloat &&
                           (grad.scalar_type() == at::kHalf || grad.scalar_type() == at::kBFloat16);
      if ((grad.scalar_type() != dtype && !widened) || grad.device() != param.device())
        return "a gradient differs from its parameter in dtype or device";
      if (!param.is_non_overlapping_and_dense() || grad.strides() != param.strides())
        return "a gradient and its parameter differ in memory layout";
    }
    if (!Kernel::needs_state(options)) return nullptr;
    const auto& states = optimizer_.state();
    if (const auto found = states.find(param.unsafeGetTensorImpl()); found != states.end()) {
      state = static_cast<State*>(found->second.get());
      if (!Kernel::tensors_fit(*state, options, param))
        return "the optimizer's state and its parameter differ in dtype, device or memory layout";
    }
    return nullptr;
  }

  bool lists_are_current() const {
    if (layout_.size() != entries_.size()) return false;
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      const Origin& origin = layout_[i];
      const auto& bucket = buckets_[origin.bucket];
      const auto& options = static_cast<const Options&>(optimizer_.param_groups()[entry.group].options());
      if (entry.group != origin.group || entry.param->unsafeGetTensorImpl() != origin.param ||
          entry.state != origin.state || amsgrad(options) != origin.amsgrad ||
          entry.param->scalar_type() != bucket.dtype || entry.param->device() != bucket.device)
        return false;
      if (entry.state && (Kernel::identity(*entry.state).unsafeGetTensorImpl() != origin.state_tensor ||
                          Kernel::steps_taken(*entry.state) != bucket.step))
        return false;
      if (!entry.state && Kernel::needs_state(options)) return false;
    }
    return true;
  }

  void build_lists() {
    layout_.clear();
    buckets_.clear();
    for (Entry& entry : entries_) {
      const auto& options = static_cast<const Options&>(optimizer_.param_groups()[entry.group].options());
      int64_t step = entry.state ? Kernel::steps_taken(*entry.state) : 0;
      if (!entry.state && Kernel::needs_state(options)) {
        auto state = Kernel::make_state(*entry.param, options);
        entry.state = state.get();
        auto& place = optimizer_.state()[entry.param->unsafeGetTensorImpl()];
        // Parameters of a group that was added later may repeat: LibTorch only compares groups.
        if (place) entry.state = static_cast<State*>(place.get());
        else place = std::move(state);
      }
      size_t b = 0;
      while (b < buckets_.size() && !(buckets_[b].group == entry.group && buckets_[b].device == entry.param->device() &&
                                      buckets_[b].dtype == entry.param->scalar_type() && buckets_[b].step == step))
        ++b;
      if (b == buckets_.size())
        buckets_.emplace_back(entry.group, entry.param->device(), entry.param->scalar_type(), step);
      auto& bucket = buckets_[b];
      bucket.params.push_back(*entry.param);
      if (entry.state) bucket.states.push_back(entry.state);
      Kernel::add(bucket, entry.state, options);
      layout_.push_back({entry.group, entry.param->unsafeGetTensorImpl(), entry.state,
                         entry.state ? Kernel::identity(*entry.state).unsafeGetTensorImpl() : nullptr, amsgrad(options),
                         b});
    }
  }

  Optimizer& optimizer_;
  bool allow_half_;
  std::vector<Entry> entries_;
  std::vector<Origin> layout_;
  std::vector<Bucket<State>> buckets_;
  std::vector<Bucket<State>> coming_;  ///< what the coming step can be computed of
  StepsAhead<decltype(Kernel::rule(std::declval<Bucket<State>>(), std::declval<Options>()))> ahead_;
};

using FusedAdam = FusedStepOf<AdamKernel<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState,
                                         adam_kernel, /*kDecoupled=*/false>>;
using FusedAdamW = FusedStepOf<AdamKernel<torch::optim::AdamW, torch::optim::AdamWOptions,
                                          torch::optim::AdamWParamState, adamw_kernel, /*kDecoupled=*/true>>;
using FusedSGD = FusedStepOf<SGDKernel>;
using FusedAdagrad = FusedStepOf<AdagradKernel>;
using FusedLion = FusedStepOf<LionKernel>;
using FusedDeepSpeedAdam = FusedStepOf<DeepSpeedAdamKernel>;

}  // namespace

std::unique_ptr<FusedStep> FusedStep::create(Optimizer& optimizer, bool allow_half) {
  if (typeid(optimizer) == typeid(torch::optim::AdamW)) return std::make_unique<FusedAdamW>(optimizer, allow_half);
  if (typeid(optimizer) == typeid(torch::optim::Adam)) return std::make_unique<FusedAdam>(optimizer, allow_half);
  if (typeid(optimizer) == typeid(torch::optim::SGD)) return std::make_unique<FusedSGD>(optimizer, allow_half);
  if (typeid(optimizer) == typeid(torch::optim::Adagrad)) return std::make_unique<FusedAdagrad>(optimizer, allow_half);
  // Their plain steps round once, too, whatever the type.
  if (typeid(optimizer) == typeid(Lion)) return std::make_unique<FusedLion>(optimizer, /*allow_half=*/true);
  if (typeid(optimizer) == typeid(DeepSpeedAdam))
    return std::make_unique<FusedDeepSpeedAdam>(optimizer, /*allow_half=*/true);
  return nullptr;
}

}  // namespace accelerate::optim
