#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "run_state/filling.hpp"
#include "run_state/holdings.hpp"
#include "run_state/state_dict.hpp"
#include "run_state/state_files.hpp"

/// Weights of prepared models, to files and back. Tensors in shards become whole one part at a time, or, in files that
/// are written at once, one file at a time. All functions are collective, and throw what goes wrong on all ranks.
namespace accelerate::run_state {

void save_model(const detail::PreparedModel& model, const StateFile& file, const Writers& writers);

/// What its tensors take in files, at least: of all ranks together, each once, in the smaller of the types in which
/// they are kept and computed with. Not collective.
int64_t saved_bytes(const detail::PreparedModel& model);

/// Somebody's tensors in a model's place, on the rank that calls it. Not collective.
void save_tensors(const std::map<std::string, at::Tensor>& tensors, const StateFile& file);

/// A model's weights that were found in files, or with somebody else, and fit. Nothing has changed yet, and next to
/// nothing is read. Not collective but for what says so.
class StagedModel {
 public:
  /// @param strict  false: tensors that one of them lacks are left out, with a warning. ConfigError for this rank's
  /// shards, which fit the same run only  @param masters  of DeepSpeed's files; false: weights as modules had them
  /// @throws CheckpointError listing every missing, unexpected and misshapen tensor.
  StagedModel(const detail::PreparedModel& model, const StateFile& file, bool strict, bool masters = true);
  /// @param may_miss  names that need not be there; those tensors stay as they are
  StagedModel(const detail::PreparedModel& model, const checkpointing::StoredTensors& stored,
              const std::set<std::string>& may_miss = {});
  /// @throws CheckpointError on all ranks if weights that can't change would. Collective.
  void agree() const;
  /// Reads all of them into the module's tensors. Collective. @throws CheckpointError on all ranks; some have changed
  void apply() const;

 private:
  void stage(const detail::PreparedModel& model, const checkpointing::StoredTensors& stored,
             const std::set<std::string>& may_miss);
  void stage_own_pieces(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file);

  parallel::Engine* engine_;
  Filling filling_;
  std::vector<std::pair<at::Tensor, at::Tensor>> in_few_bits_;  ///< and what the files have for them
};

/// Parameters and buffers by name, tied weights under each of theirs: what this rank holds of them, without copies. Not
/// collective.
StateDict distributed_state(const detail::PreparedModel& model);

/// Parameters and buffers by name, tied weights under each of theirs, for whom `config` says; empty elsewhere.
std::map<std::string, at::Tensor> whole_state(const detail::PreparedModel& model, const StateDictConfig& config);

/// As checkpointing::save_model(), for models in shards; rank 0 writes.
void save_weights(const detail::PreparedModel& model, const std::filesystem::path& folder, int64_t max_shard_bytes,
                  bool safe_serialization);

}  // namespace accelerate::run_state
