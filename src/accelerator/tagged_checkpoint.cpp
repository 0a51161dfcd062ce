#include "accelerate/accelerator/tagged_checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "accelerate/comm.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "comm/agreement.hpp"
#include "parallel/deepspeed_files.hpp"
#include "run_state/checkpoint_folders.hpp"
#include "run_state/models.hpp"
#include "run_state/optimizers.hpp"
#include "run_state/zero_files.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::detail {
namespace {

namespace fs = std::filesystem;

void refuse_reserved(const ClientState& client_state) {
  for (const auto& [name, value] : client_state)
    if (checkpointing::ZeroCheckpoint::is_own_key(name))
      raise<ConfigError>(
          "save_checkpoint: client_state has the name '{}', which DeepSpeed's own files use, expected another one",
          name);
}

/// Rank 0's tag, which all ranks should have given.
std::string agreed_tag(const std::string& tag, const parallel::DeepSpeedFiles& how) {
  std::vector<std::string> all = gather_object(std::vector<std::string>{tag});
  if (!how.checks_tags) return all.front();
  const auto other = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one != all.front(); });
  if (other == all.end()) return all.front();
  const auto text = fmt::format("save_checkpoint: rank {} gave the tag '{}', rank 0 '{}', expected the same of all",
                                other - all.begin(), *other, all.front());
  if (how.tags_must_agree) throw ConfigError(text + " (checkpoint.tag_validation is Fail)");
  if (comm::rank() == 0) logs::warn("accelerate.accelerator", "{}: rank 0's is taken", text);
  return all.front();
}

bool is_first_here() { return PartialState().is_local_main_process(); }

}  // namespace

fs::path save_tag(const PreparedModel& model, const fs::path& save_dir, std::optional<std::string> tag,
                  const ClientState& client_state, const SaveTagOptions& options) {
  const auto [run, accelerator, prepared] = deepspeed_run_of(model, "save_checkpoint");
  if (save_dir.empty()) throw ConfigError("save_checkpoint: save_dir is empty, expected a folder");
  run_state::refuse_undefined(*run, "save_checkpoint");
  refuse_reserved(client_state);
  if (!tag) {
    int64_t steps = 0;
    for (const size_t index : run_state::optimizers_of(*run, *prepared)) {
      const auto counts = run->optimizers[index].step_counts();
      steps = std::max(steps, counts.taken + counts.skipped);
    }
    tag = fmt::format("global_step{}", steps);
  }
  const auto chosen = agreed_tag(*tag, *prepared->deepspeed);
  if (chosen.empty() || fs::path(chosen).filename() != chosen || chosen == "." || chosen == "..")
    raise<ConfigError>("save_checkpoint: the tag is '{}', expected the name of a folder", chosen);
  run_state::UnfinishedCheckpoint checkpoint(save_dir / chosen, is_first_here(), run_state::CheckpointKind::tag);
  run_state::save_zero(*run, *prepared, checkpoint.where(),
                       {.client_state = client_state,
                        .exclude_frozen_parameters = options.exclude_frozen_parameters,
                        .first_on_its_disk = checkpoint.is_first_on_its_disk()});
  checkpoint.publish();
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    if (!run_state::writes_for_others(*prepared, checkpoint.is_first_on_its_disk())) return;
    if (prepared->deepspeed->stage > 0) run_state::write_zero_to_fp32(save_dir);
    if (options.save_latest) run_state::write_latest(save_dir, chosen);
  });
  return save_dir / chosen;
}

LoadedTag load_tag(const PreparedModel& model, const fs::path& load_dir, std::optional<std::string> tag,
                   const LoadTagOptions& options) {
  const auto [run, accelerator, prepared] = deepspeed_run_of(model, "load_checkpoint");
  using checkpointing::ZeroCheckpoint;
  const bool universal = prepared->deepspeed->load_universal;
  if (!tag && !universal && !fs::exists(load_dir / ZeroCheckpoint::kLatest) &&
      !fs::exists(load_dir / ZeroCheckpoint::kLatestUniversal)) {
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      if (!fs::is_directory(load_dir))
        raise<CheckpointError>("load_checkpoint: '{}' is not a folder; give the one that save_checkpoint wrote",
                               load_dir.string());
    });
    if (comm::rank() == 0)
      logs::warn("accelerate.accelerator",
                 "load_checkpoint: '{}' has no file 'latest', so nothing was loaded; give a tag", load_dir.string());
    return {};
  }
  LoadedTag loaded;
  std::optional<run_state::StagedModel> weights;
  std::vector<run_state::StagedOptimizer> optimizers;
  std::vector<std::pair<AcceleratedScheduler, c10::IValue>> schedulers;
  std::optional<c10::IValue> scale;
  int64_t steps = 0, skipped = 0;
  comm::on_all_ranks_or_throw<CheckpointError>(
      [&] { loaded.load_path = ZeroCheckpoint::find(load_dir, tag.value_or(""), universal); });
  run_state::finish_checkpoint(loaded.load_path, is_first_here());
  // All is opened, found and compared before anything changes, on any rank.
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    const checkpointing::OpenedOnce once;
    const auto opened = ZeroCheckpoint::opened(loaded.load_path);
    const auto& checkpoint = *opened;
    weights.emplace(*prepared, run_state::StateFile{run_state::StateForm::deepspeed, loaded.load_path},
                    options.load_module_strict, /*masters=*/options.load_optimizer_states && !options.load_module_only);
    loaded.client_state = checkpoint.client_state();
    if (options.load_module_only) return;
    steps = checkpoint.global_steps(), skipped = checkpoint.skipped_steps();
    if (options.load_optimizer_states) {
      const auto together = run_state::optimizers_of(*run, *prepared);
      for (const size_t index : together)
        optimizers.emplace_back(run->optimizers[index], run->models,
                                run_state::optimizer_in(*run, *prepared, checkpoint, index, together),
                                loaded.load_path.filename().string());
      if (run->scaler) scale = run_state::scaler_state_in(checkpoint, *run->scaler);
    }
    const auto schedule = checkpoint.lr_scheduler();
    for (size_t i = 0; options.load_lr_scheduler_states && !schedule.isNone() && i < run->schedulers.size(); ++i)
      if (const auto of = run_state::model_of_scheduler(*run, i); of && run->models[*of] == prepared)
        schedulers.emplace_back(run->schedulers[i], schedule);
  });
  weights->agree();
  std::vector<std::function<void()>> undo;
  try {
    comm::on_all_ranks_or_throw<CheckpointError>([&] {
      const auto take = [&](auto& object, const c10::IValue& state) {
        undo.push_back([&object, before = object.state_dict()] { object.load_state_dict(before); });
        object.load_state_dict(state);
      };
      for (auto& optimizer : optimizers) undo.push_back(optimizer.take());
      for (auto& [scheduler, state] : schedulers) take(scheduler, state);
      if (scale) take(*run->scaler, *scale);
    });
    run_state::load_in_place(*run, "load_checkpoint", loaded.load_path, [&] {
      weights->apply();
      comm::on_all_ranks_or_throw<CheckpointError>([&] {
        for (const auto& optimizer : optimizers) optimizer.fill();
      });
    });
  } catch (...) {
    for (; !undo.empty(); undo.pop_back()) undo.back()();
    throw;
  }
  if (!options.load_module_only)
    for (const size_t index : run_state::optimizers_of(*run, *prepared))
      run->optimizers[index].set_step_counts({.taken = steps - skipped, .skipped = skipped});
  return loaded;
}

}  // namespace accelerate::detail
