#include "parallel/drift.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "residency/homes/encoded.hpp"
#include "utils/counts.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// By words of 8 bytes, which are added 400 times faster than those of 4 bytes into 8.
int64_t sum_of_bits(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  // From a storage's begin: elsewhere words may not be where 8 bytes begin.
  const at::Tensor whole =
      real.is_contiguous() && real.storage_offset() == 0 ? real : real.clone(at::MemoryFormat::Contiguous);
  const at::Tensor bytes = whole.view({-1}).view(at::kByte);
  constexpr int64_t kWord = sizeof(int64_t);
  const int64_t words = bytes.numel() / kWord * kWord;
  const int64_t rest = bytes.narrow(0, words, bytes.numel() - words).sum(at::kLong).item<int64_t>();
  return bytes.narrow(0, 0, words).view(at::kLong).sum().item<int64_t>() ^ rest;
}

/// How far values are from the first rank's on each rank of the group, as a part of the largest. Of any dtype: bytes
/// and bits have no abs(). What is NaN on both is equal, of whatever bits.
std::vector<double> distances(comm::Group& group, const at::Tensor& values) {
  const at::Tensor mine = values.to(values.is_complex() ? at::kComplexFloat : at::kFloat);
  const at::Tensor first = group.broadcast(mine.clone(), 0);
  const at::Tensor equal = (mine == first).logical_or_(at::isnan(mine).logical_and_(at::isnan(first)));
  const double largest = at::nan_to_num(first.abs(), 0.0, 0.0).max().item<double>();
  const double off = (mine - first).abs().masked_fill_(equal, 0).max().item<double>();
  const at::Tensor all = group.all_gather(
      at::full({1}, off <= 0 ? 0.0 : off / largest, at::TensorOptions().dtype(at::kFloat).device(group.device())));
  const at::Tensor here = all.cpu().to(at::kDouble);
  return {here.const_data_ptr<double>(), here.const_data_ptr<double>() + here.numel()};
}

}  // namespace

DriftCheck::DriftCheck(std::shared_ptr<comm::Group> group, int64_t every) : group_(std::move(group)), every_(every) {
  if (every < 0)
    raise<ConfigError>(
        "DistributedDataParallelKwargs: compare_parameters_every is {}, expected a number of backwards, or 0 for never",
        every);
}

void DriftCheck::after_average(const std::function<NamedTensors()>& parameters) {
  if (!group_ || group_->dry() || every_ == 0) return;
  // What lets ranks drift apart often does so from the start, and many programs are short: early looks, rarer and
  // rarer.
  const int64_t now = ++averages_;
  if (now % every_ != 0 && (now > 256 || (now & (now - 1)) != 0)) return;
  comm::world_group()->guard("backward", [&] {
    for (const auto& found : comm::all_gather_bytes(difference(parameters())))
      if (!found.empty()) throw ConfigError(found);
  });
  counts::add(counts::Count::parameter_comparisons);
}

std::string DriftCheck::difference(const NamedTensors& parameters) const {
  constexpr double kRounding = 1e-3;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> mine;
  for (const auto& [name, tensor] : parameters)
    mine.push_back(residency::encoded_weight(tensor) || tensor.numel() == 0 ? 0 : sum_of_bits(tensor.detach()));
  std::vector<std::vector<int64_t>> all;
  for (const auto& bytes : comm::all_gather_bytes(*group_, to_bytes(mine)))
    all.push_back(from_bytes<std::vector<int64_t>>(bytes));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    if (std::all_of(all.begin(), all.end(), [&, i](const auto& sums) { return sums.at(i) == all[0].at(i); })) continue;
    const auto far = distances(*group_, tensor.detach());
    for (size_t rank = 0; rank < far.size(); ++rank)
      if (!(far[rank] <= kRounding))
        return fmt::format(
            "backward: after {} of them parameter '{}' has other values on rank {} than on rank {} (up to {:.2g} of "
            "the largest away), expected the same on all ranks, which average gradients only: something writes it on "
            "each rank by itself (an embedding's max_norm, a codebook, spectral norm by hand, any write in forward, an "
            "optimizer with settings of its own). Write it from what all ranks have (accelerator.reduce(...)), or on "
            "one rank and broadcast it",
            averages_, name, group_->global_ranks()[rank], group_->global_ranks()[0], far[rank]);
  }
  return {};
}

}  // namespace accelerate::parallel
