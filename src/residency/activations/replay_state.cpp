#include "residency/activations/replay_state.hpp"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

namespace accelerate::residency {

std::optional<c10::Device> current_accelerator() {
  const auto type = at::getAccelerator();
  if (!type) return std::nullopt;
  const c10::impl::VirtualGuardImpl devices(*type);
  if (devices.deviceCount() == 0) return std::nullopt;
  return devices.getDevice();
}

GeneratorState::GeneratorState(at::Generator generator) : generator_(std::move(generator)) {
  const std::lock_guard lock(generator_.mutex());
  state_ = generator_.get_state();
}

void GeneratorState::apply() const {
  at::Generator generator = generator_;
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state_);
}

bool GeneratorState::is_present() const {
  const at::Tensor now = GeneratorState(generator_).state_;
  return now.numel() == state_.numel() && std::memcmp(now.const_data_ptr(), state_.const_data_ptr(), now.nbytes()) == 0;
}

BorrowedGenerators::~BorrowedGenerators() {
  for (const auto& state : before_) state.apply();
}

void BorrowedGenerators::set(const GeneratorState& state) {
  if (std::none_of(before_.begin(), before_.end(),
                   [&](const auto& known) { return known.generator() == state.generator(); }))
    before_.emplace_back(state.generator());
  state.apply();
}

ReplayState::Autocast ReplayState::present_autocast(c10::DeviceType type) {
  return {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
}

void ReplayState::apply(const Autocast& autocast) {
  at::autocast::set_autocast_enabled(autocast.device_type, autocast.enabled);
  at::autocast::set_autocast_dtype(autocast.device_type, autocast.dtype);
}

ReplayState::ReplayState(bool random)
    : device_(current_accelerator()), random_(random), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  if (random) generators_.emplace_back(at::globalContext().defaultGenerator(at::kCPU));
  if (random && device_) generators_.emplace_back(at::globalContext().defaultGenerator(*device_));
  autocast_.push_back(present_autocast(at::kCPU));
  if (device_ && at::autocast::is_autocast_available(device_->type()))
    autocast_.push_back(present_autocast(device_->type()));
}

void ReplayState::forget_unused_generators() noexcept try {
  std::erase_if(generators_, [](const GeneratorState& generator) { return generator.is_present(); });
} catch (...) {
  // Keeping a state that is not needed costs its few bytes.
}

namespace {

/// This thread's states whose first run goes on, the innermost last.
thread_local std::vector<std::pair<const ReplayState*, std::vector<GeneratorState>*>> listening;
thread_local at::CallbackHandle listener = 0;

std::unique_ptr<at::ObserverContext> note_generators(const at::RecordFunction& call) {
  for (const auto& input : call.inputs()) {
    if (!input.isGenerator()) continue;
    const at::Generator generator = input.toGenerator();
    if (!generator.defined()) continue;
    for (const auto& [owner, known] : listening)
      if (std::none_of(known->begin(), known->end(), [&](const auto& one) { return one.generator() == generator; }))
        known->emplace_back(generator);
  }
  return nullptr;
}

}  // namespace

ReplayState::Listening::Listening(ReplayState& state) : state_(state) {
  if (!state.random_) return;
  if (listening.empty())
    listener = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&note_generators).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  listening.emplace_back(&state, &state.generators_);
}

ReplayState::Listening::~Listening() {
  if (std::erase_if(listening, [&](const auto& one) { return one.first == &state_; }) > 0 && listening.empty())
    at::removeCallback(listener);
}

ReplayState::Scope::Scope(const ReplayState& state)
    : scopes_(state.scopes_), cache_before_(at::autocast::is_autocast_cache_enabled()), device_(state.device_) {
  for (const auto& autocast : state.autocast_) autocast_before_.push_back(present_autocast(autocast.device_type));
  for (const auto& generator : state.generators_) generators_.set(generator);
  // Nothing throws from here on: either all is set, and put back, or nothing is.
  for (const auto& autocast : state.autocast_) apply(autocast);
  at::autocast::set_autocast_cache_enabled(state.autocast_cache_);
  at::autocast::increment_nesting();
}

ReplayState::Scope::~Scope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(cache_before_);
  for (const auto& autocast : autocast_before_) apply(autocast);
}

}  // namespace accelerate::residency
