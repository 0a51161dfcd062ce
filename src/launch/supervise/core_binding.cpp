#include "launch/supervise/core_binding.hpp"

#include <sstream>
#include <string>

#include "launch/job/host.hpp"
#include "launch/job/job.hpp"

namespace accelerate::launcher {
namespace {

/// The GPUs of --gpu_ids, else those of the caller's CUDA_VISIBLE_DEVICES.
std::vector<int64_t> visible_gpus(const Job& job, const Host& host) {
  std::string list = job.settings.text("gpu_ids");
  if (list.empty() || list == "all") list = host.variable("CUDA_VISIBLE_DEVICES").value_or("");
  std::vector<int64_t> ids;
  std::istringstream text(list);
  for (int64_t id = 0; text >> id; text.ignore()) ids.push_back(id);
  return ids;
}

}  // namespace

CoreBinding::CoreBinding(const Job& job, const Host& host)
    : local_world_size_(job.local_world_size), binds_(job.settings.on("enable_cpu_affinity")) {
  if (!binds_) return;
  topology_ = Topology::current();
  gpus_ = visible_gpus(job, host);
}

std::vector<int> CoreBinding::of(int64_t local_rank) const {
  return binds_ ? cores_of(topology_, gpus_, local_rank, local_world_size_) : std::vector<int>();
}

}  // namespace accelerate::launcher
