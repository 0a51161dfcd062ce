#pragma once

#include <cstdint>
#include <vector>

namespace accelerate::launcher {

/// Which cores and GPUs of this machine are near each other; a value, so that tests can invent one.
struct Topology {
  struct Node {
    int64_t id = 0;
    std::vector<std::vector<int>> cores;  ///< that this process may use, by their logical processors
  };
  std::vector<Node> nodes;
  /// By GPU number (PCI order): the node that it hangs on, -1 if the system does not say.
  std::vector<int64_t> gpu_nodes;
  static Topology current();
};

/// The logical processors of a rank: an equal share of its GPU's node where there are GPUs, else of all cores, nodes
/// kept together. Ranks share no core as long as there is one for each; then they share out the processors, and with
/// more ranks than those they take turns.
/// @param gpu_ids  the GPUs that ranks use, in their order; empty: all, or none on a machine without
std::vector<int> cores_of(const Topology& topology, const std::vector<int64_t>& gpu_ids, int64_t local_rank,
                          int64_t local_world_size);

}  // namespace accelerate::launcher
