#include "parallel/sharding/frozen_codes.hpp"

#include <ATen/ops/empty.h>

#include <string>
#include <utility>
#include <vector>

#include "parallel/sharding/counts.hpp"

namespace accelerate::parallel {
namespace {

std::string text_of_absent(const std::string& name) {
  return name +
         " is kept as 8-bit codes (zero_quantized_nontrainable_weights): its bytes were asked for outside of an "
         "operator; clone() it first";
}

}  // namespace

FrozenCodes::FrozenCodes() : masters_({.prefetch = 0, .evict_after_use = true}) {}

void FrozenCodes::allocate(ShardedPart& part, int64_t numel, const at::Device& device) {
  auto& values = values_[part.index];
  values = std::make_shared<residency::CodedValues>(numel, part.master_dtype, device);
  part.codes = values->codes();
  part.master = at::empty({numel}, at::TensorOptions().dtype(part.master_dtype).device(device));
  const std::string name = "this rank's shard of '" + part.members.front().name + "' and what lies beside it";
  std::vector<residency::PartSpec> specs(1);
  specs[0] = {.members = {{name, part.master}},
              .layout = {.offsets = {0}, .numel = numel},
              .dtype = part.master_dtype,
              .device = device,
              .home = residency::coded_home(values),
              .absent = text_of_absent};
  masters_.add(name, std::move(specs));
  counts::add(ShardingCount::parts_coded);
}

std::unique_ptr<residency::Home> FrozenCodes::home(const ShardedPart& part) const {
  return residency::coded_home(values_.at(part.index));
}

}  // namespace accelerate::parallel
