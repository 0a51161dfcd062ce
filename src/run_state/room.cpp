#include "run_state/room.hpp"

#include <algorithm>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "optim/optimizer_state.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizer_view.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {
namespace {

/// Of all ranks together.
int64_t state_bytes(const AcceleratedOptimizer& optimizer, const PreparedModels& models) {
  auto& bare = optimizer.optimizer();
  if (optim::has_own_state_dict(bare)) return 0;
  int64_t bytes = 0;
  try {
    for (const auto& holding : parameters_of(optimizer, models)) {
      const int64_t here = holding.value.numel();
      for (const auto& state : optim::states_of(bare, {holding.value})) {
        // A count of steps has one element, as a shard may have.
        const bool in_pieces = holding.in_pieces() && here > 1 && state.numel() == here;
        bytes += (in_pieces ? holding.whole.numel() : state.numel()) * static_cast<int64_t>(state.element_size());
      }
    }
  } catch (const ConfigError&) {  // of a class whose states are not known here
    return 0;
  }
  return bytes;
}

}  // namespace

void need_room(const RunState& run, const std::filesystem::path& folder, const SaveOptions& saving,
               const RoomOptions& options) {
  const bool in_pieces =
      saving.form == StateForm::sharded || saving.form == StateForm::local || saving.form == StateForm::deepspeed;
  comm::on_all_ranks_or_throw<ResourceError>([&] {
    const bool writes_all = in_pieces ? options.one_disk && comm::rank() == 0
                                      : comm::rank() == 0 || (saving.writers.several && options.is_first_on_its_disk);
    const auto free = writes_all ? free_bytes(folder) : std::nullopt;
    if (!free) return;
    int64_t needed = 0;
    for (const auto& model : run.models) needed += options.models_as_they_are ? saved_bytes(*model) : 0;
    // DeepSpeed's files leave some of them out.
    for (const auto& optimizer : run.optimizers)
      needed += saving.form == StateForm::deepspeed ? 0 : state_bytes(optimizer, run.models);
    if (needed > *free)
      raise<ResourceError>(
          "save_state: the checkpoint takes at least {} bytes, and the disk of '{}' has {} bytes free; nothing was "
          "written. Free some space, lower ProjectConfiguration::total_limit, or save elsewhere",
          needed, folder.parent_path().string(), *free);
  });
}

}  // namespace accelerate::run_state
