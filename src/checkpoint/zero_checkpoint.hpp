#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/saved_state.hpp"
#include "checkpoint/universal_folder.hpp"

namespace accelerate::checkpointing {

/// The files of DeepSpeed's save_checkpoint for one tag: a model, its optimizer and its schedule, of any ZeRO stage,
/// cut over any number of ranks; or the universal checkpoint that its tool has made of them. Opened as data: nothing in
/// it is executed, tensors are read when they are asked for. Source: DeepSpeed 0.19.8, engine and zero_to_fp32.
class ZeroCheckpoint {
 public:
  /// Files that name a tag, beside tags.
  static constexpr const char *kLatest = "latest", *kLatestUniversal = "latest_universal";

  /// Whether such files lie in the folder of a tag.
  static bool is_one(const std::filesystem::path& folder);
  /// The tag that one of these files of a folder names; empty without such a file.
  static std::string named_by(const char* file, const std::filesystem::path& folder);
  /// The tag in `latest`, or else that in `latest_universal`.
  static std::string latest(const std::filesystem::path& folder);
  /// The folder of a tag in a folder of checkpoints, of the latest one where none is given. @param universal  only one
  /// of this kind will do, as `checkpoint.load_universal` says. @throws CheckpointError naming what is missing
  static std::filesystem::path find(const std::filesystem::path& folder, const std::string& tag,
                                    bool universal = false);
  /// @throws CheckpointError unless the tag's folder is a universal checkpoint
  static void need_universal(const std::filesystem::path& folder);

  /// @param folder  of the tag. @throws CheckpointError for files that are missing, damaged, or of different saves, and
  /// for those of tensor, pipeline or expert parallelism, unless they have become a universal checkpoint.
  explicit ZeroCheckpoint(const std::filesystem::path& folder);

  /// The same object again while an OpenedOnce lives.
  static std::shared_ptr<const ZeroCheckpoint> opened(const std::filesystem::path& folder);

  bool is_universal() const { return universal_ != nullptr; }
  int64_t stage() const { return stage_; }
  /// The number of ranks over which it is cut.
  int64_t ranks() const { return ranks_; }
  /// Optimizer steps, skipped ones with them; skipped ones.
  int64_t global_steps() const;
  int64_t skipped_steps() const;

  struct Which {
    bool frozen = true;   ///< parameters that are not trained, too
    bool masters = true;  ///< in fp32 where the optimizer has masters; false: as modules computed with them, where the
                          ///< files have that (up to stage 2, and not in universal ones)
    const Sizes* sizes = nullptr;  ///< that parameters have where they go, see UniversalFolder::tensor()
  };
  /// Parameters and buffers by name, tied ones under each of theirs.
  StoredTensors weights(const Which& which) const;
  StoredTensors weights() const { return weights(Which{}); }
  /// @param sizes  as Which::sizes. @throws CheckpointError where it was saved without
  StoredOptimizer optimizer(const Sizes* sizes = nullptr) const;
  /// The schedule's state and the loss scaler's; None without.
  c10::IValue lr_scheduler() const;
  c10::IValue loss_scaler() const;
  /// Whether a key of a model's file is DeepSpeed's own.
  static bool is_own_key(const std::string& key);
  /// The values that the program kept with it.
  std::map<std::string, c10::IValue> client_state() const;

  // The names that conversions need; of stages 1 to 3.
  struct Named {
    std::string name;
    std::vector<int64_t> sizes;
    int64_t numel = 0;
    int64_t group = 0;   ///< of those that are flat together
    int64_t offset = 0;  ///< there; at stage 3 in each rank's vector
  };
  /// Parameters that the optimizer has, in its order.
  const std::vector<Named>& trained() const { return parameters_; }
  /// The model's files, one or one of each rank.
  std::vector<std::filesystem::path> model_files() const;
  /// A value of the model's file, or of the optimizer's beside states and masters; None without.
  c10::IValue model_value(const char* key) const;
  c10::IValue optimizer_value(const char* key) const;
  /// With the numbers of those that are flat together under `params`.
  c10::IValue param_groups() const;
  /// The steps of what is flat together, as the file has them: a number, or a tensor of one; None without.
  c10::IValue step(int64_t group) const;

 private:
  using Dict = c10::impl::GenericDict;
  /// One vector that is cut over files: slices, one after the other.
  struct FileSlice {
    const Archive* archive;
    at::Tensor stand_in;  ///< 1-D
    int64_t numel;        ///< without padding at its end
  };
  using Flat = std::vector<FileSlice>;

  void open_model_files(const std::filesystem::path& folder);
  void open_optimizer_files(const std::filesystem::path& folder);
  void list_parameters();
  void place_parameters();
  void check_alike() const;
  Dict model_state(size_t rank = 0) const;
  Dict optimizer_state(size_t rank = 0) const;
  /// Rank 0's file of the optimizer, or what stands for it.
  const Archive& optimizer_file() const { return universal_ ? universal_->common() : *optimizers_.front(); }
  /// The state of the optimizer that steps on flat vectors: a dict as torch has it, or a list of states.
  c10::IValue base_optimizer(size_t rank) const;
  std::optional<Dict> state_of(size_t rank, int64_t group) const;
  /// Elements of each rank's shard of a parameter at stage 3.
  int64_t pieces_of(int64_t numel) const { return numel / ranks_ + (numel % ranks_ > 0 ? 1 : 0); }
  const char* masters_key() const { return stage_ == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups"; }
  /// The masters or a state of one group, of each rank. @param kind  "": the masters. Nothing where a rank lacks it.
  std::optional<Flat> flat(int64_t group, const std::string& kind) const;
  std::vector<std::string> kinds(int64_t group) const;
  StoredTensor part_of(const Flat& flat, const Named& parameter) const;
  using States = std::map<std::string, StoredTensor>;
  States states_of(const Named& parameter, const std::map<std::string, Flat>& flats) const;
  States universal_states_of(const Named& parameter, const std::vector<std::string>& kinds, const Sizes* sizes) const;
  void add_masters_of_stage_0(StoredTensors& weights) const;
  StoredOptimizer optimizer_of_stage_0() const;

  std::string source_;  ///< for messages
  int64_t stage_ = 0, ranks_ = 1;
  std::shared_ptr<const UniversalFolder> universal_;                 ///< in the place of optimizers_
  std::vector<std::shared_ptr<const Archive>> models_, optimizers_;  ///< by rank; the second: from stage 1
  std::vector<Named> parameters_;                                    ///< that the optimizer has, from stage 1
};

/// While one lives, in this thread, each folder is opened once: what is loaded from it asks for it several times, and
/// it has files of all ranks that saved.
class OpenedOnce {
 public:
  OpenedOnce();
  ~OpenedOnce();
  OpenedOnce(const OpenedOnce&) = delete;
  OpenedOnce& operator=(const OpenedOnce&) = delete;

 private:
  friend class ZeroCheckpoint;
  OpenedOnce* const outer_;
  std::map<std::filesystem::path, std::shared_ptr<const ZeroCheckpoint>> opened_;
};

}  // namespace accelerate::checkpointing
