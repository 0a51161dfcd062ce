#include "parallel/verify_parameters.hpp"

#include <algorithm>

#include "accelerate/comm.hpp"
#include "accelerate/utils/error.hpp"

namespace accelerate::parallel {
namespace {

std::string describe(const std::pair<std::string, at::Tensor>& parameter) {
  std::string text = "'" + parameter.first + "' " + at::toString(parameter.second.scalar_type()) + " [";
  for (int64_t dim = 0; dim < parameter.second.dim(); ++dim)
    text += (dim ? ", " : "") + std::to_string(parameter.second.size(dim));
  return text + (parameter.second.requires_grad() ? "]" : "] (frozen)");
}

}  // namespace

void verify_parameters(const NamedTensors& parameters) {
  std::vector<std::string> mine;
  for (const auto& parameter : parameters) mine.push_back(describe(parameter));
  // Rank 0's list goes out once, differences come back: traffic does not grow with the number of ranks unless something
  // is wrong.
  const auto first = from_bytes<std::vector<std::string>>(comm::broadcast_bytes(to_bytes(mine), 0));
  std::string difference;
  if (mine != first) {
    const size_t i =
        static_cast<size_t>(std::mismatch(mine.begin(), mine.end(), first.begin(), first.end()).first - mine.begin());
    difference = "parameter " + std::to_string(i) + " is " + (i < mine.size() ? mine[i] : "missing") + " on rank " +
                 std::to_string(comm::rank()) + " and " + (i < first.size() ? first[i] : "missing") + " on rank 0";
  }
  for (const std::string& found : comm::all_gather_bytes(difference))
    if (!found.empty())
      throw ShapeError("prepare: the model differs between ranks: " + found +
                       "; expected the same parameters in the same order on all of them. Build the model from the same "
                       "configuration on every rank");
}

}  // namespace accelerate::parallel
