#include "parallel/drift.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "parallel/averaging/counts.hpp"
#include "residency/homes/encoded.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

constexpr const char* kAdvice =
    "something writes it on each rank by itself (an embedding's max_norm, a codebook, spectral norm by hand, any write "
    "in forward, an optimizer with settings or, after LocalSGD, a momentum of its own). Write it from what all ranks "
    "have (accelerator.reduce(...)), or on one rank and broadcast it";

/// The numbers that are known of writes.
enum DriftSums : size_t { kTimes, kBits, kTotal, kSize, kAllowed, kSums };

/// A unit in the last place of 1 of 16-bit numbers; 0 for others.
double unit_of(at::ScalarType type) { return type == at::kBFloat16 ? 0x1p-8 : type == at::kHalf ? 0x1p-11 : 0; }

/// A sum whose terms count by where they stand, so that values which change places change it.
int64_t mixed(const at::Tensor& words) {
  const at::Tensor factors = at::arange(words.numel(), words.options()).mul_(2).add_(1).mul_(0x1E3779B97F4A7C15);
  return factors.mul_(words).sum().item<int64_t>();
}

/// Hashes a tensor by words of 8 bytes, which are added 400 times faster than those of 4 bytes into 8: words lie in a
/// grid, whose rows and columns are summed, so that nothing as large as the tensor is made.
int64_t hash_of_bits(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  // From a storage's begin: elsewhere words may not be where 8 bytes begin.
  const at::Tensor whole =
      real.is_contiguous() && real.storage_offset() == 0 ? real : real.clone(at::MemoryFormat::Contiguous);
  const at::Tensor bytes = whole.view({-1}).view(at::kByte);
  constexpr int64_t kWord = sizeof(int64_t), kColumns = 1024;
  const int64_t count = bytes.numel() / kWord, gridded = count / kColumns * kColumns;
  const at::Tensor words = bytes.narrow(0, 0, count * kWord).view(at::kLong);
  const at::Tensor grid = words.narrow(0, 0, gridded).view({-1, kColumns});
  const int64_t of_rest = mixed(words.narrow(0, gridded, count - gridded)) +
                          mixed(bytes.narrow(0, count * kWord, bytes.numel() - count * kWord).to(at::kLong));
  return mixed(grid.sum(0)) ^ mixed(grid.sum(1)) ^ of_rest;
}

/// How far values are from the first rank's on each rank of the group, as a part of the largest. Takes any dtype: bytes
/// and bits have no abs(). Elements that are NaN on both are equal, of whatever bits.
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

/// A cause that lets ranks drift apart often does so from the start, and many programs are short: so looks are early,
/// and rarer and rarer.
bool DriftCheck::is_due(int64_t averages) const {
  return averages % every_ == 0 || (averages <= 256 && (averages & (averages - 1)) == 0);
}

void DriftCheck::note_write(const std::string& name, const at::Tensor& values) {
  if (every_ == 0 || !is_due(averages_ + 1) || values.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor real = values.is_complex() ? at::view_as_real(values) : values;
  auto& sums = writes_[name];
  sums.resize(kSums);
  sums[kTimes] += 1;
  // The hash of all writes so far; as many bits as a double holds.
  const auto bits = static_cast<uint64_t>(sums[kBits]) * 31 + static_cast<uint64_t>(hash_of_bits(values));
  sums[kBits] = static_cast<double>(bits >> 11);
  const auto type = real.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  sums[kTotal] += real.sum(type).item<double>();
  sums[kSize] += at::linalg_vector_norm(real, 1, std::nullopt, false, type).item<double>();
  // Other ranks know the rounded values of a shard that is kept more exactly than the whole; they add up by chance.
  sums[kAllowed] = 1e-6 + 16 * unit_of(real.scalar_type()) / std::sqrt(static_cast<double>(real.numel()));
}

void DriftCheck::after_average(const std::function<NamedTensors()>& parameters) {
  const auto& world = comm::mesh().all();
  if (!world || world->dry() || every_ == 0) return;
  if (!is_due(++averages_)) return;
  world->guard("backward", [&] {
    const std::pair<std::string, Writes> mine(group_ ? difference(parameters()) : "", std::exchange(writes_, {}));
    std::vector<std::pair<std::string, Writes>> all;
    for (const auto& bytes : comm::all_gather_bytes(to_bytes(mine)))
      all.push_back(from_bytes<std::pair<std::string, Writes>>(bytes));
    for (size_t rank = 0; rank < all.size(); ++rank)
      if (auto found = all[rank].first;
          !found.empty() || !(found = difference(all[0].second, all[rank].second, rank)).empty())
        throw ConfigError(found);
  });
  counts::add(AveragingCount::parameter_comparisons);
}

std::string DriftCheck::difference(const Writes& first, const Writes& other, size_t rank) const {
  const auto say = [&](const std::string& name) {
    return fmt::format(
        "backward: after {} of them parameter '{}' has been written with other values on rank {} than on rank 0, "
        "expected the same on all ranks, each of which keeps its piece of them: {}",
        averages_, name, rank, kAdvice);
  };
  for (const auto& [name, sums] : other)
    if (!first.contains(name)) return say(name);
  for (const auto& [name, one] : first) {
    const auto found = other.find(name);
    if (found == other.end() || found->second.at(kTimes) != one.at(kTimes)) return say(name);
    const auto& two = found->second;
    if (one.at(kBits) != two.at(kBits) &&
        std::abs(one.at(kTotal) - two.at(kTotal)) > one.at(kAllowed) * std::max(one.at(kSize), two.at(kSize)))
      return say(name);
  }
  return {};
}

std::string DriftCheck::difference(const NamedTensors& parameters) const {
  constexpr double kRounding = 1e-3;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> mine;
  for (const auto& [name, tensor] : parameters)
    mine.push_back(residency::encoded_weight(tensor) || tensor.numel() == 0 ? 0 : hash_of_bits(tensor.detach()));
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
            "the largest away), expected the same on all ranks, which average gradients only: {}",
            averages_, name, group_->global_ranks()[rank], group_->global_ranks()[0], far[rank], kAdvice);
  }
  return {};
}

}  // namespace accelerate::parallel
