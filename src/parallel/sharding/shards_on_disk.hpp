#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "parallel/sharding/settings.hpp"
#include "parallel/sharding/sharded_part.hpp"
#include "residency/disk/disk_memory.hpp"
#include "residency/homes/kept_slice.hpp"

namespace accelerate::parallel {

/// The part of a model's shards, and of their optimizers' states, that lies on disks. Not collective.
class ShardsOnDisk {
 public:
  /// @throws ConfigError for a folder that is none, ResourceError where no file can be made in it
  /// @param device  the model's; meta: a dry run, without files
  ShardsOnDisk(const ShardingSettings& settings, std::vector<ShardedPart>& parts, const at::Device& device);

  /// Whether optimizers step on one group after the other.
  bool steps_in_groups() const { return has_states_ || has_parameters_; }
  bool has_states() const { return has_states_; }
  bool has_parameters() const { return has_parameters_; }

  /// Gives part.master memory, zeros, if it or what units are made of lies on a disk. Nothing: neither does.
  /// @param options  of those that stay in memory
  std::optional<residency::KeptSlice> allocate(ShardedPart& part, int64_t numel, const at::TensorOptions& options);
  /// A master of another dtype than what is computed with, which is elsewhere. Undefined: it does not lie on a disk.
  at::Tensor allocate_master(const ShardedPart& part, int64_t numel);
  /// Whether somebody may have changed part.master where it lies; true where it is in memory.
  bool may_have_changed(const ShardedPart& part) const;

  /// Indices of parts that are stepped on together, in order; of those that may be trained.
  const std::vector<std::vector<size_t>>& groups();
  /// Around a step on a group, with what the optimizer keeps of it. Blocks.
  void before_group(size_t group, const std::vector<at::Tensor>& states);
  void after_group(size_t group, const std::vector<at::Tensor>& states);
  /// A state of a parameter among the parts lies on the disk from now on, where states do. Its values are still to
  /// come.
  void place(const at::Tensor& parameter, const at::Tensor& state);
  // Shards' gradients lie on the disk of the states from backward to step.
  /// A part's are about to be added to: they are in memory.
  void before_gradients(const ShardedPart& part);
  /// Parts' have all of a backward, and go. Nobody may write to them until settle_gradients().
  void after_gradients(const std::vector<size_t>& parts);
  /// The backward is over: its gradients are on the disk.
  void settle_gradients();

  // Steps that are computed ahead, within backward. A group's old values stay where they are, the new ones go to places
  // beside them, and the step exchanges these.

  /// A part's gradients have all of this backward. @return its group, if it was the last one of that
  std::optional<size_t> completed_by(const ShardedPart& part);
  /// Groups of which some had gradients, and others will have none in this backward.
  std::vector<size_t> left_open() const;
  /// Whether a tensor's bytes lie on one of the disks; in a dry run, would lie.
  bool has(const at::Tensor& tensor) const;
  /// The group's bytes are in memory, to be changed in place where they lie on a disk. @return false: its step is to be
  /// a plain one
  bool before_ahead(size_t group, const std::vector<at::Tensor>& states);
  /// New values go beside the old ones, while backward goes on.
  void after_ahead(size_t group, const std::vector<at::Tensor>& states);
  /// Within the step: they take the place of the old ones, which nobody has touched. @param divides  gradients are
  /// about to be divided @return false: nothing has happened, and the step is to be a plain one
  bool take_ahead(size_t group, bool divides);
  void after_take(size_t group);
  /// What fails in it is thrown by settle(): a step in the middle would leave a model that is half of one and half of
  /// another. @return whether nothing did
  bool postpone(const std::function<void()>& f);

  /// All that was written is on the disk. @throws ResourceError if that, or finding room for it, has failed since the
  /// last time: tensors without a place there are in memory, and nothing is lost
  void settle();

 private:
  /// Tensors on their way, of a group.
  struct UnderWay {
    size_t group = 0;
    std::vector<at::Tensor> tensors;
    std::unique_ptr<residency::Transfer> states, parameters;
    void wait() {
      if (states) states->wait();
      if (parameters) parameters->wait();
    }
  };
  std::vector<at::Tensor> masters_of(size_t group) const;
  /// Of parts, by their indices; none where states are in memory.
  std::vector<at::Tensor> gradients_of(const std::vector<size_t>& parts) const;
  /// Gives a place on the disk of the states to what has none. @param whole  as DiskMemory::take()
  void take(const std::vector<at::Tensor>& tensors, bool whole);
  static void lie_in_a_file(const std::vector<at::Tensor>& dry);
  UnderWay under_way(
      size_t group, std::vector<at::Tensor> tensors,
      std::unique_ptr<residency::Transfer> (residency::DiskMemory::*move)(const std::vector<at::Tensor>&)) const;
  /// On that disk, if the second is true.
  at::Tensor zeros(const std::shared_ptr<residency::DiskMemory>& disk, bool on_disk, int64_t numel,
                   const at::TensorOptions& options);

  std::vector<ShardedPart>& parts_;
  bool is_dry_, has_states_, has_parameters_;
  StatesOnDisk how_;
  int64_t elements_left_in_memory_ = 0;
  std::shared_ptr<residency::DiskMemory> states_, parameters_;  ///< null: in memory, or a dry run
  at::Tensor dry_buffers_;                                      ///< that a group would come into
  std::vector<std::vector<size_t>> groups_;

  void before_dry_group(size_t group, const std::vector<at::Tensor>& states, int64_t at_a_time);
  UnderWay bring(size_t group, std::vector<at::Tensor> tensors) const;
  UnderWay send(size_t group, std::vector<at::Tensor> tensors) const;
  std::vector<std::vector<at::Tensor>> kept_;  ///< by group: what came with it the last time
  std::optional<UnderWay> coming_;
  std::vector<UnderWay> going_;
  std::vector<std::pair<at::Tensor, int64_t>> gradients_here_;  ///< that have come for a step, and their versions then
  std::vector<UnderWay> gradients_going_;                       ///< their groups are those of their parts

  /// Of a group.
  struct Ahead {
    bool is_there = false;            ///< for the coming step
    bool begun = false;               ///< in this backward
    bool shared = false;              ///< several optimizers step on it: its masters can't take the values of one
    std::vector<at::Tensor> tensors;  ///< that have values beside
    std::vector<int64_t> versions;    ///< of the masters, as they were read
    UnderWay going;
  };
  /// What is on its way beside is there. @return whether it is
  bool settle_ahead(Ahead& ahead);
  /// Waits for those of the group.
  void settle(std::vector<UnderWay>& moves, size_t group);
  /// Those of a step that lie on the disk and come into memory.
  void note_gradients(const std::vector<at::Tensor>& gradients);
  void drop_unchanged_gradients();
  std::optional<size_t> after_in_backward(size_t group) const;
  std::vector<size_t> group_of_;           ///< by part
  std::vector<char> given_;                ///< by part: in this backward
  std::vector<size_t> order_, order_now_;  ///< in which groups were complete in the last backward, and in this one
  std::vector<Ahead> ahead_;               ///< by group
  std::vector<size_t> ahead_going_;        ///< groups, the oldest first
  std::unordered_set<const void*> dry_;    ///< storages that would lie in a file
  bool spoke_ = false;                     ///< of a disk that can't
  std::exception_ptr failed_;
};

}  // namespace accelerate::parallel
