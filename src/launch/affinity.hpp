#pragma once

#include <cstdint>
#include <vector>

namespace accelerate::launcher {

/// Which cores and GPUs of this machine are near each other; a value, so that tests can invent one.
struct Topology {
  struct Node {
    int64_t id = 0;
    std::vector<int> cpus;          ///< that this process may use, threads of one core side by side
  };
  std::vector<Node> nodes;
  std::vector<int64_t> gpu_nodes;   ///< by GPU number (PCI order): the node that it hangs on, -1 if the system does not say
  static Topology current();
};

/// The logical cores of a rank: an equal share of its GPU's node where there are GPUs, else of all cores, nodes kept together. With more ranks
/// than cores they take turns.
/// @param gpu_ids  the GPUs that ranks use, in their order; empty: all, or none on a machine without
std::vector<int> cores_of(const Topology& topology, const std::vector<int64_t>& gpu_ids, int64_t local_rank, int64_t local_world_size);

}  // namespace accelerate::launcher
