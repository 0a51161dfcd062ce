#include "parallel/fsdp/shard_store.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "comm/group.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/shard.hpp"
#include "utils/counts.hpp"
#include "utils/meta_memory.hpp"

namespace accelerate::parallel {
namespace {

ReducerOptions reducer_options(const FullyShardedDataParallelPlugin& plugin) {
  const MixedPrecision precision = plugin.mixed_precision_policy.value_or(MixedPrecision{});
  return {.reduce_dtype = precision.reduce_dtype, .keep_low_precision = precision.keep_low_precision_grads};
}

/// Each rank holds its shards itself.
class GatheredStore final : public ShardStore {
 public:
  GatheredStore(std::vector<ShardedPart>& parts, const Mesh& mesh, const at::Device& device,
                const FullyShardedDataParallelPlugin& plugin)
      : parts_(parts),
        mesh_(mesh),
        device_(device),
        offload_(plugin.cpu_offload.value_or(CPUOffload())),
        options_(reducer_options(plugin)) {}

  void allocate(ShardedPart& part) override {
    const meta_memory::Purpose shards(MemoryUse::parameters);
    const bool on_host = !device_.is_meta() && (offload_.offload_params || device_.is_cpu());
    part.master =
        at::zeros({part.numel() / mesh_.ranks()},
                  at::TensorOptions().dtype(part.master_dtype).device(on_host ? at::Device(at::kCPU) : device_));
    if (!on_host || device_.is_cpu()) return;
    counts::add(counts::Count::parts_offloaded);
    if (offload_.pin_memory) {
      part.master = part.master.pin_memory();
      counts::add(counts::Count::parts_pinned);
    }
  }
  std::unique_ptr<residency::Home> home(ShardedPart& part, const std::string& name) override {
    return residency::shard_home(part.master, mesh_.shard, mesh_.near, name);
  }
  std::unique_ptr<GradientReducer> make_reducer() override { return collective_reducer(parts_, mesh_, options_); }

 private:
  std::vector<ShardedPart>& parts_;
  Mesh mesh_;
  at::Device device_;
  CPUOffload offload_;
  ReducerOptions options_;
};

/// One process, or a whole model on each rank: the flat storage is the only shard.
class LocalStore final : public ShardStore {
 public:
  LocalStore(std::vector<ShardedPart>& parts, const Mesh& mesh, const at::Device& device,
             const FullyShardedDataParallelPlugin& plugin)
      : parts_(parts),
        mesh_(mesh),
        device_(device),
        offload_(plugin.cpu_offload.value_or(CPUOffload())),
        options_(reducer_options(plugin)) {
    if (offloads()) worker_ = std::make_shared<residency::Worker>();
  }

  void allocate(ShardedPart& part) override {
    const meta_memory::Purpose shards(MemoryUse::parameters);
    part.master =
        at::zeros({part.numel()},
                  at::TensorOptions().dtype(part.master_dtype).device(offloads() ? at::Device(at::kCPU) : device_));
    if (offloads()) {
      counts::add(counts::Count::parts_offloaded);
      if (offload_.pin_memory) {
        part.master = part.master.pin_memory();
        counts::add(counts::Count::parts_pinned);
      }
      return;
    }
    computed_.resize(parts_.size());
    computed_[part.index] =
        part.compute_dtype == part.master_dtype
            ? part.master
            : at::empty({part.numel()}, at::TensorOptions().dtype(part.compute_dtype).device(device_));
  }
  std::unique_ptr<residency::Home> home(ShardedPart& part, const std::string&) override {
    return offloads() ? residency::host_home(part.master, worker_) : residency::memory_home(computed_[part.index]);
  }
  std::unique_ptr<GradientReducer> make_reducer() override {
    return mesh_.replicate ? collective_reducer(parts_, mesh_, options_) : local_reducer(parts_, options_);
  }
  void publish() override {
    at::NoGradGuard no_grad;
    if (offloads()) return;
    for (const auto& part : parts_)
      if (auto& computed = computed_[part.index]; !computed.is_same(part.master)) computed.copy_(part.master);
  }

 private:
  bool offloads() const { return offload_.offload_params && !device_.is_cpu() && !device_.is_meta(); }

  std::vector<ShardedPart>& parts_;
  Mesh mesh_;
  at::Device device_;
  CPUOffload offload_;
  ReducerOptions options_;
  std::shared_ptr<residency::Worker> worker_;
  std::vector<at::Tensor> computed_;  ///< per part: master itself, or its image in the compute dtype
};

}  // namespace

std::unique_ptr<ShardStore> make_shard_store(std::vector<ShardedPart>& parts, const Mesh& mesh,
                                             const at::Device& device, const FullyShardedDataParallelPlugin& plugin) {
  if (mesh.ranks() == 1) return std::make_unique<LocalStore>(parts, mesh, device, plugin);
  if (device.is_cpu())
    if (auto store = shared_memory_store(parts, mesh, reducer_options(plugin))) return store;
  return std::make_unique<GatheredStore>(parts, mesh, device, plugin);
}

}  // namespace accelerate::parallel
