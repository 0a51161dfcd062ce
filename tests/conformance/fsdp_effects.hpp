#pragma once

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "runner.hpp"

/// A plugin's effects in a run, seen from outside: a small model trains dry as one rank of four, and the values that
/// were gathered, reduced, sent and kept say which settings acted; alone it is saved, and the files say how.
namespace conformance::fsdp_plugin_cases {

/// The effects of a plugin that is not resolved yet; the environment is the row's.
json effects_of(const accelerate::FullyShardedDataParallelPlugin& plugin);
/// The effects that the reference's fields of a row ask for with that model.
json expected_effects(const json& fields);

}  // namespace conformance::fsdp_plugin_cases
