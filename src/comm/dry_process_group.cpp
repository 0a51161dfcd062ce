#include "comm/dry_process_group.hpp"

#include <ATen/ATen.h>

namespace accelerate::comm {
namespace {

/// Complete from the start.
class Done final : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> results)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {
    future_->markCompleted(c10::IValue(std::move(results)));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> results) {
  return c10::make_intrusive<Done>(std::move(results));
}

}  // namespace

void TrafficCounter::add(Traffic::Kind kind, int64_t volume, int64_t sent, bool payload) {
  const MutexLock lock(mutex_);
  if (!payload) {
    total_.control += sent;
    return;
  }
  ++total_.messages;
  total_.sent += sent;
  switch (kind) {
    case Traffic::Kind::all_gather:
      total_.all_gather += volume;
      break;
    case Traffic::Kind::reduce_scatter:
      total_.reduce_scatter += volume;
      break;
    case Traffic::Kind::all_reduce:
      total_.all_reduce += volume;
      break;
    case Traffic::Kind::broadcast:
      total_.broadcast += volume;
      break;
  }
}

Traffic TrafficCounter::total() const {
  const MutexLock lock(mutex_);
  return total_;
}

DryProcessGroup::DryProcessGroup(int64_t rank, int64_t world_size, std::shared_ptr<TrafficCounter> traffic)
    : c10d::ProcessGroup(static_cast<int>(rank), static_cast<int>(world_size)), traffic_(std::move(traffic)) {}

void DryProcessGroup::count(Traffic::Kind kind, const at::Tensor& message, int64_t passes) {
  const int64_t volume = passes * static_cast<int64_t>(message.nbytes()), others = size_ - 1;
  const int64_t sent =
      kind == Traffic::Kind::broadcast ? volume : volume / size_ * others + volume % size_ * others / size_;
  traffic_->add(kind, volume, sent, message.is_meta());
}

c10::intrusive_ptr<c10d::Work> DryProcessGroup::broadcast(std::vector<at::Tensor>& tensors,
                                                          const c10d::BroadcastOptions&) {
  for (const auto& tensor : tensors) count(Traffic::Kind::broadcast, tensor, 1);
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> DryProcessGroup::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& options) {
  for (auto& tensor : tensors) {
    count(Traffic::Kind::all_reduce, tensor, 2);
    if (!tensor.is_meta() && options.reduceOp == c10d::ReduceOp::SUM) tensor.mul_(size_);
  }
  return done(tensors);
}

c10::intrusive_ptr<c10d::Work> DryProcessGroup::all_gather(at::Tensor& output, const at::Tensor& input) {
  count(Traffic::Kind::all_gather, output, 1);
  if (!output.is_meta()) output.view({size_, -1}).copy_(input.view({1, -1}));
  return done({output});
}

c10::intrusive_ptr<c10d::Work> DryProcessGroup::reduce_scatter_of(at::Tensor& output, const at::Tensor& input) {
  count(Traffic::Kind::reduce_scatter, input, 1);
  if (!output.is_meta()) output.copy_(input.view({size_, -1})[rank_]).mul_(size_);
  return done({output});
}

/// Counts as the reduce-scatter that it brings about, in steps.
c10::intrusive_ptr<c10d::Work> DryProcessGroup::all_to_all(at::Tensor& output, const at::Tensor& input) {
  count(Traffic::Kind::reduce_scatter, input, 1);
  if (!output.is_meta()) output.view({size_, -1}).copy_(input.view({size_, -1})[rank_]);
  return done({output});
}

}  // namespace accelerate::comm
