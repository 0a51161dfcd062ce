#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <algorithm>

#include <unordered_set>

#include "accelerate/data/loader.hpp"
#include "accelerate/parallel/ddp.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "parallel/gradients.hpp"
#include "parallel/join.hpp"
#include "utils/counts.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {

using counts::Count;

Scope Accelerator::begin_accumulate(const parallel::Engines& models) {
  const auto& gradients = gradient_state();
  const bool due = (impl_->run.step + 1) % gradients.num_steps() == 0, at_end = gradients.end_of_dataloader();
  counts::add(Count::micro_steps);
  if (at_end && !due)
    counts::add(gradients.sync_with_dataloader() ? Count::loader_end_synchronisations : Count::loader_ends_passed);
  if (gradients.sync_with_dataloader() && at_end) {
    impl_->run.step = 0;
    gradients.set_sync_gradients(true);
  } else {
    ++impl_->run.step;
    gradients.set_sync_gradients(due);
  }
  if (gradients.sync_gradients()) {
    counts::add(Count::synchronised_steps);
    return Scope();
  }
  if (use_distributed() && gradients.sync_each_batch()) {
    counts::add(Count::early_synchronisations);
    return Scope();
  }
  return suspend_sync(models);
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

Scope Accelerator::suspend_sync(const parallel::Engines& models) { return with_sync(models, false); }

Scope Accelerator::resume_sync(const std::shared_ptr<parallel::Engine>& model) {
  if (!model) return Scope();
  Scope scope = with_sync({model}, true);
  model->prepare_backward_sync();
  return scope;
}

void Accelerator::join(const parallel::Engines& models, const std::function<void()>& loop,
                       std::optional<bool> even_batches) {
  // A rank without data runs no forwards, of which scales would be the maximum over all ranks.
  for (const auto& model : impl_->run.models)
    if (use_distributed() && model->fp8 && model->engine && remembers_scales(impl_->fp8.recipe) &&
        std::find(models.begin(), models.end(), model->engine) != models.end())
      throw ConfigError(
          "join_uneven_inputs: the model computes in fp8 with scales from the past (TERecipeKwargs), which ranks agree "
          "on "
          "in each forward, expected as many batches on each rank; use AORecipeKwargs, whose scales are of each tensor "
          "as "
          "it is now, or give the ranks equal numbers of batches (even_batches)");
  // The setting returns even when the loop throws.
  Scope restore;
  if (even_batches) {
    bool overridden = false;
    for (const auto& loader : impl_->run.loaders) overridden |= loader->override_even_batches(even_batches);
    if (!overridden && use_distributed())
      throw ConfigError(
          "join_uneven_inputs: even_batches was given, but no prepared loader reads a map-style data set without "
          "dispatching, the only kind that it applies to; leave it out");
    restore = Scope([loaders = impl_->run.loaders] {
      for (const auto& loader : loaders) loader->override_even_batches(std::nullopt);
    });
  }
  parallel::join(models, loop);
}

void Accelerator::backward(const at::Tensor& loss, const BackwardOptions& options) {
  if (gradient_state().average() == GradientAverage::tokens)
    throw ConfigError(
        "backward: gradients are averaged over tokens (GradientAverage::tokens), which needs to know how many items "
        "the loss is the mean of: call backward(loss, num_items)");
  run_backward(loss, 1.0 / static_cast<double>(gradient_accumulation_steps()), options);
}

void Accelerator::backward(const at::Tensor& loss, int64_t num_items, const BackwardOptions& options) {
  if (gradient_state().average() != GradientAverage::tokens)
    throw ConfigError(
        "backward: num_items was given, but gradients are averaged over steps; set GradientAccumulationPlugin::average "
        "to GradientAverage::tokens, or leave it out");
  if (num_items < 0) raise<ConfigError>("backward: num_items is {}, expected 0 or more", num_items);
  impl_->run.num_items += static_cast<double>(num_items);
  counts::add(Count::items, num_items);
  // The mean times its count is a sum: sums of micro-steps and ranks add up, and are divided once by the count of all.
  run_backward(num_items == 0 ? loss.nan_to_num() : loss, static_cast<double>(num_items), options);
  if (!sync_gradients()) return;
  const auto all =
      comm::agreed::all_reduce(
          at::full({1}, impl_->run.num_items,
                   at::TensorOptions().dtype(at::kDouble).device(device().is_mps() ? at::Device(at::kCPU) : device())),
          Reduction::sum, 1.0)
          .item<double>();
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
  parallel::gradients_of(impl_->run.engines(), parameters).scale(static_cast<double>(num_processes()) / all);
}

namespace {

/// An optimizer that was made for another model than the one that is trained does nothing, or trains each rank by
/// itself; neither shows.
void check_optimizers(const run_state::RunState& run) {
  std::unordered_set<const at::TensorImpl*> prepared, trained;
  for (const auto& model : run.models) {
    for (const auto& [name, parameter] : model->model.parameters()) {
      prepared.insert(parameter.unsafeGetTensorImpl());
      if (model->engine) trained.insert(parameter.unsafeGetTensorImpl());
    }
    if (!model->engine) continue;
    for (const auto& holding : model->engine->pieces())
      for (auto* known : {&prepared, &trained}) known->insert(holding.held().unsafeGetTensorImpl());
  }
  const int64_t ranks = PartialState().num_processes();
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    bool ours = false, moves = false;
    int64_t index = -1;
    for (const auto& group : run.optimizers[i].optimizer().param_groups())
      for (const auto& parameter : group.params()) {
        ++index;
        ours |= prepared.contains(parameter.unsafeGetTensorImpl());
        if (!parameter.grad().defined()) continue;
        moves = true;
        if (ranks > 1 && !trained.contains(parameter.unsafeGetTensorImpl()))
          raise<ConfigError>(
              "backward: parameter {} of prepared optimizer {}, of shape {}, has a gradient and belongs to no model "
              "that was prepared for training, so that each of the {} processes would go its own way, expected "
              "parameters of prepared models only; pass the model that holds it to prepare(), or step it with an "
              "optimizer that is not prepared",
              index, i, parameter.sizes(), ranks);
      }
    if (!ours && !moves)
      logs::warn(
          "accelerate.accelerator",
          "backward: prepared optimizer {} holds no parameter of a prepared model, and none of its own has a gradient: "
          "its steps will change nothing. It was probably made for another model, or for a copy of this one.",
          i);
  }
}

}  // namespace

void Accelerator::check_belonging() {
  if (!sync_gradients()) return;
  const auto& run = impl_->run;
  if (const auto now = std::pair(run.models.size(), run.optimizers.size()); now != impl_->checked) {
    impl_->checked = now;
    if (!run.models.empty()) check_optimizers(run);
  }
  if (impl_->checked_loaders || !use_distributed() || gradient_state().in_dataloader()) return;
  if (data::detail::unprepared_passes() == 0) return;
  impl_->checked_loaders = true;
  if (is_main_process())
    logs::warn("accelerate.accelerator",
               "backward: the loop reads a DataLoader that was not prepared, while {} processes train: each of them "
               "reads all of its batches. Pass the loader to prepare(), which gives each its share; nothing is wrong "
               "if each process has data of its own.",
               num_processes());
}

void Accelerator::run_backward(const at::Tensor& loss, double weight, const BackwardOptions& options) {
  counts::add(Count::backwards);
  const at::Tensor weighted = weight == 1.0 ? loss : loss * weight;
  const at::Tensor scaled = impl_->run.scaler ? impl_->run.scaler->scale(weighted) : weighted;
  const auto engines = impl_->run.engines();
  for (const auto& engine : engines) engine->before_backward(scaled);
  parallel::guard_backward(
      [&] { scaled.backward({}, options.retain_graph || options.create_graph, options.create_graph); });
  // A model whose forward has run may have a loss of its own, which comes later.
  const bool anyone =
      std::any_of(engines.begin(), engines.end(), [](const auto& engine) { return engine->took_part(); });
  for (const auto& engine : engines)
    if (!anyone || engine->took_part()) engine->after_backward();
  for (const auto& model : impl_->run.models)
    if (model->fp8) model->fp8->after_backward();
  check_belonging();
}

AutocastGuard Accelerator::autocast() const {
  return AutocastGuard(computing_device(device()),
                       impl_->autocast.enabled ? autocast_dtype(state().mixed_precision()) : std::nullopt,
                       impl_->autocast);
}

bool Accelerator::optimizer_step_was_skipped() const {
  for (const auto& optimizer : impl_->run.optimizers)
    if (optimizer.step_was_skipped()) return true;
  return false;
}

}  // namespace accelerate
