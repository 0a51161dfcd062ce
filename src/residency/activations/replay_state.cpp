#include "residency/activations/replay_state.hpp"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <mutex>

namespace accelerate::residency {

std::optional<c10::Device> current_accelerator() {
  const auto type = at::getAccelerator();
  if (!type) return std::nullopt;
  const c10::impl::VirtualGuardImpl devices(*type);
  if (devices.deviceCount() == 0) return std::nullopt;
  return devices.getDevice();
}

at::Tensor ReplayState::present_state(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void ReplayState::apply(const Generator& generator) {
  auto target = at::globalContext().defaultGenerator(generator.device);
  const std::lock_guard lock(target.mutex());
  target.set_state(generator.state);
}

ReplayState::Autocast ReplayState::present_autocast(c10::DeviceType type) {
  return {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
}

void ReplayState::apply(const Autocast& autocast) {
  at::autocast::set_autocast_enabled(autocast.device_type, autocast.enabled);
  at::autocast::set_autocast_dtype(autocast.device_type, autocast.dtype);
}

ReplayState::ReplayState(bool random)
    : device_(current_accelerator()), autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  if (random) generators_.push_back({at::kCPU, present_state(at::kCPU)});
  if (random && device_) generators_.push_back({*device_, present_state(*device_)});
  if (Handler* codes = thread_handler(Link::codes)) codes_ = codes->for_replay();
  autocast_.push_back(present_autocast(at::kCPU));
  if (device_ && at::autocast::is_autocast_available(device_->type()))
    autocast_.push_back(present_autocast(device_->type()));
}

void ReplayState::forget_unused_generators() noexcept try {
  std::erase_if(generators_, [](const Generator& generator) {
    const auto now = present_state(generator.device);  // on the host for every device
    return now.numel() == generator.state.numel() &&
           std::memcmp(now.const_data_ptr(), generator.state.const_data_ptr(), now.nbytes()) == 0;
  });
} catch (...) {
  // Keeping a state that is not needed costs its few bytes.
}

ReplayState::Scope::Scope(const ReplayState& state)
    : cache_before_(at::autocast::is_autocast_cache_enabled()), device_(state.device_) {
  for (const auto& generator : state.generators_)
    generators_before_.push_back({generator.device, present_state(generator.device)});
  for (const auto& autocast : state.autocast_) autocast_before_.push_back(present_autocast(autocast.device_type));
  // Nothing throws from here on: either all is set, and put back, or nothing is.
  for (const auto& generator : state.generators_) apply(generator);
  for (const auto& autocast : state.autocast_) apply(autocast);
  at::autocast::set_autocast_cache_enabled(state.autocast_cache_);
  at::autocast::increment_nesting();
  if (state.codes_) codes_.emplace(Link::codes, *state.codes_);
}

ReplayState::Scope::~Scope() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(cache_before_);
  for (const auto& autocast : autocast_before_) apply(autocast);
  for (const auto& generator : generators_before_) apply(generator);
}

}  // namespace accelerate::residency
