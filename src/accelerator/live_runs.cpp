#include <ATen/ops/full.h>

#include <algorithm>

#include "accelerate/utils/memory.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "comm/group.hpp"

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

bool detail::has_failed(bool here, bool all_ranks) {
  const auto& group = comm::world_group();
  if (all_ranks && group && !group->dry()) {
    const auto failed = at::full({1}, here, at::TensorOptions().dtype(at::kLong).device(group->device()));
    here = group->all_gather(failed, "find_executable_batch_size").any().item<bool>();
  }
  if (!here || all_runs().empty()) return here;
  GradientState().set_sync_gradients(true);  // within a group zero_grad() does nothing
  for (auto* run : all_runs()) {
    run->step = 0;
    run->num_items = 0;
    for (const auto& optimizer : run->optimizers) optimizer.zero_grad();
  }
  return true;
}

}  // namespace accelerate
