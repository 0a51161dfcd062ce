#include <algorithm>

#include "accelerate/data/loader.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "adapters/lora_layer.hpp"
#include "residency/homes/encoded.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

/// Whether all that is trained was prepared: each rank would train the rest by itself, or not at all, and neither
/// shows.
namespace accelerate {
namespace {

using Tensors = std::unordered_set<const at::TensorImpl*>;

/// The tensors that optimizers may step on so that they stay the same on all ranks.
Tensors trained_together() {
  Tensors trained;
  for (const auto* run : live_runs())
    for (const auto& model : run->models) {
      if (!model->engine) continue;
      for (const auto& [name, parameter] : model->model.parameters())
        if (model->engine->averages(parameter)) trained.insert(parameter.unsafeGetTensorImpl());
      for (const auto& holding : model->engine->pieces()) trained.insert(holding.value.unsafeGetTensorImpl());
    }
  return trained;
}

/// At each step, as layers may come later. @param trained  what was found before
void check_that_ranks_stay_together(const run_state::RunState& run, Tensors& trained) {
  bool fresh = false;
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    int64_t index = -1;
    for (const auto& group : run.optimizers[i].optimizer().param_groups())
      for (const auto& parameter : group.params()) {
        ++index;
        const auto* const tensor = parameter.unsafeGetTensorImpl();
        if (!parameter.grad().defined() || trained.contains(tensor)) continue;
        if (!std::exchange(fresh, true)) trained = trained_together();
        if (trained.contains(tensor)) continue;
        raise<ConfigError>(
            "backward: parameter {} of prepared optimizer {}, of shape {}, has a gradient and belongs to no model "
            "that was prepared for training (or to one of FSDP's ignored_modules), so that each of the {} processes "
            "would go its own way, expected parameters of prepared models only; pass the model that holds it to "
            "prepare(), after all its layers have been registered, take it out of ignored_modules or freeze it, or "
            "step it with an optimizer that is not prepared",
            index, i, parameter.sizes(), PartialState().num_processes());
      }
  }
}

Tensors prepared_parameters(const run_state::RunState& run) {
  Tensors prepared;
  for (const auto& model : run.models) {
    for (const auto& [name, parameter] : model->model.parameters()) prepared.insert(parameter.unsafeGetTensorImpl());
    if (!model->engine) continue;
    for (const auto& holding : model->engine->pieces()) prepared.insert(holding.value.unsafeGetTensorImpl());
  }
  return prepared;
}

void warn_of_idle_optimizers(const run_state::RunState& run) {
  const auto prepared = prepared_parameters(run);
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    bool ours = false, moves = false;
    for (const auto& group : run.optimizers[i].optimizer().param_groups())
      for (const auto& parameter : group.params()) {
        ours |= prepared.contains(parameter.unsafeGetTensorImpl());
        moves |= parameter.grad().defined();
      }
    if (!ours && !moves)
      logs::warn(
          "accelerate.accelerator",
          "backward: prepared optimizer {} holds no parameter of a prepared model, and none of its own has a gradient: "
          "its steps will change nothing. It was probably made for another model, or for a copy of this one.",
          i);
  }
}

Tensors held_by_optimizers(const run_state::RunState& run) {
  Tensors held;
  for (const auto& optimizer : run.optimizers)
    for (const auto& group : optimizer.param_groups())
      for (const auto& parameter : group.params()) held.insert(parameter.unsafeGetTensorImpl());
  return held;
}

bool some_optimizer_holds(const run_state::RunState& run, const Tensors& tensors) {
  return std::any_of(run.optimizers.begin(), run.optimizers.end(), [&](const auto& optimizer) {
    for (const auto& group : optimizer.param_groups())
      for (const auto& parameter : group.params())
        if (tensors.contains(parameter.unsafeGetTensorImpl())) return true;
    return false;
  });
}

}  // namespace

void refuse_training_around_codes(const run_state::RunState& run) {
  const auto held = held_by_optimizers(run);
  if (held.empty()) return;
  for (const auto& model : run.models) {
    auto trained = held;
    if (model->engine)
      for (const auto& holding : model->engine->pieces())
        if (held.contains(holding.value.unsafeGetTensorImpl())) trained.insert(holding.tensor.unsafeGetTensorImpl());
    std::string in_few_bits;
    int64_t count = 0;
    bool any = false, all_else = true;
    for (const auto& [name, parameter] : model->model.parameters()) {
      const bool is_held = trained.contains(parameter.unsafeGetTensorImpl());
      any |= is_held;
      if (!residency::encoded_weight(parameter)) all_else &= is_held && parameter.requires_grad();
      else if (++count == 1) in_few_bits = name;
    }
    // A program that has frozen something, or left it out, has chosen what is trained.
    if (count == 0 || !any || !all_else || detail::has_adapter(model->model)) continue;
    raise<ConfigError>(
        "prepare: '{}'{} in few bits and can't be trained, and an optimizer holds all else of the model, which has no "
        "adapter: only its norms, biases and embeddings would change (transformers refuses it as well). Add an adapter "
        "(add_adapter) before prepare(); or, if a part is all that is to be trained, freeze the rest or give the "
        "optimizer that part's parameters",
        in_few_bits, count == 1 ? " is" : fmt::format(" and {} more weights are", count - 1));
  }
}

void Accelerator::Impl::check_belonging() {
  if (!gradients->sync_gradients()) return;
  if (state->use_distributed()) check_that_ranks_stay_together(run, trained);
  if (const auto now = std::pair(run.models.size(), run.optimizers.size()); now != checked) {
    checked = now;
    if (!run.models.empty()) warn_of_idle_optimizers(run);
    nobody_unscales = 0;
    gradients_are_scaled_for_nobody = run.scaler && run.scaler->is_enabled() && !run.models.empty() &&
                                      !some_optimizer_holds(run, prepared_parameters(run));
  }
  // Not at the first one: the program may use the scaler by itself, which shows when it has.
  if (gradients_are_scaled_for_nobody && !run.scaler->has_checked() && ++nobody_unscales > 1)
    raise<ConfigError>(
        "backward: in fp16 gradients are {} times too large until they are unscaled, and no prepared optimizer holds a "
        "parameter of a prepared model, expected one, whose step() does that; pass the optimizer to prepare() and step "
        "the handle that it returns, or train with mixed_precision \"bf16\" or \"no\"",
        run.scaler->get_scale());
  if (checked_loaders || !state->use_distributed() || gradients->in_dataloader()) return;
  if (data::detail::unprepared_passes() == 0) return;
  checked_loaders = true;
  if (state->is_main_process())
    logs::warn("accelerate.accelerator",
               "backward: the loop reads a DataLoader that was not prepared, while {} processes train: each of them "
               "reads all of its batches. Pass the loader to prepare(), which gives each its share; nothing is wrong "
               "if each process has data of its own.",
               state->num_processes());
}

}  // namespace accelerate
