#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/comm/axes.hpp"

namespace accelerate::comm {

class Group;

struct AxisSize {
  Axis axis = Axis::dp_replicate;
  int64_t size = 1;
  bool operator==(const AxisSize&) const = default;
};

/// The ranks of a job as a grid: they count through the axes, the last one fastest. An axis that is left out has one
/// rank. Code that averages, shards or reads data asks for the group along its axes; all ranks are for barriers, logs
/// and failures.
class Mesh {
 public:
  /// One rank alone.
  Mesh() = default;
  /// @param all    the job's ranks; null alone
  /// @param sizes  outermost first. @throws ConfigError unless their product is the number of ranks, naming all of them
  Mesh(std::shared_ptr<Group> all, std::vector<AxisSize> sizes);

  /// How many ranks there are along these axes; 1 where the mesh has none of them.
  int64_t size(Axes axes) const;
  /// This rank's place among them.
  int64_t place(Axes axes) const;
  /// The place of a rank of the job.
  int64_t place(Axes axes, int64_t rank) const;
  /// How many ranks lie between neighbours along an axis; 1 where the mesh does not have it.
  int64_t step(Axis axis) const;
  /// The ranks that differ from this one in these axes only, by their places there; null where that is this one alone.
  /// Made on first use, which is collective over all ranks of the job and blocks until they have met.
  std::shared_ptr<Group> along(Axes axes) const;
  /// Everybody; null alone.
  const std::shared_ptr<Group>& all() const { return all_; }
  const std::vector<AxisSize>& sizes() const { return sizes_; }

  /// The same ranks seen otherwise: `into` stands for `from`, axes that lie beside each other (experts over the ranks
  /// that sharding and context share, say). @throws ConfigError where they don't, or have not as many ranks.
  Mesh folded(Axes from, const std::vector<AxisSize>& into) const;

 private:
  std::shared_ptr<Group> all_;
  std::vector<AxisSize> sizes_;  ///< of more than one rank
  mutable std::map<Axes, std::shared_ptr<Group>> groups_;
};

/// The job's. All ranks are replicas until the first Accelerator has said otherwise; alone without a group.
const Mesh& mesh();
void set_mesh(Mesh mesh);

}  // namespace accelerate::comm
