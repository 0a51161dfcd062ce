#include "comm/group.hpp"
#include "comm/shared_all_reduce.hpp"
#include "parallel/averaging/counts.hpp"
#include "parallel/gradient_hook.hpp"

namespace accelerate::parallel {
namespace {

/// All-reduces buckets, divided by the number of ranks, sent as fp16 or bf16 when asked for.
class WireHook final : public GradientHook {
 public:
  WireHook(std::shared_ptr<comm::Group> group, at::ScalarType wire)
      : group_(std::move(group)), shared_(group_), wire_(wire) {}

  GradientHookFuture run(GradientBucket& bucket) override {
    at::Tensor buffer = bucket.buffer;
    const bool compress = wire_ != at::ScalarType::Undefined && buffer.scalar_type() != wire_;
    if (compress)
      counts::add(AveragingCount::bytes_saved,
                  buffer.numel() * static_cast<int64_t>(buffer.element_size() - c10::elementSize(wire_)));
    if (buffer.is_cpu()) {
      at::Tensor averaged = compress ? buffer.to(wire_) : buffer;
      if (shared_.average_(bucket.index, averaged, static_cast<double>(group_->world_size()))) {
        if (compress) buffer.copy_(averaged);
        return completed(buffer);
      }
    }
    // Dividing first keeps fp16 sums in range.
    at::Tensor sent = buffer.div_(group_->world_size());
    if (compress) sent = sent.to(wire_);
    auto future = group_->all_reduce_async(sent);
    if (!compress) return future;
    return future->then(
        [buffer](c10::ivalue::Future& done) {
          buffer.copy_(tensor_of(done.value()));
          return c10::IValue(std::vector<at::Tensor>{buffer});
        },
        c10::ListType::ofTensors());
  }

 private:
  std::shared_ptr<comm::Group> group_;
  comm::SharedAllReduce shared_;
  at::ScalarType wire_;
};

}  // namespace

std::shared_ptr<GradientHook> wire_hook(std::shared_ptr<comm::Group> group, at::ScalarType wire) {
  return std::make_shared<WireHook>(std::move(group), wire);
}

}  // namespace accelerate::parallel
