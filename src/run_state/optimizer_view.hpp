#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "run_state/optimizers.hpp"
#include "run_state/whole_stream.hpp"

/// Optimizers as their files are written: parameters as the models hold them, states by name.
namespace accelerate::run_state {

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;

inline Dict make_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }
template <class Range> List make_list(const Range& values) {
  List list(c10::AnyType::get());
  for (const auto& value : values) list.push_back(value);
  return list;
}

inline constexpr const char* kSteps = "step";  ///< the one state that is no tensor like its parameter

/// An optimizer's parameters in the order of its groups.
std::vector<parallel::Held> parameters_of(const AcceleratedOptimizer& optimizer, const PreparedModels& models);

/// A state in an optimizer's own layout can't be cut into shards, nor put together from them. @throws ConfigError
[[noreturn]] void refuse_pieces(const AcceleratedOptimizer& optimizer, const char* operation);

/// An optimizer as all ranks see it: a rank that has no element of a parameter may have no state for it.
struct OptimizerView {
  std::vector<parallel::Held> parameters;
  std::vector<std::map<std::string, at::Tensor>> state;  ///< per parameter; this rank's shards
  std::vector<Dict> groups;                              ///< with the names as `params`

  /// Collective. @throws ConfigError for an optimizer whose state is of a layout of its own
  OptimizerView(const AcceleratedOptimizer& optimizer, const PreparedModels& models,
                Untouched untouched = Untouched::left_out);
};

/// Indices into view.parameters in the order in which they become whole, which need not be that of the groups.
std::vector<size_t> in_order_of_parts(const OptimizerView& view);

/// All states that lie in shards. @param order  of parameters
std::vector<WholeStream::Wanted> states_in_pieces(const OptimizerView& view, const std::vector<size_t>& order);

}  // namespace accelerate::run_state
