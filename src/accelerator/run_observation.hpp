#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>

#include "accelerator/file_monitors.hpp"
#include "observe/run_phases.hpp"
#include "parallel/engines.hpp"
#include "run_state/run_state.hpp"

namespace accelerate {

namespace profiler {
class ModuleProfile;
}  // namespace profiler

/// Observes a run as its settings ask: times and memory of each step's phases, operations by module of one step, and
/// what collectives cost. The first optimizer's steps are the run's; forwards count where gradients are recorded, so
/// that an evaluation between two steps is in neither. Source: DeepSpeed's engine (wall_clock_breakdown,
/// memory_breakdown, flops_profiler, comms_logger), whose lines these are.
class RunObservation final : public run_phases::Watcher {
 public:
  /// @param run, monitors, accelerator  live longer; the last says whose backwards are this run's
  RunObservation(const run_state::RunState& run, FileMonitors& monitors, const void* accelerator);
  ~RunObservation() override;

  struct Facts {
    bool is_main_process = true;
    int64_t ranks = 1;
    at::Device device = at::kCPU;
    int64_t samples_of_step = 0;
  };
  /// From now on, unless that holds already. Collective where operations by module go to another file than before.
  /// @throws ResourceError on all ranks where the main process can't write to it
  void begin(const parallel::Observed& wanted, const Facts& facts);
  /// The training is over: prints what collectives have cost.
  void end();

  void begins(run_phases::Phase phase, const void* of) override;
  void ends(run_phases::Phase phase, const void* of) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Timer {
    int64_t depth = 0;  ///< models may lie within each other
    Clock::time_point since;
    double micro_ms = 0, ms = 0;  ///< of this micro-step, of this step
    int64_t times = 0;            ///< in this step
  };
  Timer& timer(run_phases::Phase phase) { return timers_[static_cast<size_t>(phase)]; }
  bool is_ours(run_phases::Phase phase, const void* of) const;
  Clock::time_point now() const;
  void begin_profile(const void* engine);
  void end_micro_step();
  void end_step();
  void print_profile(int64_t step);
  void print_memory(const char* when, run_phases::Phase phase) const;

  const run_state::RunState& run_;
  FileMonitors& monitors_;
  const void* accelerator_;
  parallel::Observed wanted_;
  Facts facts_;
  std::array<Timer, run_phases::kPhases> timers_;
  std::unique_ptr<profiler::ModuleProfile> profile_;
  enum class Profiling { not_yet, in_forward, forward_done, done } profiling_ = Profiling::not_yet;
  bool summary_due_ = false;
  int64_t checkpointed_before_ = 0;  ///< calls of the process, when this began
  bool told_of_recomputation_ = false;
  std::unique_ptr<run_phases::Watching> watching_;  ///< null: there is nothing to see
};

}  // namespace accelerate
