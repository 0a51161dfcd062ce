#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace accelerate::residency {

/// How the process's checkpointed closures (accelerate::checkpoint) keep their inputs and run, where settings of a run
/// say so (DeepSpeed's activation_checkpointing). They switch nothing on: the model says what is checkpointed.
struct CheckpointRules {
  bool inputs_on_host = false;  ///< their inputs wait in host memory for backward, of an accelerator's tensors
  bool synchronize = false;     ///< the accelerator is waited for before and after each run
  /// Told how long each run took, in milliseconds: the first one, and again in backward. Any thread. Null: nobody is.
  std::function<void(bool again, double ms)> timed = nullptr;
};

/// They hold while it lives, or until others come.
class CheckpointRulesScope {
 public:
  explicit CheckpointRulesScope(CheckpointRules rules);
  ~CheckpointRulesScope();
  CheckpointRulesScope(const CheckpointRulesScope&) = delete;
  CheckpointRulesScope& operator=(const CheckpointRulesScope&) = delete;

 private:
  std::shared_ptr<const CheckpointRules> rules_;
};

/// Null: there are none.
std::shared_ptr<const CheckpointRules> checkpoint_rules();

/// First runs of closures that keep nothing, of the whole process.
int64_t checkpointed_calls();
/// How often the accelerator was waited for because of CheckpointRules::synchronize.
int64_t checkpoint_waits();

/// One run of a closure, as the rules want it.
class CheckpointRun {
 public:
  /// @param again  in backward
  explicit CheckpointRun(bool again);
  ~CheckpointRun();
  CheckpointRun(const CheckpointRun&) = delete;
  CheckpointRun& operator=(const CheckpointRun&) = delete;

 private:
  const std::shared_ptr<const CheckpointRules> rules_;
  const bool again_;
  int exceptions_ = 0;
  std::chrono::steady_clock::time_point since_ = {};
};

}  // namespace accelerate::residency
