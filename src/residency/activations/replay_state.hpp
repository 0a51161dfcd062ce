#pragma once

#include <ATen/core/Generator.h>
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

/// The position of a generator of random numbers.
class GeneratorState {
 public:
  /// The generator's state as it is now.
  explicit GeneratorState(at::Generator generator);
  void apply() const;
  bool is_present() const;
  const at::Generator& generator() const { return generator_; }

 private:
  at::Generator generator_;
  at::Tensor state_;  ///< bytes, on the host for every device
};

/// Generators that run again: those that were set are put back where they were.
class BorrowedGenerators {
 public:
  BorrowedGenerators() = default;
  BorrowedGenerators(const BorrowedGenerators&) = delete;
  BorrowedGenerators& operator=(const BorrowedGenerators&) = delete;
  ~BorrowedGenerators();
  void set(const GeneratorState& state);

 private:
  std::vector<GeneratorState> before_;
};

/// All that a closure's result depends on besides its arguments: generators, autocast, the scopes of handlers that are
/// open on its thread, the current device.
class ReplayState {
 public:
  /// Records this thread's state.
  explicit ReplayState(bool random);
  /// While it lives, generators that operators of this thread get as arguments, the model's own, are noted before the
  /// first number is drawn from them.
  class Listening;
  /// After the first run: forgets generators from which nothing was drawn.
  void forget_unused_generators() noexcept;

  /// The recorded state from construction to destruction, then what was there before.
  class Scope;

 private:
  struct Autocast {
    c10::DeviceType device_type;
    bool enabled;
    at::ScalarType dtype;
  };
  static Autocast present_autocast(c10::DeviceType type);
  static void apply(const Autocast& autocast);

  std::optional<c10::Device> device_;
  bool random_;
  std::vector<GeneratorState> generators_;
  std::vector<Autocast> autocast_;
  bool autocast_cache_;
  ScopesForReplay scopes_;
};

class ReplayState::Listening {
 public:
  explicit Listening(ReplayState& state);
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;
  ~Listening();

 private:
  ReplayState& state_;
};

class ReplayState::Scope {
 public:
  explicit Scope(const ReplayState& state);
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();

 private:
  const ScopesForReplay::Here scopes_;
  BorrowedGenerators generators_;
  std::vector<Autocast> autocast_before_;
  bool cache_before_;
  c10::OptionalDeviceGuard device_;
};

}  // namespace accelerate::residency
