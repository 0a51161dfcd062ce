#include "accelerate/accelerator/deepspeed_engine.hpp"

#include <cmath>
#include <limits>
#include <utility>

#include "accelerate/accelerator.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "run_state/zero_files.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

int64_t steps_of(const run_state::RunState& run, const detail::PreparedModel& model) {
  int64_t all = 0;
  for (const size_t index : run_state::optimizers_of(run, model)) {
    const auto counts = run.optimizers[index].step_counts();
    all += counts.taken + counts.skipped;
  }
  return all;
}

}  // namespace

DeepSpeedEngineWrapper::DeepSpeedEngineWrapper(std::shared_ptr<const detail::PreparedModel> model)
    : accelerator_(deepspeed_run_of(*model, "DeepSpeedEngineWrapper").accelerator), model_(std::move(model)) {
  accelerator_->impl_->wrapped.try_emplace(model_);
}

void DeepSpeedEngineWrapper::backward(const at::Tensor& loss, bool sync_gradients) const {
  const auto trained = deepspeed_run_of(*model_, "DeepSpeedEngineWrapper::backward");
  auto& engine = accelerator_->impl_->wrapped[model_];
  const int64_t steps = steps_of(*trained.run, *trained.model);
  if (accelerator_->impl_->counts_micro_steps() && sync_gradients && engine.group_ended && engine.steps_before == steps)
    throw ConfigError(
        "DeepSpeedEngineWrapper::backward: an accumulation group has ended (sync_gradients) and no optimizer of the "
        "model has taken its step, expected optimizer.step() after it: the engine steps there, not within backward");
  GradientState().set_sync_gradients(sync_gradients);
  Scope without_averages;
  if (!sync_gradients && !model_->engine->always_reduces())
    without_averages = accelerator_->suspend_sync({model_->engine});
  accelerator_->backward(loss);
  if (sync_gradients) engine = {.group_ended = true, .steps_before = steps};
}

std::optional<double> DeepSpeedEngineWrapper::get_global_grad_norm() const {
  const auto trained = deepspeed_run_of(*model_, "DeepSpeedEngineWrapper::get_global_grad_norm");
  const auto& impl = *accelerator_->impl_;
  const auto& engine = impl.wrapped.at(model_);
  if (engine.group_ended && engine.steps_before == steps_of(*trained.run, *trained.model)) {
    std::vector<at::Tensor> parameters;
    for (const auto& [name, parameter] : model_->model.parameters()) parameters.push_back(parameter);
    const auto norm = impl.global_norm(parameters).item<double>();
    return std::isfinite(norm) ? norm : std::numeric_limits<double>::infinity();
  }
  std::optional<double> squares;
  for (const size_t index : run_state::optimizers_of(*trained.run, *trained.model)) {
    const auto found = impl.norms.find(&trained.run->optimizers[index].optimizer());
    if (found != impl.norms.end()) squares = squares.value_or(0) + found->second * found->second;
  }
  if (!squares) return std::nullopt;
  return std::isfinite(*squares) ? std::sqrt(*squares) : std::numeric_limits<double>::infinity();
}

DeepSpeedEngineWrapper Accelerator::deepspeed_engine_wrapped() const {
  for (const auto& model : impl_->run.models)
    if (model->deepspeed) return DeepSpeedEngineWrapper(model);
  throw ConfigError(
      "deepspeed_engine_wrapped: found no model that a DeepSpeed configuration trains, expected prepare() of one "
      "before, with AcceleratorOptions::deepspeed_plugin");
}

}  // namespace accelerate
