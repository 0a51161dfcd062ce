#include "residency/unit.hpp"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/safe_numerics.h>

#include <numeric>

#include "accelerate/utils/error.hpp"

namespace accelerate::residency {
namespace {

constexpr int64_t kAlignment = 16, kDeviceAlignment = 128;  ///< elements

int64_t round_up(int64_t value, int64_t multiple) {
  int64_t sum = 0;
  if (__builtin_add_overflow(value, multiple - 1, &sum))
    throw ShapeError("residency: a unit would have more elements than 64 bits can count");
  return sum / multiple * multiple;
}

}  // namespace

Layout lay_out(const std::vector<at::Tensor>& tensors, int64_t shards, const at::Device& device, int64_t block) {
  const int64_t alignment = std::lcm(at::isAccelerator(device.type()) ? kDeviceAlignment : kAlignment, block);
  Layout layout;
  for (const auto& tensor : tensors) {
    layout.offsets.push_back(layout.numel);
    if (__builtin_add_overflow(layout.numel, tensor.numel(), &layout.numel))
      throw ShapeError("residency: a unit would have more elements than 64 bits can count");
    layout.numel = round_up(layout.numel, alignment);
  }
  layout.numel = round_up(layout.numel, alignment * shards);
  return layout;
}

int64_t Unit::bytes() const {
  int64_t sum = 0;
  for (const auto& part : parts_) sum += part.bytes();
  return sum;
}

}  // namespace accelerate::residency
