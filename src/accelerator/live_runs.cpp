#include <algorithm>

#include "accelerate/utils/memory.hpp"
#include "accelerator/accelerator_impl.hpp"

namespace accelerate {
namespace {

std::vector<run_state::RunState*>& all_runs() {
  static std::vector<run_state::RunState*> runs;
  return runs;
}

}  // namespace

LiveRun::LiveRun(run_state::RunState& run) : run_(run) { all_runs().push_back(&run); }
LiveRun::~LiveRun() { std::erase(all_runs(), &run_); }

std::vector<run_state::RunState*> live_runs() { return all_runs(); }

parallel::Engines live_engines() {
  parallel::Engines engines;
  for (const auto* run : all_runs())
    for (const auto& engine : run->engines())
      if (std::find(engines.begin(), engines.end(), engine) == engines.end()) engines.push_back(engine);
  return engines;
}

void detail::drop_half_done() {
  if (all_runs().empty()) return;
  GradientState().set_sync_gradients(true);  // within a group zero_grad() does nothing
  for (auto* run : all_runs()) {
    run->step = 0;
    run->num_items = 0;
    for (const auto& optimizer : run->optimizers) optimizer.zero_grad();
  }
}

}  // namespace accelerate
