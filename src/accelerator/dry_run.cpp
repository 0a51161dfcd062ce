#include "accelerate/accelerator/dry_run.hpp"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "comm/dry_process_group.hpp"
#include "parallel/fsdp/wrap_policy.hpp"
#include "utils/meta_kernels.hpp"
#include "utils/meta_memory.hpp"

namespace accelerate {
namespace {

comm::Traffic since(const comm::Traffic& before, const comm::Traffic& now) {
  return {.all_gather = now.all_gather - before.all_gather,
          .reduce_scatter = now.reduce_scatter - before.reduce_scatter,
          .all_reduce = now.all_reduce - before.all_reduce,
          .broadcast = now.broadcast - before.broadcast,
          .sent = now.sent - before.sent,
          .control = now.control - before.control,
          .messages = now.messages - before.messages};
}

int64_t numel_of(const NamedTensors& tensors) {
  int64_t sum = 0;
  for (const auto& [name, tensor] : tensors) sum += tensor.numel();
  return sum;
}

}  // namespace

const DryRunPhase& DryRunReport::phase(std::string_view name) const {
  const auto found =
      std::find_if(phases.rbegin(), phases.rend(), [&](const DryRunPhase& phase) { return phase.name == name; });
  if (found != phases.rend()) return *found;
  std::string names;
  for (const auto& phase : phases) names += (names.empty() ? "" : ", ") + phase.name;
  throw ConfigError("DryRunReport::phase: found no phase '" + std::string(name) +
                    "', expected one of those that the program marked: " + names);
}

int64_t DryRunReport::peak_bytes() const {
  int64_t peak = 0;
  for (const auto& phase : phases) peak = std::max(peak, phase.at_peak.total());
  return peak;
}

DryRunReport dry_run(const DryRunOptions& options, const std::function<void(const DryRunMark& mark)>& program) {
  if (options.num_processes < 1 || options.process_index < 0 || options.process_index >= options.num_processes)
    throw ConfigError("dry_run: found process_index " + std::to_string(options.process_index) + " of " +
                      std::to_string(options.num_processes) +
                      " processes, expected 0 <= process_index < num_processes");
  if (PartialState::initialized())
    throw ConfigError(
        "dry_run: this process knows already who it is, because an Accelerator or a PartialState has been constructed; "
        "run dry first, or in a process of its own, or call AcceleratorState::reset(true) before");
  struct Forget {
    ~Forget() {
      GradientState::reset();
      AcceleratorState::reset(/*reset_partial_state=*/true);
    }
  } forget;
  meta_memory::install_kernels();
  meta_memory::Meter meter;
  const auto traffic = std::make_shared<comm::TrafficCounter>();
  const PartialState pretended(
      {.cpu = {},
       .process_group = {},
       .pretence = PartialStateOptions::Pretence{
           .process_index = options.process_index, .num_processes = options.num_processes, .traffic = traffic}});
  DryRunReport report{.process_index = options.process_index, .num_processes = options.num_processes, .phases = {}};
  comm::Traffic seen;
  program([&](const std::string& name) {
    const auto reading = meter.read();
    const comm::Traffic now = traffic->total();
    report.phases.push_back({.name = name,
                             .at_end = reading.now,
                             .at_peak = reading.at_peak,
                             .peaks = reading.peaks,
                             .traffic = since(seen, now)});
    seen = now;
  });
  return report;
}

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
