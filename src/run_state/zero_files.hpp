#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/zero_checkpoint.hpp"
#include "run_state/run_state.hpp"

/// Checkpoints as DeepSpeed lays them out: a folder for each model, with its optimizers and its schedule. Source:
/// DeepSpeed 0.19.8 (engine, stage_1_and_2, stage3); read by checkpointing::ZeroCheckpoint.
namespace accelerate::run_state {

/// The indices of the optimizers that step on parameters of this model, and of no other, and have no state dict of
/// their own: files of the model may hold them, by the stage that wrote these. Not collective.
std::vector<size_t> optimizers_on(const RunState& run, const detail::PreparedModel& model);
/// Those of them whose states fit into DeepSpeed's files of the model's stage: they go into the model's files.
std::vector<size_t> optimizers_of(const RunState& run, const detail::PreparedModel& model);
/// The index of the model whose files an optimizer is in; unset: it has a file of its own.
std::optional<size_t> model_of(const RunState& run, size_t optimizer);
/// The index of the model whose files a schedule is in: one that a DeepSpeed configuration made.
std::optional<size_t> model_of_scheduler(const RunState& run, size_t scheduler);

struct SaveZeroOptions {
  std::map<std::string, c10::IValue> client_state = {};
  bool exclude_frozen_parameters = false;
  bool first_on_its_disk = false;  ///< of UnfinishedCheckpoint
};
/// Whether this rank writes what the ranks of the model have alike.
bool writes_for_others(const detail::PreparedModel& model, bool first_on_its_disk);
/// Writes the files of one model, which DeepSpeed's settings train, into a folder that exists. Each rank writes its
/// own, and tensors become whole part by part on the way. Collective; throws what goes wrong on all ranks.
void save_zero(const RunState& run, const detail::PreparedModel& model, const std::filesystem::path& folder,
               const SaveZeroOptions& options = {});
/// The files beside tags: which is the latest, and a script that makes plain weights of it. Not collective.
void write_latest(const std::filesystem::path& folder, const std::string& tag);
void write_zero_to_fp32(const std::filesystem::path& folder);

/// The sizes of whole parameters and buffers, under each of their names.
checkpointing::Sizes sizes_by_name(const detail::PreparedModel& model);
/// The optimizer of index `optimizer` in a checkpoint. @param together  those of this model that it holds, one
/// after the other @throws CheckpointError
checkpointing::StoredOptimizer optimizer_in(const RunState& run, const detail::PreparedModel& model,
                                            const checkpointing::ZeroCheckpoint& checkpoint, size_t optimizer,
                                            const std::vector<size_t>& together);
/// The state of `scaler`, with the checkpoint's loss scale; unset where the checkpoint has none.
std::optional<c10::IValue> scaler_state_in(const checkpointing::ZeroCheckpoint& checkpoint,
                                           const optim::GradScaler& scaler);

}  // namespace accelerate::run_state
