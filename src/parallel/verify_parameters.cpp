#include "parallel/verify_parameters.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "accelerate/codes/codes.hpp"
#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "residency/homes/encoded.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

std::string describe_parameter(const std::pair<std::string, at::Tensor>& parameter) {
  const auto& [name, tensor] = parameter;
  std::string text = fmt::format("'{}' {} {}{}", name, at::toString(tensor.scalar_type()), tensor.sizes(),
                                 tensor.requires_grad() ? "" : " (frozen)");
  if (const auto* weight = residency::encoded_weight(tensor)) {
    text += fmt::format(" in {}", codes::name(weight->codes.encoding));
    if (weight->codes.block_size > 0)
      text += fmt::format(", blocks of {}{}", weight->codes.block_size, weight->codes.nested ? ", nested" : "");
  }
  return text;
}

}  // namespace

void verify_parameters(const NamedTensors& parameters) {
  std::vector<std::string> mine;
  for (const auto& parameter : parameters) mine.push_back(describe_parameter(parameter));
  // Rank 0's list goes out once, differences come back: traffic does not grow with the number of ranks unless something
  // is wrong.
  const auto first = from_bytes<std::vector<std::string>>(comm::broadcast_bytes(to_bytes(mine), 0));
  std::string difference;
  if (mine != first) {
    const size_t i =
        static_cast<size_t>(std::mismatch(mine.begin(), mine.end(), first.begin(), first.end()).first - mine.begin());
    difference = fmt::format("parameter {} is {} on rank {} and {} on rank 0", i, i < mine.size() ? mine[i] : "missing",
                             comm::rank(), i < first.size() ? first[i] : "missing");
  }
  for (const std::string& found : comm::all_gather_bytes(difference))
    if (!found.empty())
      raise<ShapeError>(
          "prepare: the model differs between ranks: {}; expected the same parameters in the same order on all of "
          "them. Build the model from the same configuration on every rank",
          found);
}

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

/// How far values are from rank 0's on each rank, as a part of the largest. Of any dtype: bytes and bits have no abs().
std::vector<double> distances(const at::Tensor& values) {
  auto& group = *comm::world_group();
  const at::Tensor mine = values.to(values.is_complex() ? at::kComplexFloat : at::kFloat);
  const at::Tensor first = group.broadcast(mine.clone(), 0);
  const double largest = first.abs().max().item<double>(), off = (mine - first).abs().max().item<double>();
  const at::Tensor all = group.all_gather(
      at::full({1}, off <= 0 ? 0.0 : off / largest, at::TensorOptions().dtype(at::kFloat).device(group.device())));
  const at::Tensor here = all.cpu().to(at::kDouble);
  return {here.const_data_ptr<double>(), here.const_data_ptr<double>() + here.numel()};
}

}  // namespace

void verify_values(const NamedTensors& parameters, int64_t backwards) {
  constexpr double kRounding = 1e-3;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> mine;
  for (const auto& [name, tensor] : parameters)
    mine.push_back(residency::encoded_weight(tensor) || tensor.numel() == 0 ? 0 : sum_of_bits(tensor.detach()));
  std::vector<std::vector<int64_t>> all;
  for (const auto& bytes : comm::all_gather_bytes(to_bytes(mine)))
    all.push_back(from_bytes<std::vector<int64_t>>(bytes));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    if (std::all_of(all.begin(), all.end(), [&, i](const auto& sums) { return sums.at(i) == all[0].at(i); })) continue;
    const auto far = distances(tensor.detach());
    for (size_t rank = 0; rank < far.size(); ++rank)
      if (!(far[rank] <= kRounding))
        raise<ConfigError>(
            "backward: after {} of them parameter '{}' has other values on rank {} than on rank 0 (up to {:.2g} of the "
            "largest away), expected the same on all ranks, which average gradients only: something writes it on each "
            "rank by itself (an embedding's max_norm, a codebook, spectral norm by hand, any write in forward, an "
            "optimizer with settings of its own). Write it from what all ranks have (accelerator.reduce(...)), or on "
            "one rank and broadcast it",
            backwards, name, rank, far[rank]);
  }
}

}  // namespace accelerate::parallel
