#include "parallel/sharding/quantized_reduction.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/group.hpp"
#include "memory/meta_memory.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/gradient_reducer.hpp"

namespace accelerate::parallel {

QuantizedReduction::QuantizedReduction(const std::vector<ShardedPart>& parts, const ShardGroups& groups)
    : parts_(parts), groups_(groups), wire_(residency::int4_wire()), running_(parts.size()) {
  for (const auto& part : parts)
    if (part.int4 && part.trainable) counts::add(ShardingCount::parts_as_int4);
}

void QuantizedReduction::start(size_t part, const at::Tensor& flat) {
  running_[part].dtype = flat.scalar_type();
  at::Tensor message = wire_->encode(flat, 0);  // slice by slice, in the order of ranks
  if (groups_.machine)                          // each neighbour gets what is for its place on each machine
    message = message.view({groups_.across->world_size(), groups_.machine->world_size(), -1}).transpose(0, 1).flatten();
  count_reduced(flat.numel(), 0);
  exchange(running_[part], groups_.machine ? *groups_.machine : *groups_.shard, std::move(message));
}

void QuantizedReduction::pass_on(size_t part) {
  Running& running = running_[part];
  const int64_t length = parts_[part].numel() / groups_.ranks();
  if (!groups_.machine) {
    receive(running, *groups_.shard, length);
    running.mean = running.mean.to(running.dtype);
    return;
  }
  receive(running, *groups_.machine, groups_.across->world_size() * length);
  exchange(running, *groups_.across, wire_->encode(std::exchange(running.mean, at::Tensor()), 0));
}

at::Tensor QuantizedReduction::take_result(size_t part) {
  Running running = std::exchange(running_[part], {});
  if (groups_.across) receive(running, *groups_.across, parts_[part].numel() / groups_.ranks());
  const meta_memory::Purpose shard(MemoryUse::gradients);
  return running.mean.to(running.dtype);
}

void QuantizedReduction::exchange(Running& running, comm::Group& group, at::Tensor message) {
  const meta_memory::Purpose on_the_way(MemoryUse::staging);
  counts::add(ShardingCount::gradient_wire_bytes, static_cast<int64_t>(message.nbytes()));
  running.sent = std::move(message);
  running.came = at::empty_like(running.sent);
  running.arrived = group.all_to_all_async(running.came, running.sent);
}

/// Waits, and averages what has come of so many elements.
void QuantizedReduction::receive(Running& running, comm::Group& group, int64_t numel) {
  group.wait("backward", *std::exchange(running.arrived, nullptr));
  running.sent.reset();
  const at::Tensor messages = std::exchange(running.came, at::Tensor()).view({group.world_size(), -1});
  const auto options = at::TensorOptions().dtype(at::kFloat).device(messages.device());
  running.mean = at::zeros({numel}, options);
  const at::Tensor one = at::empty({numel}, options);
  for (int64_t from = 0; from < messages.size(0); ++from) {
    wire_->decode(messages.select(0, from), 0, one);
    running.mean.add_(one);
  }
  running.mean.div_(static_cast<double>(messages.size(0)));
}

}  // namespace accelerate::parallel
