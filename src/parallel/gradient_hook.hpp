#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>

#include "accelerate/parallel/communication_hook.hpp"
#include "accelerate/utils/kwargs.hpp"

namespace c10d {
class CommHookInterface;
}

namespace accelerate::parallel {

using GradientHookFuture = c10::intrusive_ptr<c10::ivalue::Future>;

/// How buckets of gradients are averaged over ranks, through our Group, so that a peer's failure ends the wait.
class GradientHook {
 public:
  virtual ~GradientHook() = default;
  /// Called for each bucket of a backward, in the order of their indices. The future is complete when the last bucket's
  /// is; its value is a tensor of as many elements as the bucket's buffer, or a list of that one.
  virtual GradientHookFuture run(GradientBucket& bucket) = 0;
  /// The state that this rank needs to go on as if nothing had been; None: nothing.
  virtual c10::IValue state() const { return {}; }
  /// Looks whether the state fits, and returns what takes it up. @throws CheckpointError.
  virtual std::function<void()> stage(const c10::IValue& state);
};

/// The hook that the settings ask for. @param group  over which gradients are averaged
std::shared_ptr<GradientHook> make_gradient_hook(const DistributedDataParallelKwargs& kwargs,
                                                 std::shared_ptr<comm::Group> group);
/// The hook as c10d's Reducer takes it.
std::unique_ptr<c10d::CommHookInterface> reducer_hook(std::shared_ptr<GradientHook> hook,
                                                      const DistributedDataParallelKwargs& kwargs);
/// Nanoseconds since the last bucket of a backward was on its way, after which the Reducer only waits; 0 when there was
/// none on the host since the last call. Any thread.
int64_t take_wait_since_last_bucket();
/// Before anything is joined. @throws ConfigError.
void check_hook_settings(const DistributedDataParallelKwargs& kwargs);
/// "power_sgd"
const char* name_of(DDPCommunicationHookType type);

/// Averages buckets as they are, or as `wire`.
std::shared_ptr<GradientHook> wire_hook(std::shared_ptr<comm::Group> group, at::ScalarType wire);
std::shared_ptr<GradientHook> power_sgd_hook(std::shared_ptr<comm::Group> group, const PowerSGDOptions& options,
                                             bool batched);

/// A future of gradients that is complete.
GradientHookFuture completed(const at::Tensor& gradients);
/// The tensor in a bucket's future.
at::Tensor tensor_of(const c10::IValue& value);

}  // namespace accelerate::parallel
