#pragma once

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "runner.hpp"

/// What a plugin does in a run, seen from outside: a small model trains dry as one rank of four, and what was gathered,
/// reduced, sent and kept says which settings acted; alone it is saved, and the files say how.
namespace conformance::fsdp_plugin_cases {

/// Of a plugin that is not resolved yet; the environment is the row's.
json effects_of(const accelerate::FullyShardedDataParallelPlugin& plugin);
/// What the reference's fields of a row mean for that model.
json expected_effects(const json& fields);

}  // namespace conformance::fsdp_plugin_cases
