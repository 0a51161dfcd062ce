#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <vector>

#include "residency/chain.hpp"

namespace accelerate::residency {

/// The accelerator's device that is current on this thread; nothing on a machine without one.
std::optional<c10::Device> current_accelerator();

/// What a closure's result depends on besides its arguments: generators, autocast, who computes on codes, the current
/// device.
class ReplayState {
 public:
  /// Records this thread's state.
  explicit ReplayState(bool random);
  /// After the first run: forgets generators from which nothing was drawn.
  void forget_unused_generators() noexcept;

  /// The recorded state from construction to destruction, then what was there before.
  class Scope;

 private:
  struct Generator {
    c10::Device device;
    at::Tensor state;  ///< bytes
  };
  struct Autocast {
    c10::DeviceType device_type;
    bool enabled;
    at::ScalarType dtype;
  };
  static Autocast present_autocast(c10::DeviceType type);
  static void apply(const Autocast& autocast);
  static at::Tensor present_state(c10::Device device);
  static void apply(const Generator& generator);

  std::optional<c10::Device> device_;
  std::vector<Generator> generators_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_;
  std::shared_ptr<Handler> codes_;  ///< null where this thread had none
};

class ReplayState::Scope {
 public:
  explicit Scope(const ReplayState& state);
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();

 private:
  std::vector<Generator> generators_before_;
  std::vector<Autocast> autocast_before_;
  bool cache_before_;
  c10::OptionalDeviceGuard device_;
  std::optional<HandlerScope> codes_;
};

}  // namespace accelerate::residency
