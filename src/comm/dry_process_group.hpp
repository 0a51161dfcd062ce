#pragma once

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/comm/traffic.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::comm {

/// Counts the bytes that one rank hands to collectives. All groups of a dry run share it.
class TrafficCounter {
 public:
  void add(Traffic::Kind kind, int64_t volume, int64_t sent, bool payload);
  Traffic total() const;

 private:
  mutable Mutex mutex_;
  Traffic total_ ACCELERATE_GUARDED_BY(mutex_);
};

/// A process group of one process that claims to be rank r of n. Its collectives are complete at once. Tensors on the
/// meta device are counted and left alone; those on the host, in which ranks tell each other a few numbers about
/// themselves, get the values that they would get if all peers were in this rank's state.
class DryProcessGroup final : public c10d::ProcessGroup {
 public:
  DryProcessGroup(int64_t rank, int64_t world_size, std::shared_ptr<TrafficCounter> traffic);

  const std::string getBackendName() const override { return "dry"; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  // LibTorch 2.13 renamed these.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
  c10::intrusive_ptr<c10d::Work> all_gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::AllgatherOptions&) override {
    return all_gather(output, input);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions&) override {
    return reduce_scatter_of(output, input);
  }
  c10::intrusive_ptr<c10d::Work> all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                                                   std::vector<int64_t>&, const c10d::AllToAllOptions&) override {
    return all_to_all(output, input);
  }
#else
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    return all_gather(output, input);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions&) override {
    return reduce_scatter_of(output, input);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                                               std::vector<int64_t>&, const c10d::AllToAllOptions&) override {
    return all_to_all(output, input);
  }
#endif

 private:
  c10::intrusive_ptr<c10d::Work> all_gather(at::Tensor& output, const at::Tensor& input);
  c10::intrusive_ptr<c10d::Work> reduce_scatter_of(at::Tensor& output, const at::Tensor& input);
  c10::intrusive_ptr<c10d::Work> all_to_all(at::Tensor& output, const at::Tensor& input);
  /// @param message  the whole one, of which a ring moves (n - 1) / n `passes` times through each rank
  void count(Traffic::Kind kind, const at::Tensor& message, int64_t passes);

  std::shared_ptr<TrafficCounter> traffic_;
};

}  // namespace accelerate::comm
