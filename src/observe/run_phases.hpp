#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

/// The phase of a training step in which this process is, told to those who watch. While nobody does, a phase costs one
/// relaxed load.
namespace accelerate::run_phases {

enum class Phase : uint8_t {
  forward,          ///< of a prepared model; of a parallel::Engine
  backward,         ///< all that Accelerator::backward() runs; of the Accelerator
  backward_inner,   ///< within it: autograd, and what is reduced meanwhile
  backward_reduce,  ///< within it: what is left to be reduced then
  step,             ///< with the hooks around it, also where it is skipped; of a torch::optim::Optimizer
};
inline constexpr size_t kPhases = 5;

class Watcher {
 public:
  virtual ~Watcher() = default;
  /// On the thread that is in the phase. An exception at its end is a warning where the phase ends with a scope.
  /// @param of  whose phase
  virtual void begins(Phase phase, const void* of) = 0;
  virtual void ends(Phase phase, const void* of) = 0;
};

/// Watches from its construction to its end. Phases that are under way then are heard of in part.
class Watching {
 public:
  explicit Watching(Watcher& watcher);
  ~Watching();
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  Watcher& watcher_;
};

namespace detail {
extern std::atomic<int> watchers;
void tell(Phase phase, const void* of, bool begins);
}  // namespace detail

inline bool watched() { return detail::watchers.load(std::memory_order_relaxed) > 0; }
inline void begins(Phase phase, const void* of) {
  if (watched()) detail::tell(phase, of, true);
}
inline void ends(Phase phase, const void* of) {
  if (watched()) detail::tell(phase, of, false);
}
/// An exception becomes a warning.
void ends_quietly(Phase phase, const void* of) noexcept;

/// From its construction to end(), or to its own end.
class PhaseScope {
 public:
  PhaseScope(Phase phase, const void* of) : phase_(phase), of_(of) { begins(phase, of); }
  ~PhaseScope() {
    if (open_) ends_quietly(phase_, of_);
  }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;
  /// @throws what watchers throw
  void end() {
    open_ = false;
    ends(phase_, of_);
  }

 private:
  Phase phase_;
  const void* of_;
  bool open_ = true;
};

}  // namespace accelerate::run_phases
