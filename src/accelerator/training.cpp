#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "accelerator/accelerator_impl.hpp"
#include "accelerator/counts.hpp"
#include "accelerator/join.hpp"
#include "observe/run_phases.hpp"
#include "parallel/engines.hpp"
#include "parallel/gradients.hpp"
#include "utils/raise.hpp"
#include "utils/run_counts.hpp"

namespace accelerate {

Scope::Scope(std::function<void()> leave) {
  if (leave) leave_ = {nullptr, [leave = std::move(leave)](void*) { leave(); }};
}

Scope Accelerator::begin_accumulate(const parallel::Engines& models) {
  const auto& gradients = gradient_state();
  const bool due = !impl_->counts_micro_steps() || (impl_->run.step + 1) % gradients.num_steps() == 0,
             at_end = gradients.end_of_dataloader();
  counts::add(TrainingCount::micro_steps);
  if (at_end && !due)
    counts::add(gradients.sync_with_dataloader() ? TrainingCount::loader_end_synchronisations
                                                 : TrainingCount::loader_ends_passed);
  if (gradients.sync_with_dataloader() && at_end) {
    impl_->run.step = 0;
    gradients.set_sync_gradients(true);
  } else {
    ++impl_->run.step;
    gradients.set_sync_gradients(due);
  }
  if (gradients.sync_gradients()) {
    counts::add(TrainingCount::synchronised_steps);
    return Scope();
  }
  if (use_distributed() && gradients.sync_each_batch()) {
    counts::add(TrainingCount::early_synchronisations);
    return Scope();
  }
  parallel::Engines waiting;
  for (const auto& model : models)
    if (model && !model->always_reduces()) waiting.push_back(model);
  return suspend_sync(waiting);
}

namespace {

/// Sets the flag of all models until the scope ends.
Scope with_sync(const parallel::Engines& models, bool sync) {
  std::vector<std::pair<std::shared_ptr<parallel::Engine>, bool>> before;
  for (const auto& model : models) {
    if (!model) continue;
    before.emplace_back(model, model->require_backward_grad_sync());
    model->set_require_backward_grad_sync(sync);
  }
  return Scope([before = std::move(before)] {
    for (const auto& [model, value] : before) model->set_require_backward_grad_sync(value);
  });
}

}  // namespace

Scope Accelerator::suspend_sync(const parallel::Engines& models) {
  for (const auto& model : models)
    if (const char* const reason = model ? model->always_reduces() : nullptr)
      raise<ConfigError>("no_sync: found a model whose gradients are averaged in each backward: {}", reason);
  return with_sync(models, false);
}

Scope Accelerator::resume_sync(const std::shared_ptr<parallel::Engine>& model) {
  if (!model) return Scope();
  Scope scope = with_sync({model}, true);
  model->prepare_backward_sync();
  return scope;
}

void Accelerator::backward(const at::Tensor& loss, const BackwardOptions& options) {
  if (gradient_state().average() == GradientAverage::tokens)
    throw ConfigError(
        "backward: gradients are averaged over tokens (GradientAverage::tokens), which needs to know how many items "
        "the loss is the mean of: call backward(loss, num_items)");
  impl_->monitors.note_loss(loss);
  impl_->run_backward(loss, 1.0 / static_cast<double>(gradient_accumulation_steps()), options);
}

void Accelerator::backward(const at::Tensor& loss, int64_t num_items, const BackwardOptions& options) {
  if (gradient_state().average() != GradientAverage::tokens)
    throw ConfigError(
        "backward: num_items was given, but gradients are averaged over steps; set GradientAccumulationPlugin::average "
        "to GradientAverage::tokens, or leave it out");
  if (num_items < 0) raise<ConfigError>("backward: num_items is {}, expected 0 or more", num_items);
  impl_->run.num_items += static_cast<double>(num_items);
  impl_->monitors.note_loss(loss);
  counts::add(RunCount::items, num_items);
  // The mean times its count is a sum: sums of micro-steps and ranks add up, and are divided once by the count of all.
  impl_->run_backward(num_items == 0 ? loss.nan_to_num() : loss, static_cast<double>(num_items), options);
  if (!sync_gradients()) return;
  const double all = items_of_all_ranks(impl_->run.num_items, device());
  impl_->run.num_items = 0;
  if (all == 0)
    throw ConfigError(
        "backward: no rank had any item in this accumulation group, so there is no average; skip groups without items");
  at::NoGradGuard no_grad;
  for (const auto& engine : impl_->run.engines()) engine->settle_gradients();
  // Averaging over ranks has divided by their number already.
  std::vector<at::Tensor> parameters;
  for (const auto& model : impl_->run.models)
    for (const auto& [name, parameter] : model->model.parameters()) parameters.push_back(parameter);
  parallel::gradients_of(impl_->run.engines(), parameters)
      .scale(static_cast<double>(comm::mesh().size(comm::kTokens)) / all);
}

namespace {

/// Whether gradients were to be averaged when a backward was asked for; an engine's layer may run it later.
class AskedFor {
 public:
  explicit AskedFor(const parallel::Engines& engines) {
    for (const auto& engine : engines) flags_.emplace_back(engine, engine->require_backward_grad_sync());
  }
  Scope again() const {
    std::vector<std::pair<std::shared_ptr<parallel::Engine>, bool>> before;
    for (const auto& [told, asked] : flags_)
      if (const auto engine = told.lock(); engine && engine->require_backward_grad_sync() != asked) {
        before.emplace_back(engine, !asked);
        engine->set_require_backward_grad_sync(asked);
      }
    return Scope([before = std::move(before)] {
      for (const auto& [engine, value] : before) engine->set_require_backward_grad_sync(value);
    });
  }

 private:
  std::vector<std::pair<std::weak_ptr<parallel::Engine>, bool>> flags_;  // which may hold the backward
};

}  // namespace

void Accelerator::Impl::run_backward(const at::Tensor& loss, double weight, const BackwardOptions& how) {
  counts::add(RunCount::backwards);
  run_phases::PhaseScope whole(run_phases::Phase::backward, this);
  const at::Tensor weighted = weight == 1.0 ? loss : loss * weight;
  const at::Tensor scaled = run.scaler ? run.scaler->scale(weighted) : weighted;
  const auto engines = run.engines();
  std::function<void()> backward = [this, scaled, how, asked = AskedFor(engines)] {
    const auto synchronisation = asked.again();
    run_backward_now(scaled, how);
  };
  for (auto engine = engines.rbegin(); engine != engines.rend(); ++engine)
    backward = [engine = *engine, inner = std::move(backward)] { engine->backward(inner); };
  backward();
  whole.end();
}

void Accelerator::Impl::run_backward_now(const at::Tensor& scaled, const BackwardOptions& how) {
  const auto engines = run.engines();
  {
    const run_phases::PhaseScope inner(run_phases::Phase::backward_inner, this);
    for (const auto& engine : engines) engine->before_backward(scaled);
    parallel::guard_backward([&] { scaled.backward({}, how.retain_graph || how.create_graph, how.create_graph); });
  }
  const run_phases::PhaseScope reduce(run_phases::Phase::backward_reduce, this);
  // A model whose forward has run may have a loss of its own, which comes later.
  const bool anyone =
      std::any_of(engines.begin(), engines.end(), [](const auto& engine) { return engine->took_part(); });
  for (const auto& engine : engines)
    if (!anyone || engine->took_part()) engine->after_backward();
  for (const auto& model : run.models)
    if (model->fp8) model->fp8->after_backward();
  check_belonging();
}

AutocastGuard Accelerator::autocast(const std::optional<AutocastKwargs>& autocast_handler) const {
  const AutocastKwargs& how = autocast_handler ? *autocast_handler : impl_->autocast;
  return AutocastGuard(computing_device(device()),
                       how.enabled && impl_->autocasts() ? autocast_dtype(state().mixed_precision()) : std::nullopt,
                       how);
}

bool Accelerator::optimizer_step_was_skipped() const {
  for (const auto& optimizer : impl_->run.optimizers)
    if (optimizer.step_was_skipped()) return true;
  return false;
}

}  // namespace accelerate
