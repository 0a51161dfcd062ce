#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "accelerate/accelerator.hpp"
#include "observe/save_points.hpp"
#include "run_state/run_state.hpp"

namespace accelerate {

/// ProjectConfiguration::save_on_signal. A signal to any rank sets nothing in motion but a thread of that rank, which
/// has the watchdogs of all ranks asked how far these are. Then each trains on to the first save point behind that of
/// the rank that was furthest, the same on all; there they save and end. Without a signal a save point costs some
/// additions.
class SaveOnSignal final : public save_points::SavePointListener {
 public:
  /// From now on SIGTERM and SIGUSR1 ask for it. Not collective.
  /// @param accelerator, run  live longer
  /// @param patience          for the next save point to come; then the signal does what it did before
  /// @throws ConfigError where the program has a handler for one of them, or another Accelerator has asked for this
  SaveOnSignal(Accelerator& accelerator, const run_state::RunState& run, std::chrono::milliseconds patience);
  ~SaveOnSignal() override;
  SaveOnSignal(const SaveOnSignal&) = delete;
  SaveOnSignal& operator=(const SaveOnSignal&) = delete;

  /// Saves and ends the process where all ranks have agreed to. Collective where a signal came.
  void pass(const std::function<void()>& end_pass) override;
  /// The training is over: signals do what they did before.
  void end();

 private:
  struct Asked;
  int64_t next_place();
  bool evaluates() const;
  void save(const std::function<void()>& end_pass);

  Accelerator& accelerator_;
  const run_state::RunState& run_;
  const std::shared_ptr<Asked> asked_;  ///< shared with the watchdog, which may ask later
  int64_t steps_ = 0, points_ = 0;      ///< of the optimizers; save points since the last of them
  bool saving_ = false;
  std::thread thread_;
};

}  // namespace accelerate
