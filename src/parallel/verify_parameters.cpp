#include "parallel/verify_parameters.hpp"

#include <algorithm>

#include "accelerate/codes/codes.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
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
  const auto group = comm::mesh().along(comm::kTokens);
  if (!group) return;
  std::vector<std::string> mine;
  for (const auto& parameter : parameters) mine.push_back(describe_parameter(parameter));
  // Rank 0's list goes out once, differences come back: traffic does not grow with the number of ranks unless something
  // is wrong.
  const auto first = from_bytes<std::vector<std::string>>(comm::broadcast_bytes(*group, to_bytes(mine), 0));
  const auto& ranks = group->global_ranks();
  std::string difference;
  if (mine != first) {
    const size_t i =
        static_cast<size_t>(std::mismatch(mine.begin(), mine.end(), first.begin(), first.end()).first - mine.begin());
    difference =
        fmt::format("parameter {} is {} on rank {} and {} on rank {}", i, i < mine.size() ? mine[i] : "missing",
                    ranks[static_cast<size_t>(group->rank())], i < first.size() ? first[i] : "missing", ranks[0]);
  }
  for (const std::string& found : comm::all_gather_bytes(*group, difference))
    if (!found.empty())
      raise<ShapeError>(
          "prepare: the model differs between ranks: {}; expected the same parameters in the same order on all of "
          "them. Build the model from the same configuration on every rank",
          found);
}

}  // namespace accelerate::parallel
