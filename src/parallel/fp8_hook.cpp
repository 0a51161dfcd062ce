#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "accelerate/codes/float8.hpp"
#include "accelerate/parallel/communication_hook.hpp"
#include "parallel/averaging/counts.hpp"

namespace accelerate::parallel {
namespace {

using codes::Float8;

/// A parameter's gradient in a bucket.
struct BucketSlice {
  int64_t begin, length;
};

std::vector<BucketSlice> slices_of(const GradientBucket& bucket) {
  std::vector<BucketSlice> all;
  for (const auto& gradient : bucket.gradients)
    all.push_back({gradient.storage_offset() - bucket.buffer.storage_offset(), gradient.numel()});
  return all;
}

/// The message of one rank: a code for each element, and behind them a scale for each slice.
struct CodesMessage {
  static constexpr int64_t kScale = sizeof(float);
  int64_t elements, slices;

  int64_t scales_at() const { return (elements + kScale - 1) / kScale * kScale; }
  int64_t bytes() const { return scales_at() + slices * kScale; }
  at::Tensor codes_in(const at::Tensor& bytes) const {
    return bytes.narrow(0, 0, elements).view(codes::scalar_type(Float8::e4m3));
  }
  at::Tensor scales_in(const at::Tensor& bytes) const {
    return bytes.narrow(0, scales_at(), slices * kScale).view(at::kFloat);
  }
};

GradientFuture average_as_fp8(const GradientBucket& bucket, HookGroup& group) {
  const at::NoGradGuard no_grad;
  const at::Tensor buffer = bucket.buffer;
  const auto slices = slices_of(bucket);
  const CodesMessage message{buffer.numel(), static_cast<int64_t>(slices.size())};
  const int64_t world = group.world_size();
  at::Tensor sent = at::zeros({message.bytes()}, buffer.options().dtype(at::kByte));
  for (size_t i = 0; i < slices.size(); ++i) {
    const at::Tensor values = buffer.narrow(0, slices[i].begin, slices[i].length);
    const at::Tensor scale = codes::scale_of(codes::amax(values), Float8::e4m3);
    message.scales_in(sent)[static_cast<int64_t>(i)].copy_(scale.reshape({}));
    message.codes_in(sent)
        .narrow(0, slices[i].begin, slices[i].length)
        .copy_(codes::encode(values, scale, Float8::e4m3));
  }
  counts::add(AveragingCount::bytes_saved, buffer.numel() * (static_cast<int64_t>(buffer.element_size()) - 1));
  return group.all_gather(sent).then([=](const at::Tensor& all) {
    const at::NoGradGuard off;
    for (size_t i = 0; i < slices.size(); ++i) {
      const auto [begin, length] = slices[i];
      at::Tensor sum = at::zeros({length}, buffer.options().dtype(at::kFloat));
      for (int64_t rank = 0; rank < world; ++rank) {  // in one order, so that all ranks get the same bits
        const at::Tensor bytes = all.narrow(0, rank * message.bytes(), message.bytes());
        sum.add_(codes::decode(message.codes_in(bytes).narrow(0, begin, length),
                               message.scales_in(bytes)[static_cast<int64_t>(i)], at::kFloat));
      }
      buffer.narrow(0, begin, length).copy_(sum.div_(static_cast<double>(world)));
    }
    return buffer;
  });
}

}  // namespace

CommunicationHook fp8_gradients() {
  return [](GradientBucket& bucket, HookGroup& group) { return average_as_fp8(bucket, group); };
}

}  // namespace accelerate::parallel
