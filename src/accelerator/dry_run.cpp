#include "accelerate/accelerator/dry_run.hpp"

#include <algorithm>
#include <utility>

#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "comm/dry_process_group.hpp"
#include "memory/meta_memory.hpp"
#include "residency/meta_kernels.hpp"

namespace accelerate {
namespace {

comm::Traffic since(const comm::Traffic& before, const comm::Traffic& now) {
  return {.all_gather = now.all_gather - before.all_gather,
          .reduce_scatter = now.reduce_scatter - before.reduce_scatter,
          .all_reduce = now.all_reduce - before.all_reduce,
          .broadcast = now.broadcast - before.broadcast,
          .sent = now.sent - before.sent,
          .control = now.control - before.control,
          .messages = now.messages - before.messages};
}

}  // namespace

const DryRunPhase& DryRunReport::phase(std::string_view name) const {
  const auto found =
      std::find_if(phases.rbegin(), phases.rend(), [&](const DryRunPhase& phase) { return phase.name == name; });
  if (found != phases.rend()) return *found;
  std::string names;
  for (const auto& phase : phases) names += (names.empty() ? "" : ", ") + phase.name;
  throw ConfigError("DryRunReport::phase: found no phase '" + std::string(name) +
                    "', expected one of those that the program marked: " + names);
}

int64_t DryRunReport::peak_bytes() const {
  int64_t peak = 0;
  for (const auto& phase : phases) peak = std::max(peak, phase.at_peak.total());
  return peak;
}

DryRunReport dry_run(const DryRunOptions& options, const std::function<void(const DryRunMark& mark)>& program) {
  if (options.num_processes < 1 || options.process_index < 0 || options.process_index >= options.num_processes)
    throw ConfigError("dry_run: found process_index " + std::to_string(options.process_index) + " of " +
                      std::to_string(options.num_processes) +
                      " processes, expected 0 <= process_index < num_processes");
  if (PartialState::initialized())
    throw ConfigError(
        "dry_run: this process knows already who it is, because an Accelerator or a PartialState has been constructed; "
        "run dry first, or in a process of its own, or call AcceleratorState::reset(true) before");
  struct Forget {
    ~Forget() {
      GradientState::reset();
      AcceleratorState::reset(/*reset_partial_state=*/true);
    }
  } forget;
  meta_memory::install_kernels();
  meta_memory::Meter meter;
  const auto traffic = std::make_shared<comm::TrafficCounter>();
  const PartialState pretended(
      {.cpu = {},
       .process_group = {},
       .pretence = PartialStateOptions::Pretence{
           .process_index = options.process_index, .num_processes = options.num_processes, .traffic = traffic}});
  DryRunReport report{.process_index = options.process_index, .num_processes = options.num_processes, .phases = {}};
  comm::Traffic seen;
  program([&](const std::string& name) {
    const auto reading = meter.read();
    const comm::Traffic now = traffic->total();
    report.phases.push_back({.name = name,
                             .at_end = reading.now,
                             .at_peak = reading.at_peak,
                             .peaks = reading.peaks,
                             .traffic = since(seen, now)});
    seen = now;
  });
  return report;
}

}  // namespace accelerate
