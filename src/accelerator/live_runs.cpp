#include <ATen/ops/full.h>

#include <algorithm>

#include "accelerate/utils/memory.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "comm/group.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

struct Live {
  run_state::RunState* run;
  Accelerator* accelerator;
};
std::vector<Live>& all_live() {
  static std::vector<Live> all;
  return all;
}

}  // namespace

LiveRun::LiveRun(run_state::RunState& run) : run_(run) { all_live().push_back({&run, nullptr}); }
LiveRun::~LiveRun() {
  std::erase_if(all_live(), [this](const Live& live) { return live.run == &run_; });
}
void LiveRun::belongs_to(Accelerator& accelerator) {
  for (auto& live : all_live())
    if (live.run == &run_) live.accelerator = &accelerator;
}

std::vector<run_state::RunState*> live_runs() {
  std::vector<run_state::RunState*> runs;
  for (const auto& live : all_live()) runs.push_back(live.run);
  return runs;
}

TrainingRun deepspeed_run_of(const detail::PreparedModel& model, const char* operation) {
  if (!model.deepspeed)
    raise<ConfigError>(
        "{}: the model is not trained by a DeepSpeed configuration, expected AcceleratorOptions::deepspeed_plugin; "
        "save_state() and load_state(), backward() and clip_grad_norm_() of the Accelerator work with any",
        operation);
  for (const auto& live : all_live())
    if (auto known = live.run->find(model.model); known && known->engine == model.engine)
      return {live.run, live.accelerator, known};
  raise<ConfigError>(
      "{}: the Accelerator that prepared the model is gone, or has forgotten it (free_memory), expected it to be there",
      operation);
}

parallel::Engines live_engines() {
  parallel::Engines engines;
  for (const auto& live : all_live())
    for (const auto& engine : live.run->engines())
      if (std::find(engines.begin(), engines.end(), engine) == engines.end()) engines.push_back(engine);
  return engines;
}

bool detail::has_failed(bool here, bool all_ranks) {
  const auto& group = comm::world_group();
  if (all_ranks && group && !group->dry()) {
    const auto failed = at::full({1}, here, at::TensorOptions().dtype(at::kLong).device(group->device()));
    here = group->all_gather(failed, "find_executable_batch_size").any().item<bool>();
  }
  if (!here || all_live().empty()) return here;
  GradientState().set_sync_gradients(true);  // within a group zero_grad() does nothing
  for (auto* run : live_runs()) {
    run->step = 0;
    run->num_items = 0;
    for (const auto& optimizer : run->optimizers) optimizer.zero_grad();
  }
  return true;
}

}  // namespace accelerate
