#pragma once

/// Communication hooks of your own: what becomes of a bucket of gradients on its way to the other ranks.
///
///     parallel::CommunicationHook hook = [](parallel::GradientBucket& bucket, parallel::HookGroup& group) {
///       return group.all_reduce(bucket.buffer.div(group.world_size()));
///     };
///     Accelerator accelerator({.kwargs_handlers = {DistributedDataParallelKwargs{.communication_hook = hook}}});
///
/// It runs during backward, in the thread that computes it, bucket by bucket in an order that is the same on all ranks;
/// so are its collectives, as long as what it calls depends on the bucket and on the step only. Reference: the
/// communication hooks of PyTorch's DistributedDataParallel.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"

namespace accelerate::comm {
class Group;
}  // namespace accelerate::comm

namespace accelerate::parallel {

/// Gradients that travel together.
struct GradientBucket {
  size_t index = 0;   ///< of this step's buckets, which come in the order of their indices
  bool last = false;  ///< of this step
  /// [n], this rank's gradients one after the other. The hook may write into it.
  at::Tensor buffer;
  std::vector<at::Tensor> gradients;   ///< views of `buffer`, with the parameters' sizes
  std::vector<at::Tensor> parameters;  ///< the parameters of these gradients
};

/// A tensor that is there, or will be.
class ACCELERATE_API GradientFuture {
 public:
  /// It is there.
  GradientFuture(at::Tensor tensor);  // NOLINT(google-explicit-constructor)
  /// Its value is a tensor, or a list of one.
  GradientFuture(c10::intrusive_ptr<c10::ivalue::Future> future);  // NOLINT(google-explicit-constructor)
  /// The result of `next` on it, which is called when it is there, possibly by another thread, and must not call
  /// collectives: ranks might do these in different orders.
  GradientFuture then(std::function<at::Tensor(const at::Tensor&)> next) const;

  const c10::intrusive_ptr<c10::ivalue::Future>& future() const { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// The ranks that average gradients. Collectives return at once; their tensors stay untouched until the future is
/// complete. A peer's failure ends each of them with a CommError.
class ACCELERATE_API HookGroup {
 public:
  explicit HookGroup(std::shared_ptr<comm::Group> group);
  int64_t rank() const;
  int64_t world_size() const;
  /// The sum over ranks, in place. `tensor`: contiguous, on the device of the gradients.
  GradientFuture all_reduce(const at::Tensor& tensor);
  /// [n] -> [P*n], the ranks' tensors one after the other; 1-D.
  GradientFuture all_gather(const at::Tensor& tensor);
  /// Blocks until it is there. @throws CommError.
  at::Tensor wait(const GradientFuture& future);

 private:
  std::shared_ptr<comm::Group> group_;
};

/// Sends gradients as E4M3 codes, a byte each, with a scale for each rank's gradient of each parameter, and averages
/// what they decode to in fp32; all ranks get the same. A rank receives (P - 1) bytes an element, against about 8 of
/// fp32 (7 at P = 8): for larger groups bf16 is less. MSAMPRecipeKwargs takes it.
ACCELERATE_API CommunicationHook fp8_gradients();

}  // namespace accelerate::parallel
