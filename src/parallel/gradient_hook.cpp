#include "parallel/gradient_hook.hpp"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include "comm/group.hpp"
#include "comm/shared_all_reduce.hpp"
#include "utils/counts.hpp"

namespace accelerate::parallel {
namespace {

class GradientHook : public c10d::CommHookInterface {
 public:
  GradientHook(std::shared_ptr<comm::Group> group, at::ScalarType wire)
      : group_(std::move(group)), shared_(group_), wire_(wire) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    at::Tensor buffer = bucket.getBufferRef();
    const bool compress = wire_ != at::ScalarType::Undefined && buffer.scalar_type() != wire_;
    count(bucket, compress);
    if (buffer.is_cpu()) {
      at::Tensor averaged = compress ? buffer.to(wire_) : buffer;
      if (shared_.average_(bucket.getIndex(), averaged, static_cast<double>(group_->world_size()))) {
        if (compress) buffer.copy_(averaged);
        auto done = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
        done->markCompleted(c10::IValue(std::vector<at::Tensor>{buffer}));
        return done;
      }
    }
    // Dividing first keeps fp16 sums in range.
    at::Tensor sent = buffer.div_(group_->world_size());
    if (compress) sent = sent.to(wire_);
    auto future = group_->all_reduce_async(sent);
    if (!compress) return future;
    return future->then(
        [buffer](c10::ivalue::Future& done) {
          buffer.copy_(done.value().toTensorVector().at(0));
          return c10::IValue(std::vector<at::Tensor>{buffer});
        },
        c10::ListType::ofTensors());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  void count(const c10d::GradBucket& bucket, bool compress) const {
    using counts::Count;
    const at::Tensor& buffer = bucket.getBuffer();
    const auto bytes = static_cast<int64_t>(buffer.nbytes());
    counts::add(Count::gradient_buckets);
    counts::add(Count::gradient_bytes, bytes);
    counts::most(Count::bucket_bytes_most, bytes);
    if (compress)
      counts::add(Count::bytes_saved, bytes - buffer.numel() * static_cast<int64_t>(c10::elementSize(wire_)));
    for (const at::Tensor& parameter : bucket.getParameters())
      if (parameter.grad().defined() && parameter.grad().is_alias_of(buffer)) counts::add(Count::gradients_in_buckets);
  }

  std::shared_ptr<comm::Group> group_;
  comm::SharedAllReduce shared_;
  at::ScalarType wire_;
};

}  // namespace

std::unique_ptr<c10d::CommHookInterface> make_gradient_hook(DDPCommunicationHookType type) {
  const auto wire = type == DDPCommunicationHookType::fp16   ? at::kHalf
                    : type == DDPCommunicationHookType::bf16 ? at::kBFloat16
                                                             : at::ScalarType::Undefined;
  return std::make_unique<GradientHook>(comm::world_group(), wire);
}

}  // namespace accelerate::parallel
