#include "accelerate/parallel/zero_estimate.hpp"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "accelerate/utils/error.hpp"
#include "parallel/fsdp/wrap_policy.hpp"

namespace accelerate {
namespace {

int64_t numel_of(const NamedTensors& tensors) {
  int64_t sum = 0;
  for (const auto& [name, tensor] : tensors) sum += tensor.numel();
  return sum;
}

}  // namespace

ZeroShape zero_shape(const ModelRef& model, FullyShardedDataParallelPlugin plugin, int64_t num_processes) {
  const auto resolved = parallel::resolve(std::move(plugin));
  ZeroShape shape{.num_processes = num_processes};
  for (const auto& unit : parallel::wrap_units(model, resolved)) {
    const int64_t numel = numel_of(unit.parameters);
    shape.parameters += numel;
    if (unit.path.empty()) {
      shape.root = numel;
    } else {
      shape.largest_unit = std::max(shape.largest_unit, numel);
      shape.last_unit = numel;
    }
    const auto own = unit.parameters.front().second.scalar_type();
    const MixedPrecision precision = resolved.mixed_precision_policy.value_or(MixedPrecision{});
    const auto compute = precision.param_dtype.value_or(own);
    shape.compute_bytes = static_cast<int64_t>(c10::elementSize(compute));
    shape.reduce_bytes = static_cast<int64_t>(c10::elementSize(precision.reduce_dtype.value_or(compute)));
    shape.master_bytes = static_cast<int64_t>(
        precision.param_dtype ? std::max(c10::elementSize(own), c10::elementSize(c10::kFloat)) : c10::elementSize(own));
  }
  return shape;
}

ZeroEstimate zero_estimate(ShardingStrategy strategy, const ZeroShape& shape) {
  const int64_t all_states = 4 * shape.master_bytes * shape.parameters;  // value, gradient, two moments
  const int64_t sharded = (all_states + shape.num_processes - 1) / shape.num_processes;
  const int64_t gather = shape.parameters * shape.compute_bytes, reduce = shape.parameters * shape.reduce_bytes;
  switch (strategy) {
    case ShardingStrategy::no_shard:
      return {.model_states = all_states, .gathered = 0, .volume = 2 * reduce, .volume_saved = 0};
    case ShardingStrategy::shard_grad_op:
      return {.model_states = sharded, .gathered = gather, .volume = gather + reduce, .volume_saved = 0};
    case ShardingStrategy::full_shard:
      return {.model_states = sharded,
              .gathered = (2 * shape.largest_unit + shape.root) * shape.compute_bytes,
              .volume = 2 * gather + reduce,
              .volume_saved = (shape.root + shape.last_unit) * shape.compute_bytes};
    case ShardingStrategy::hybrid_shard:
    case ShardingStrategy::hybrid_shard_zero2:
      break;
  }
  throw ConfigError(
      "zero_estimate: found strategy " + to_string(strategy) +
      ", expected FULL_SHARD, SHARD_GRAD_OP or NO_SHARD: the paper has no formula for groups within groups");
}

}  // namespace accelerate
