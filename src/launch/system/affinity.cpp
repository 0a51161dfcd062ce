#include "launch/system/affinity.hpp"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

/// "0-3,8" as numbers.
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> result;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream in(range);
    if (!(in >> first)) continue;
    if (!(in >> dash >> last)) last = first;
    for (int i = first; i <= last; ++i) result.push_back(i);
  }
  return result;
}

template <class T> T read_from(const fs::path& file, T otherwise) {
  std::ifstream(file) >> otherwise;
  return otherwise;
}

/// Cut into equal pieces, this is the one with number `index`.
template <class T> std::vector<T> piece(const std::vector<T>& all, int64_t index, int64_t pieces) {
  const auto n = static_cast<int64_t>(all.size());
  if (n == 0 || pieces <= 0) return {};
  if (pieces >= n) return {all[static_cast<size_t>(index % n)]};
  return {all.begin() + index * n / pieces, all.begin() + (index + 1) * n / pieces};
}

std::vector<int> share(const std::vector<std::vector<int>>& cores, int64_t index, int64_t pieces) {
  const auto flat = [](const std::vector<std::vector<int>>& some) {
    std::vector<int> cpus;
    for (const auto& core : some) cpus.insert(cpus.end(), core.begin(), core.end());
    return cpus;
  };
  return pieces <= static_cast<int64_t>(cores.size()) ? flat(piece(cores, index, pieces))
                                                      : piece(flat(cores), index, pieces);
}

}  // namespace

Topology Topology::current() {
  Topology topology;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return topology;
  std::map<int64_t, std::vector<int>> nodes;
  std::error_code ignored;
  for (fs::directory_iterator entry("/sys/devices/system/node", ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const std::string name = entry->path().filename();
    if (!name.starts_with("node") || name.find_first_not_of("0123456789", 4) != std::string::npos || name.size() == 4)
      continue;
    for (const int cpu : parse_list(read_from<std::string>(entry->path() / "cpulist", "")))
      if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) nodes[std::stoll(name.substr(4))].push_back(cpu);
  }
  if (nodes.empty())
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) nodes[0].push_back(cpu);
  for (const auto& [id, cpus] : nodes) {
    std::map<std::pair<int, int>, std::vector<int>> cores;  // by package and number within it
    for (const int cpu : cpus) {
      const fs::path folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology";
      cores[{read_from(folder / "physical_package_id", 0), read_from(folder / "core_id", cpu)}].push_back(cpu);
    }
    auto& node = topology.nodes.emplace_back(Topology::Node{id, {}});
    for (auto& [place, threads] : cores) node.cores.push_back(std::move(threads));
  }
  std::vector<std::string> gpus;
  for (fs::directory_iterator entry("/proc/driver/nvidia/gpus", ignored), end; !ignored && entry != end;
       entry.increment(ignored))
    gpus.push_back(entry->path().filename());
  std::sort(gpus.begin(), gpus.end());
  for (const auto& gpu : gpus)
    topology.gpu_nodes.push_back(read_from<int64_t>("/sys/bus/pci/devices/" + gpu + "/numa_node", -1));
  return topology;
}

std::vector<int> cores_of(const Topology& topology, const std::vector<int64_t>& gpu_ids, int64_t local_rank,
                          int64_t local_world_size) {
  const auto node_of_rank = [&](int64_t rank) -> int64_t {
    const auto gpus = static_cast<int64_t>(topology.gpu_nodes.size());
    const int64_t gpu = gpu_ids.empty() ? rank : gpu_ids[static_cast<size_t>(rank) % gpu_ids.size()];
    return gpu < gpus ? topology.gpu_nodes[static_cast<size_t>(gpu)] : -1;
  };
  if (const int64_t node = node_of_rank(local_rank); node >= 0)
    for (const auto& candidate : topology.nodes)
      if (candidate.id == node) {
        int64_t neighbours = 0, before = 0;
        for (int64_t rank = 0; rank < local_world_size; ++rank)
          if (node_of_rank(rank) == node) ++neighbours, before += rank < local_rank;
        return share(candidate.cores, before, neighbours);
      }
  std::vector<std::vector<int>> all;
  for (const auto& node : topology.nodes) all.insert(all.end(), node.cores.begin(), node.cores.end());
  return share(all, local_rank, local_world_size);
}

}  // namespace accelerate::launcher
