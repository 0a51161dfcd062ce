#include "parallel/sharding/replicas.hpp"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/group.hpp"
#include "comm/shared_memory.hpp"
#include "parallel/sharding/counts.hpp"

namespace accelerate::parallel {

Replicas::Replicas(const std::vector<ShardedPart>& parts, std::shared_ptr<comm::Group> group, double before)
    : parts_(parts), group_(std::move(group)), before_(before), gradients_(parts.size()), exchange_(parts.size()) {
  if (comm::SharedMemory::create(group_, 1)) shared_ = std::make_unique<comm::SharedAllReduce>(group_);
  for (size_t p = parts.size(); p-- > 0;)
    if (parts[p].trainable) order_.push_back(p);
}

void Replicas::add(size_t part, at::Tensor gradient) {
  gradients_[part] = std::move(gradient);
  counts::add(ShardingCount::replica_gradients);
  // Adding up in shared memory blocks: not while other ranks of the shard group may wait for this one.
  if (!shared_) advance();
}

void Replicas::advance() {
  for (; next_ < order_.size(); ++next_) {
    at::Tensor& gradient = gradients_[order_[next_]];
    if (!parts_[order_[next_]].trained) continue;
    if (!gradient.defined()) return;
    const auto world = static_cast<double>(group_->world_size());
    if (before_ != 1) gradient.div_(before_);
    if (shared_) {
      const size_t p = order_[next_];
      at::Tensor& exchanged = exchange_[p];
      if (!exchanged.defined()) exchanged = at::empty_like(gradient);
      exchanged.copy_(gradient);
      if (shared_->average_(p, exchanged, world / before_)) {
        gradient.copy_(exchanged);
        continue;
      }
    }
    if (before_ == 1) gradient.div_(world);  // before the sum, which half precision might not hold
    running_.push_back(group_->all_reduce_async(gradient));
    summed_.push_back(gradient);
  }
}

void Replicas::finish(std::vector<std::vector<char>>& used) {
  advance();
  for (const auto& future : std::exchange(running_, {})) group_->wait("backward", *future);
  const double rest = before_ == 1 ? 1 : static_cast<double>(group_->world_size()) / before_;
  for (at::Tensor& sum : std::exchange(summed_, {}))
    if (rest != 1) sum.div_(rest);
  int64_t members = 0;
  std::vector<size_t> trained;
  for (const size_t p : order_)
    if (parts_[p].trained) trained.push_back(p), members += static_cast<int64_t>(used[p].size());
  at::Tensor flags = at::zeros({members}, at::kInt);
  auto* flag = flags.mutable_data_ptr<int32_t>();
  for (const size_t p : trained)
    for (const char one : used[p]) *flag++ = one != 0;
  flags = flags.to(group_->device());
  group_->all_reduce_(flags, Reduction::max);
  flags = flags.cpu();
  const auto* common = flags.const_data_ptr<int32_t>();
  for (const size_t p : trained)
    for (char& one : used[p]) one = static_cast<char>(*common++ != 0);
  for (auto& gradient : gradients_) gradient.reset();
  next_ = 0;
}

}  // namespace accelerate::parallel
