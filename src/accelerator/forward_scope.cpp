#include <c10/core/GradMode.h>

#include <utility>

#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/precision/fp8.hpp"
#include "accelerate/run_state/prepared_model.hpp"
#include "accelerate/state.hpp"
#include "observe/run_phases.hpp"
#include "optim/counts.hpp"
#include "precision/counts.hpp"

namespace accelerate::detail {

namespace {

/// Micro-steps of one group compute with the same weights, whose codes are made once. A number that changes with the
/// weights says whether they are the same: writes to them count up either of its parts.
std::optional<bool> is_first_microbatch(PreparedModel& model, bool training) {
  if (!training || !c10::GradMode::is_enabled() || GradientState().num_steps() == 1) return std::nullopt;
  int64_t now = counts::read(optim::OptimCount::optimizer_steps);
  for (const auto& [name, parameter] : model.model.parameters())
    if (!parameter.is_inference()) now += static_cast<int64_t>(parameter._version());
  return std::exchange(model.fp8_codes_of, now) != now;
}

}  // namespace

using run_phases::Phase;

ForwardScope::ForwardScope(PreparedModel& model) : model_(model), engine_(model.engine.get()) {
  run_phases::begins(Phase::forward, engine_);
  try {
    if (engine_) engine_->before_forward();
  } catch (...) {
    run_phases::ends_quietly(Phase::forward, engine_);
    throw;
  }
  if (!model.fp8) return;
  try {
    const bool training = model.model.is_training();
    fp8_ = std::make_unique<FP8Scope>(
        *model.fp8, FP8ScopeOptions{.training = training, .is_first_microbatch = is_first_microbatch(model, training)});
    if (!training && model.fp8->recipe().use_autocast_during_eval) counts::add(PrecisionCount::fp8_evaluations);
  } catch (...) {
    if (engine_) engine_->leave_forward();
    run_phases::ends_quietly(Phase::forward, engine_);
    throw;
  }
}

ForwardScope::~ForwardScope() {
  autocast_.reset();
  fp8_.reset();
  if (engine_) engine_->leave_forward();
  run_phases::ends_quietly(Phase::forward, engine_);
}

void ForwardScope::begin_autocast() {
  if (model_.autocast_dtype) autocast_.emplace(model_.device_type, model_.autocast_dtype, model_.autocast);
}

void ForwardScope::finish() {
  autocast_.reset();
  if (fp8_) fp8_->finish();
}

void ForwardScope::after_forward(const std::vector<at::Tensor>& outputs) {
  if (engine_) engine_->after_forward(outputs);
}

std::optional<at::ScalarType> ForwardScope::input_dtype() const { return model_.input_dtype; }
std::optional<at::ScalarType> ForwardScope::output_dtype() const { return model_.output_dtype; }
bool ForwardScope::autocasts() const { return model_.autocast_dtype.has_value(); }

}  // namespace accelerate::detail
