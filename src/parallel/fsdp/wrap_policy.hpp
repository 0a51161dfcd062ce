#pragma once

#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "parallel/sharding/settings.hpp"

namespace accelerate::parallel {

/// Classes that compute in full precision where nobody chose others.
inline std::vector<std::string> batch_norm_classes() {
  return {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"};
}

/// Dotted names of the modules, in the order of registration, that the resolved plugin's policy makes units; the root,
/// which always is one, is not listed.
///
/// Version 1 decides as torch.distributed.fsdp.wrap does, version 2 as the reference's own version of it:
/// size_based_wrap takes every module with *more* than min_num_params elements below it, wrapped or not. Better than
/// there: version 2 also asks a policy function, which the reference forgets, and size_based_wrap passes over
/// containers without a forward (ModuleList, ModuleDict), which fully_shard refuses.
/// @throws ConfigError when transformer_based_wrap names no class and no module is a NoSplit, or names one that the
/// model does not have, or ignored_modules is no regular expression.
std::vector<std::string> wrapped_modules(const ModelRef& model, const FullyShardedDataParallelPlugin& plugin);

/// The model's parameters by unit: each once, in the innermost wrapped module that contains it, the rest in the root's
/// unit (first, unless it has none). Those of ignored modules are in no unit, also not through another module that they
/// are tied to.
///
/// Tied parameters of several units go to the unit that contains all of the modules that share them. (PyTorch trains
/// wrong or refuses: FSDP1 flattens the parameter into the first unit and leaves the other module with a stale one;
/// fully_shard raises. Here units are fetched by use of a tensor, not by the forward of a module, so that any unit may
/// own it.)
/// @throws ConfigError as wrapped_modules.
/// Source: torch 2.13, torch/distributed/fsdp/wrap.py; accelerate 1.15.0, fsdp2_prepare_auto_wrap_policy.
std::vector<ShardedUnit> wrap_units(const ModelRef& model, const FullyShardedDataParallelPlugin& plugin);

}  // namespace accelerate::parallel
