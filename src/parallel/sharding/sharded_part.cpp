#include "parallel/sharding/sharded_part.hpp"

#include <algorithm>

#include "optim/widen_gradient.hpp"

namespace accelerate::parallel {

NamedTensors ShardedPart::named_tensors() const {
  NamedTensors tensors;
  for (const auto& member : members) tensors.emplace_back(member.name, member.tensor);
  return tensors;
}

void ShardedPart::cut(int64_t rank, int64_t world) {
  const int64_t length = layout.numel / world, first = rank * length, last = first + length;
  for (auto& member : members) {
    const int64_t end = member.offset + member.tensor.numel();
    const int64_t from = std::clamp(member.offset, first, last), to = std::clamp(end, first, last);
    member.at = from - first;
    member.begin = from - member.offset;
    member.shard = master.narrow(0, member.at, to - from).detach();
    if (member.tensor.requires_grad()) member.shard.requires_grad_();
  }
}

void add_to_gradient(const at::Tensor& parameter, const at::Tensor& term, bool widens) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) {
    gradient = term;
    return;
  }
  if (widens) optim::widen_gradient(parameter);
  gradient.add_(term);
}

void ShardedPart::add_to_gradients(const at::Tensor& slice, const std::vector<char>& used, bool widens) {
  for (auto& member : members) {
    if (!used[member.index]) continue;
    // Not a view for autograd: LibTorch's zero_grad() detaches gradients in place.
    const at::Tensor mine = member.piece_in(slice).variable_data();
    add_to_gradient(member.shard, mine, widens);
  }
}

void FlatGradient::begin(const ShardedPart& part, at::Tensor flat) {
  flat_ = std::move(flat);
  came_.assign(part.members.size(), 0);
  members_ = part.members.size();
  taken_ = 0;
}

bool FlatGradient::take(const ShardedMember& member, const at::Tensor& gradient) {
  member.view_in(flat_).copy_(gradient);
  came_[member.index] = 1;
  ++taken_;
  return complete();
}

void FlatGradient::fill(const ShardedPart& part) {
  for (const auto& member : part.members)
    if (!came_[member.index]) member.view_in(flat_).zero_();
  taken_ = members_;
}

}  // namespace accelerate::parallel
