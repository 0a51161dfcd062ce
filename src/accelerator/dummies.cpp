#include "accelerate/optim/dummies.hpp"

#include <algorithm>

#include "accelerate/parallel/prepare_facts.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "utils/raise.hpp"

namespace accelerate {

namespace detail {

PrepareNotes no_notes() { return std::make_shared<parallel::PrepareFacts>(); }
void note(const PrepareNotes& notes, const ModelRef& model) { notes->models.push_back(model); }
void note(const PrepareNotes& notes, const torch::optim::Optimizer& optimizer) {
  notes->optimizers.push_back(&optimizer);
}
void note(const PrepareNotes& notes, const DummyOptim& dummy) { notes->dummy_optimizers.push_back(dummy); }
void note(const PrepareNotes& notes, const DummyScheduler& dummy) { notes->dummy_schedulers.push_back(dummy); }
void note_loader(const PrepareNotes& notes, std::optional<int64_t> batch_size) {
  notes->batch_sizes.push_back(batch_size);
}
void note_schedule(const PrepareNotes& notes) { ++notes->schedulers; }

}  // namespace detail

void Accelerator::hear(const detail::PrepareNotes& notes) {
  parallel::PrepareFacts facts = *notes;
  facts.split_batches = split_batches();
  const bool trains = !facts.optimizers.empty() || !facts.dummy_optimizers.empty();
  const auto rules = impl_->engine->hear(facts, gradient_accumulation_steps());
  if (trains || impl_->run.optimizers.empty()) impl_->observe();  // a model that is only asked changes nothing
  if (!rules) return;
  // Other settings than those that this Accelerator was made with.
  if (rules->mixed_precision != state().mixed_precision())
    raise<ConfigError>(
        "prepare: the DeepSpeedPlugin that was selected computes in {}, the process in {}, expected the same in all of "
        "deepspeed_plugins: set fp16 and bf16 alike",
        to_string(rules->mixed_precision), to_string(state().mixed_precision()));
  if (!impl_->run.optimizers.empty()) {
    if (trains)
      throw ConfigError(
          "prepare: this Accelerator trains a model by another DeepSpeedPlugin already, expected an Accelerator for "
          "each model that is trained: their scales, limits of norms and schedules are their own");
    return;  // a model that is only asked leaves the training's rules as they are
  }
  impl_->rules = rules;
  impl_->run.scaler = rules->scaler;
  if (rules->gradient_accumulation_steps) set_gradient_accumulation_steps(*rules->gradient_accumulation_steps);
}

AcceleratedOptimizer Accelerator::prepare_dummy(const DummyOptim& dummy, std::optional<bool> device_placement) {
  auto prepared = prepare_optimizer(impl_->engine->make_optimizer(dummy), {}, device_placement);
  impl_->made.emplace_back(dummy.identity, prepared);
  return prepared;
}

AcceleratedScheduler Accelerator::prepare_dummy(const DummyScheduler& dummy) {
  const auto made = std::find_if(impl_->made.rbegin(), impl_->made.rend(),
                                 [&](const auto& known) { return known.first.lock() == dummy.optimizer.identity; });
  if (made == impl_->made.rend())
    throw ConfigError(
        "prepare: found a DummyScheduler whose DummyOptim has not been prepared, expected both in one call, the "
        "schedule made with that very DummyOptim");
  const auto& optimizer = made->second;
  // It is written for steps of the optimizer, not for batches of one process.
  AcceleratedScheduler prepared(impl_->engine->make_scheduler(dummy, optimizer.optimizer()), {optimizer},
                                impl_->options.step_scheduler_with_optimizer, /*split_batches=*/true);
  impl_->run.engine_schedulers.insert(impl_->run.schedulers.size());
  impl_->run.schedulers.push_back(prepared);
  return prepared;
}

}  // namespace accelerate
