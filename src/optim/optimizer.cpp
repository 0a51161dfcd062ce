#include "accelerate/optim/optimizer.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/full_like.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/optim/adam8bit.hpp"
#include "accelerate/optim/grad_scaler.hpp"
#include "accelerate/optim/own_optimizer.hpp"
#include "accelerate/optim/step_hooks.hpp"
#include "accelerate/state.hpp"
#include "memory/meta_memory.hpp"
#include "observe/run_phases.hpp"
#include "observe/step_report.hpp"
#include "optim/counts.hpp"
#include "optim/fp32_moments.hpp"
#include "optim/fused_step.hpp"
#include "optim/optimizer_state.hpp"
#include "optim/widen_gradient.hpp"
#include "snapshot/ledger.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {

struct AcceleratedOptimizer::Impl {
  /// Owned or, when the caller passed a reference, only pointed to.
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<optim::GradScaler> scaler;
  AcceleratedOptimizerOptions options;
  std::unique_ptr<optim::FusedStep> fused;  ///< null: never fused
  GradientState gradients;
  bool step_was_skipped = false;
  bool step_was_fused = false;
  int64_t steps = 0;    ///< that changed the parameters
  int64_t skipped = 0;  ///< the last ones, in a row
  StepCounts counts = {};
  std::optional<std::vector<double>> rates_at_once;  ///< of groups, if step_on() has stepped since step() did
  std::optional<at::Tensor> divisor;                 ///< of the gradients of the step that begins, besides the scale
  /// In the order of their coming, which is the same on all ranks: they are collective.
  std::vector<std::pair<const void*, StepHooks>> hooks;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (scaler && optimizer) scaler->unwatch(*optimizer);
  }

  at::Tensor step_now(const LossClosure& closure);
  /// The optimizer's own step is not the one to take.
  bool replaces_step() const { return divisor || optim::has_fp32_moments(*optimizer); }
  /// The number that gradients are to be divided by in all.
  std::optional<at::Tensor> divided_by(const std::optional<at::Tensor>& grad_scale) const {
    if (!divisor || !grad_scale) return divisor ? divisor : grad_scale;
    return *divisor * grad_scale->to(divisor->device());
  }

  /// Steps on all parameters that have gradients. @param grad_scale  what these are to be divided by
  void take(const std::optional<at::Tensor>& grad_scale);
  /// The same of those that the optimizer has for now, of which more come in the same step.
  void take_some(const std::optional<at::Tensor>& grad_scale);
  /// Some of the parameters, which hooks are told of.
  struct Part {
    const StepHooks* hooks;
    size_t number;  ///< to these
    std::vector<at::Tensor> parameters;
  };
  /// Empty: the step is on all at once.
  std::vector<Part> parts() const;
  /// The one that these are of; nothing: they are in none.
  std::optional<Part> part_of(const std::unordered_set<const at::TensorImpl*>& parameters) const;
  void take_part_by_part(const std::vector<Part>& parts, const std::optional<at::Tensor>& grad_scale);
  /// Of a part, which is all that the optimizer has for now. @return whether what was computed ahead was its step
  bool take_ahead(const Part& part, const std::unordered_set<const at::TensorImpl*>& parameters,
                  const std::optional<at::Tensor>& grad_scale);

  /// Whether the fused kernels take this step.
  bool prepare_fused() {
    step_was_fused = false;
    if (!fused) return false;
    if (const char* reason = fused->prepare()) {
      if (options.fused == true)
        raise<ConfigError>(
            "AcceleratedOptimizer::step: fused = true but the fused kernels can't take this step: {}. Leave `fused` "
            "unset to use them where they can.",
            reason);
      return false;
    }
    return step_was_fused = true;
  }
};

namespace {

using Parameters = std::unordered_set<const at::TensorImpl*>;

/// While it lives the optimizer has some of its parameters only.
class OnlySome {
 public:
  template <class Which> OnlySome(torch::optim::Optimizer& optimizer, Which&& which) : optimizer_(optimizer) {
    for (auto& group : optimizer.param_groups()) {
      all_.push_back(group.params());
      std::erase_if(group.params(), [&](const at::Tensor& parameter) { return !which(parameter); });
    }
  }
  OnlySome(const OnlySome&) = delete;
  OnlySome& operator=(const OnlySome&) = delete;
  ~OnlySome() {
    for (size_t i = 0; i < all_.size(); ++i) optimizer_.param_groups()[i].params() = std::move(all_[i]);
  }

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> all_;
};

void require_steps_on_pieces(const torch::optim::Optimizer& optimizer) {
  if (!optim::steps_on_pieces(optimizer))
    raise<ConfigError>(
        "step: found an optimizer of class {}, which may need all of its parameters at once, expected one that steps "
        "on pieces (SGD, Adam, AdamW, Adagrad, RMSprop, those of accelerate::optim), because this model is stepped on "
        "part by part",
        c10::demangle(typeid(optimizer).name()));
}

std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

/// LibTorch's parameters() lists a tied weight under each of its names, and an optimizer would step it as often.
/// Python's lists it once.
void keep_each_parameter_once(torch::optim::Optimizer& optimizer) {
  std::unordered_set<const at::TensorImpl*> seen;
  for (auto& group : optimizer.param_groups())
    std::erase_if(group.params(),
                  [&](const at::Tensor& parameter) { return !seen.insert(parameter.unsafeGetTensorImpl()).second; });
}

/// Makes states of parameters that came later: LibTorch's Adagrad makes its own at once, and its step needs all.
void make_missing_states(torch::optim::Adagrad& optimizer) {
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
    for (const auto& parameter : group.params()) {
      auto& place = optimizer.state()[parameter.unsafeGetTensorImpl()];
      if (place != nullptr) continue;
      auto state = std::make_unique<torch::optim::AdagradParamState>();
      state->step(0);
      state->sum(at::full_like(parameter, options.initial_accumulator_value(), at::MemoryFormat::Preserve));
      place = std::move(state);
    }
  }
}

bool is_dry(const torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::any_of(group.params().begin(), group.params().end(),
                       [](const at::Tensor& parameter) { return parameter.is_meta(); });
  });
}

/// The scale finds its place in a few steps; after so many it will not, and nothing has been trained.
constexpr int64_t kSuspiciouslyManySkipped = 10;

void warn_of_skipped_steps(int64_t skipped, const optim::GradScaler& scaler) {
  int64_t n = skipped;
  while (n % 10 == 0) n /= 10;
  if (skipped < kSuspiciouslyManySkipped || n != 1) return;  // again after 100, 1000, …
  const bool finite = scaler.last_loss_is_finite();
  if (finite && !PartialState().is_main_process()) return;  // the rank whose loss it is says so
  logs::warn("accelerate.optim",
             "AcceleratedOptimizer::step: the last {} steps were skipped, because in fp16 gradients were inf or NaN on "
             "some rank; nothing is trained. {}",
             skipped,
             finite ? "The loss of this rank is a number, so something on the way back overflows, or another rank's "
                      "loss does. Train with mixed_precision \"bf16\" or \"no\" to see which."
                    : "The loss itself is inf or NaN on this rank, which no scale can mend: look at the batch, the "
                      "learning rate and the model's outputs; bf16 has the range of fp32.");
}

/// Classes that are not this library's compute by LibTorch's operators: of a gradient in 16 bits, which sharded layouts
/// hand on, the product with a rate would have 16 bits too. In a dry run all stand for kernels that widen themselves.
void widen_for_others(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const optim::OwnOptimizer*>(&optimizer) || dynamic_cast<const optim::AdamW8bit*>(&optimizer)) return;
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params())
      if (parameter.grad().defined() && !parameter.is_meta()) optim::widen_gradient(parameter);
}

/// An optimizer that evaluates its closure until the loss pleases it (LBFGS) must do so equally often on all ranks,
/// which average gradients in it: it gets the mean of their losses.
AcceleratedOptimizer::LossClosure in_step(const AcceleratedOptimizer::LossClosure& closure,
                                          torch::optim::Optimizer& optimizer) {
  widen_for_others(optimizer);
  if (!closure) return closure;
  const bool alone = comm::world_size() == 1 || optim::steps_on_pieces(optimizer);
  return [closure, alone, &optimizer] {
    const at::Tensor loss = closure();
    widen_for_others(optimizer);
    return alone ? loss : comm::agreed::all_reduce(loss.detach(), Reduction::mean, 1.0);
  };
}

}  // namespace

AcceleratedOptimizer::AcceleratedOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer, bool device_placement,
                                           std::shared_ptr<optim::GradScaler> scaler,
                                           const AcceleratedOptimizerOptions& options)
    : impl_(std::make_shared<Impl>()) {
  if (!optimizer) throw ConfigError("AcceleratedOptimizer: found a null pointer, expected an optimizer.");
  keep_each_parameter_once(*optimizer);
  if (options.fused.value_or(true)) impl_->fused = optim::FusedStep::create(*optimizer, options.fused == true);
  if (options.fused == true && !impl_->fused)
    throw ConfigError(
        "AcceleratedOptimizer: fused = true but only torch::optim::Adam, AdamW, SGD and Adagrad, and optim::Lion and "
        "DeepSpeedAdam, have fused kernels (classes derived from them may step in another way). Leave `fused` unset.");
  if (device_placement && !optimizer->state().empty()) {
    const at::Device device = PartialState().device();
    optim::map_optimizer_state(*optimizer, [&](const at::Tensor& tensor) { return tensor.to(device); });
  }
  impl_->optimizer = std::move(optimizer);
  impl_->scaler = std::move(scaler);
  if (impl_->scaler) impl_->scaler->watch(*impl_->optimizer);
  impl_->options = options;
}

AcceleratedOptimizer::AcceleratedOptimizer(torch::optim::Optimizer& optimizer, bool device_placement,
                                           std::shared_ptr<optim::GradScaler> scaler,
                                           const AcceleratedOptimizerOptions& options)
    : AcceleratedOptimizer(std::shared_ptr<torch::optim::Optimizer>(std::shared_ptr<void>(), &optimizer),
                           device_placement, std::move(scaler), options) {}

at::Tensor AcceleratedOptimizer::step(const LossClosure& closure) const {
  Impl& self = *impl_;
  if (!self.gradients.sync_gradients()) return {};
  run_phases::PhaseScope phase(run_phases::Phase::step, self.optimizer.get());
  if (const auto rates = std::exchange(self.rates_at_once, std::nullopt); rates && *rates != rates_of(*self.optimizer))
    throw ConfigError(
        "step: found learning rates that have changed since backward, in which steps were taken at once, with the ones "
        "of before; expected them to change after step(). Or leave step_at_once out");
  look();
  at::Tensor loss;
  const bool scaled = self.scaler && self.scaler->is_enabled();
  // A closure that computes anew, with all ranks, does so before parameters are about to change.
  const bool first = closure && !scaled && optim::steps_on_pieces(*self.optimizer);
  if (first) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  for (const auto& [owner, hooks] : self.hooks)
    if (hooks.before) hooks.before();
  self.divisor.reset();
  for (const auto& [owner, hooks] : self.hooks)
    if (hooks.divisor) self.divisor = hooks.divisor();
  if (first) self.step_now(nullptr);
  else loss = self.step_now(closure);
  for (const auto& [owner, hooks] : self.hooks)
    if (hooks.after) hooks.after();
  self.rates_at_once.reset();  // also of steps that were taken when what waited was averaged just now
  counts::add(self.step_was_skipped ? optim::OptimCount::steps_skipped : optim::OptimCount::optimizer_steps);
  if (!self.step_was_skipped) report_optimizer_step(++self.steps, self.optimizer.get());
  if (self.step_was_skipped) warn_of_skipped_steps(++self.skipped, *self.scaler);
  else self.skipped = 0;
  ++(self.step_was_skipped ? self.counts.skipped : self.counts.taken);
  phase.end();
  return loss;
}

void AcceleratedOptimizer::look() const {
  for (const auto& [owner, hooks] : impl_->hooks)
    if (hooks.look) hooks.look();
}

void AcceleratedOptimizer::set_step_hooks(const void* owner, StepHooks hooks) const {
  for (auto& known : impl_->hooks)
    if (known.first == owner) return void(known.second = std::move(hooks));
  impl_->hooks.emplace_back(owner, std::move(hooks));
}

void AcceleratedOptimizer::step_on(const std::vector<at::Tensor>& parameters) const {
  Impl& self = *impl_;
  Parameters wanted;
  for (const auto& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  const auto is_wanted = [&](const at::Tensor& parameter) { return wanted.contains(parameter.unsafeGetTensorImpl()); };
  const auto& groups = self.optimizer->param_groups();
  if (std::none_of(groups.begin(), groups.end(), [&](const auto& group) {
        return std::any_of(group.params().begin(), group.params().end(), is_wanted);
      }))
    return;
  if (!self.gradients.sync_gradients()) return;
  require_steps_on_pieces(*self.optimizer);
  if (self.scaler && self.scaler->is_enabled())
    throw ConfigError(
        "step: found a step within backward together with loss scaling, expected mixed_precision \"bf16\" or \"no\": "
        "whether a gradient overflowed is known when all of them are there");
  if (!self.rates_at_once) self.rates_at_once = rates_of(*self.optimizer);
  const meta_memory::Purpose states(MemoryUse::optimizer);
  const snapshot::StepWrites writes;
  const OnlySome some(*self.optimizer, is_wanted);
  self.take(std::nullopt);
  for (auto& group : self.optimizer->param_groups())
    for (auto& parameter : group.params())
      if (parameter.grad().defined()) {
        parameter.mutable_grad().reset();
        counts::add(optim::OptimCount::steps_at_once);
      }
}

void AcceleratedOptimizer::step_ahead(const std::vector<at::Tensor>& parameters) const {
  Impl& self = *impl_;
  Parameters which;
  for (const auto& parameter : parameters) which.insert(parameter.unsafeGetTensorImpl());
  size_t own = 0;
  for (const auto& group : self.optimizer->param_groups())
    for (const auto& parameter : group.params()) own += which.contains(parameter.unsafeGetTensorImpl()) ? 1 : 0;
  if (own == 0) return;
  const char* reason = nullptr;
  if (!self.fused)
    reason = self.options.fused == false ? "its `fused` is false" : "its class has no step of this library's kernels";
  const meta_memory::Purpose purpose(MemoryUse::optimizer);
  bool any = false;
  if (!reason && self.gradients.sync_gradients()) {
    reason = self.fused->prepare_ahead(which);
    any = !reason && self.fused->has_ahead();
  }
  if (any) {
    const double divisor = self.scaler && self.scaler->is_enabled() ? self.scaler->get_scale() : 1;
    const auto part = self.part_of(which);
    if (!part) {
      self.fused->compute_ahead(divisor, nullptr);
    } else if (const auto& ahead = part->hooks->ahead; !ahead.before) {
      reason = "its states are elsewhere between steps";
    } else if (own != part->parameters.size()) {
      return;  // whether it can was asked, of several parts: they come one by one
    } else if (const auto kept = optim::states_of(*self.optimizer, part->parameters);
               ahead.before(part->number, kept)) {
      self.fused->compute_ahead(divisor, ahead.elsewhere);
      ahead.after(part->number, kept);
    }
  }
  if (reason)
    raise<ConfigError>(
        "step_in_backward: found an optimizer of class {} that can't compute its step while backward runs: {}. "
        "Expected torch::optim::Adam, AdamW, SGD or Adagrad, or optim::Lion or DeepSpeedAdam, on parameters of fp32 or "
        "fp64 that lie on the host; leave step_in_backward out",
        c10::demangle(typeid(*self.optimizer).name()), reason);
}

void AcceleratedOptimizer::Impl::take(const std::optional<at::Tensor>& grad_scale) {
  take_some(grad_scale);
  if (fused) fused->end_step();
}

void AcceleratedOptimizer::Impl::take_some(const std::optional<at::Tensor>& grad_scale) {
  if (prepare_fused()) return fused->run(grad_scale);
  snapshot::keep_all();  // other steps rewrite what they like
  if (grad_scale) {
    at::NoGradGuard no_grad;
    for (auto& group : optimizer->param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) {
          // A dry run has no kernels of ours, which would have left them as they are.
          if (divisor && !parameter.is_meta()) optim::widen_gradient(parameter);
          parameter.mutable_grad().div_(grad_scale->to(parameter.device()));
        }
  }
  if (optim::step_with_fp32_moments(*optimizer)) return;
  widen_for_others(*optimizer);
  optimizer->step();
}

std::vector<AcceleratedOptimizer::Impl::Part> AcceleratedOptimizer::Impl::parts() const {
  std::vector<Part> all;
  Parameters own;
  for (const auto& [owner, told] : hooks) {
    if (!told.parts) continue;
    const auto theirs = told.parts();
    if (own.empty() && !theirs.empty())
      for (const auto& group : optimizer->param_groups())
        for (const auto& parameter : group.params()) own.insert(parameter.unsafeGetTensorImpl());
    for (size_t number = 0; number < theirs.size(); ++number) {
      Part part{&told, number, {}};
      for (const auto& parameter : theirs[number])
        if (own.contains(parameter.unsafeGetTensorImpl())) part.parameters.push_back(parameter);
      if (!part.parameters.empty()) all.push_back(std::move(part));
    }
  }
  if (!all.empty()) require_steps_on_pieces(*optimizer);
  return all;
}

std::optional<AcceleratedOptimizer::Impl::Part> AcceleratedOptimizer::Impl::part_of(
    const Parameters& parameters) const {
  for (Part& part : parts())
    if (parameters.contains(part.parameters.front().unsafeGetTensorImpl())) return std::move(part);
  return std::nullopt;
}

void AcceleratedOptimizer::Impl::take_part_by_part(const std::vector<Part>& parts,
                                                   const std::optional<at::Tensor>& grad_scale) {
  Parameters in_parts;
  for (const Part& part : parts) {
    Parameters wanted;
    for (const auto& parameter : part.parameters) wanted.insert(parameter.unsafeGetTensorImpl());
    in_parts.insert(wanted.begin(), wanted.end());
    const OnlySome some(*optimizer,
                        [&](const at::Tensor& parameter) { return wanted.contains(parameter.unsafeGetTensorImpl()); });
    if (take_ahead(part, wanted, grad_scale)) continue;
    if (part.hooks->before_part) part.hooks->before_part(part.number, optim::states_of(*optimizer, part.parameters));
    take_some(grad_scale);
    if (part.hooks->after_part) part.hooks->after_part(part.number, optim::states_of(*optimizer, part.parameters));
  }
  const OnlySome rest(*optimizer,
                      [&](const at::Tensor& parameter) { return !in_parts.contains(parameter.unsafeGetTensorImpl()); });
  take(grad_scale);
}

bool AcceleratedOptimizer::Impl::take_ahead(const Part& part, const Parameters& parameters,
                                            const std::optional<at::Tensor>& grad_scale) {
  const auto& ahead = part.hooks->ahead;
  if (!ahead.take || !prepare_fused()) return false;
  if (!fused->fits_ahead(parameters, grad_scale, ahead.elsewhere) ||
      !ahead.take(part.number, grad_scale && grad_scale->item<double>() != 1)) {
    fused->discard();
    return false;
  }
  fused->take_ahead(grad_scale);
  ahead.taken(part.number);
  return true;
}

at::Tensor AcceleratedOptimizer::Impl::step_now(const LossClosure& closure) {
  const meta_memory::Purpose states(MemoryUse::optimizer);
  const snapshot::StepWrites writes;
  Impl& self = *this;
  auto& optimizer = *self.optimizer;
  if (self.scaler && self.scaler->is_enabled()) {
    if (closure)
      throw ConfigError(
          "AcceleratedOptimizer::step: found a closure together with loss scaling, expected step() alone: a loss that "
          "is computed anew inside the step is not scaled. Train with mixed_precision \"bf16\" or \"no\".");
    optim::GradScaler::StepFunction own_step;  // which divides
    if (const auto parts = self.parts(); !parts.empty())
      own_step = [&self, parts](const std::optional<at::Tensor>& grad_scale) {
        self.take_part_by_part(parts, self.divided_by(grad_scale));
      };
    else if (self.prepare_fused())
      own_step = [&](const std::optional<at::Tensor>& grad_scale) {
        self.fused->run(self.divided_by(grad_scale));
        self.fused->end_step();
      };
    else if (self.replaces_step()) {
      // In the dtype that loses nothing, which the scaler knows. A dry run stands for kernels that leave them as they
      // are.
      if (self.divisor && !self.scaler->is_unscaled(optimizer) && !is_dry(optimizer)) self.scaler->unscale_(optimizer);
      own_step = [&](const std::optional<at::Tensor>& grad_scale) { self.take(self.divided_by(grad_scale)); };
    }
    if (!own_step) snapshot::keep_all();
    self.step_was_skipped = !self.scaler->step(optimizer, own_step);
    if (self.fused) self.fused->discard();
    self.scaler->update(optimizer);
    return {};
  }
  if (const auto parts = self.parts(); !parts.empty()) return self.take_part_by_part(parts, self.divisor), at::Tensor();
  if (!self.fused && (closure || !self.replaces_step())) {
    snapshot::keep_all();
    return optimizer.step(in_step(closure, optimizer));
  }
  self.take(self.divisor);
  return {};
}

void AcceleratedOptimizer::zero_grad(bool set_to_none) const {
  if (!impl_->gradients.sync_gradients()) return;
  // LibTorch's own zero_grad detaches gradients first, which those that are views of DDP's buckets refuse.
  for (auto& group : impl_->optimizer->param_groups()) {
    for (auto& parameter : group.params()) {
      if (parameter.grad().defined()) {
        if (set_to_none) {
          parameter.mutable_grad().reset();
        } else {
          if (!parameter.grad().is_view()) parameter.mutable_grad().detach_();
          parameter.mutable_grad().zero_();
        }
      }
      for (const auto& [owner, hooks] : impl_->hooks)
        if (hooks.cleared) hooks.cleared(parameter);
    }
  }
  if (impl_->scaler) impl_->scaler->forget(*impl_->optimizer);
}

bool AcceleratedOptimizer::step_was_skipped() const { return impl_->step_was_skipped; }
AcceleratedOptimizer::StepCounts AcceleratedOptimizer::step_counts() const { return impl_->counts; }
void AcceleratedOptimizer::set_step_counts(const StepCounts& counts) const { impl_->counts = counts; }
bool AcceleratedOptimizer::step_was_fused() const { return impl_->step_was_fused; }
torch::optim::Optimizer& AcceleratedOptimizer::optimizer() const { return *impl_->optimizer; }
void AcceleratedOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) const {
  if (auto* const with_codes = dynamic_cast<optim::AdamW8bit*>(&optimizer())) with_codes->add_param_group(group);
  else if (auto* const own = dynamic_cast<optim::OwnOptimizer*>(&optimizer())) own->add_param_group(group);
  else optimizer().add_param_group(group);
  if (optim::has_fp32_moments(optimizer())) optim::give_fp32_moments(optimizer());
  look();
  if (auto* const adagrad = dynamic_cast<torch::optim::Adagrad*>(&optimizer())) make_missing_states(*adagrad);
}
const std::shared_ptr<optim::GradScaler>& AcceleratedOptimizer::scaler() const { return impl_->scaler; }
c10::IValue AcceleratedOptimizer::state_dict() const { return optim::optimizer_state_dict(*impl_->optimizer); }
void AcceleratedOptimizer::load_state_dict(const c10::IValue& state) const {
  snapshot::keep_all();
  optim::load_optimizer_state_dict(*impl_->optimizer, state);
}

}  // namespace accelerate
