#pragma once

/// Keyword handlers as names and values, and torch.compile's settings, which this library reads and can't act on.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"

namespace accelerate {

/// Settings of torch.compile, which is Python's: LibTorch has no compiler for graphs, and AcceleratorOptions refuses
/// what would compile. Unset fields come from the environment that `accelerate launch` sets.
struct TorchDynamoPlugin {
  /// In any case. ACCELERATE_DYNAMO_BACKEND, else "no".
  std::optional<std::string> backend;
  /// "default", "reduce-overhead" or "max-autotune". ACCELERATE_DYNAMO_MODE, else default.
  std::optional<std::string> mode;
  /// ACCELERATE_DYNAMO_USE_FULLGRAPH, else false.
  std::optional<bool> fullgraph;
  /// ACCELERATE_DYNAMO_USE_DYNAMIC, else unset.
  std::optional<bool> dynamic;
  /// Compiling does nothing.
  bool disable = false;
  /// ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION, else false.
  std::optional<bool> use_regional_compilation;
};

/// The plugin with all fields decided; backend in lower case. @throws ConfigError for a backend that torch doesn't
/// have, and variables that are no truth values.
ACCELERATE_API TorchDynamoPlugin resolve(TorchDynamoPlugin plugin);

/// A field's value; nullptr is Python's None.
using KwargsValue = std::variant<std::nullptr_t, bool, int64_t, double, std::string, std::vector<int64_t>,
                                 std::vector<std::string>, std::map<std::string, int64_t>, std::vector<bool>>;
using KwargsDict = std::map<std::string, KwargsValue>;

/// All fields by the names that the reference passes on, for logs and trackers. Settings by functions of their
/// own (communication hooks) are left out, as there.
ACCELERATE_API KwargsDict to_dict(const DistributedDataParallelKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const GradScalerKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const InitProcessGroupKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const AutocastKwargs& kwargs);
ACCELERATE_API KwargsDict to_dict(const ProfileKwargs& kwargs);
/// Of a resolved plugin.
ACCELERATE_API KwargsDict to_dict(const TorchDynamoPlugin& plugin);

/// The fields that differ from the defaults, whatever the environment says.
template <class Handler> KwargsDict to_kwargs(const Handler& handler) {
  KwargsDict changed = to_dict(handler);
  for (const auto& [name, value] : to_dict(Handler{}))
    if (changed.at(name) == value) changed.erase(name);
  return changed;
}
/// The arguments of torch.compile: without use_regional_compilation, which says how it is called.
ACCELERATE_API KwargsDict to_kwargs(const TorchDynamoPlugin& plugin);

}  // namespace accelerate
