#include "parallel/zero/translate.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "parallel/zero/units.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

using zero::ZeroSettings;

constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max();

/// Numbers of elements are bytes here, in the type that moves; more than there can be is no limit.
int64_t bytes_of(int64_t elements, const ZeroSettings& zero) {
  const auto size = static_cast<int64_t>(c10::elementSize(compute_dtype(zero).value_or(at::kFloat)));
  return elements > kMostBytes / size ? kMostBytes : elements * size;
}

std::optional<at::ScalarType> dtype_named(const std::optional<std::string>& name) {
  if (!name) return std::nullopt;
  return name == "fp16" ? at::kHalf : name == "bf16" ? at::kBFloat16 : at::kFloat;
}

/// In so many at least a model travels: one moves while another computes.
constexpr int64_t kPieces = 8;

int64_t elements_of(const ModelRef& model) {
  int64_t all = 0;
  for (const auto& [name, tensor] : model.parameters()) all += tensor.numel();
  return all;
}

/// Stages 0 to 2: all stay whole, and are gathered together as they are reduced. DeepSpeed's default sizes are far
/// above most models: in one piece nothing would travel while backward computes, and a whole gradient would wait.
void hold_whole(const ZeroSettings& zero, ShardingSettings& settings) {
  const auto& given = zero.zero_optimization;
  const int64_t most =
      given.stage == 0 ? given.reduce_bucket_size : std::min(given.reduce_bucket_size, given.allgather_bucket_size);
  settings.units = [most](const ModelRef& model) {
    constexpr int64_t kWorthAMessage = 6'500'000;  // elements: 25 MB, as DistributedDataParallel's
    return units_by_size(model, std::min(most, std::max(elements_of(model) / kPieces, kWorthAMessage)));
  };
  settings.forward = {.prefetch = 1, .outstanding = 2, .evict_after_use = false};
  settings.backward = settings.forward;
}

/// Stage 3: modules come and go.
void hold_in_pieces(const ZeroSettings& zero, ShardingSettings& settings) {
  const auto& given = zero.zero_optimization;
  const bool ahead = given.overlap_comm.value() && given.prefetch_bucket_size > 0 && !given.allgather_sequential;
  ModuleUnits how{.stays_up_to = given.param_persistence_threshold,
                  .all_that_stays = given.model_persistence_threshold,
                  .smallest_average = given.module_granularity_threshold,
                  .classes = given.leaf_module.classes,
                  .names = given.leaf_module.names,
                  .name_suffixes = given.leaf_module.name_suffixes};
  // Units that are fetched ahead of their use may as well come at once: a transformer's blocks, mostly.
  const int64_t together = ahead ? std::min(given.prefetch_bucket_size, given.max_live_parameters) : 0;
  settings.units = [how, together](const ModelRef& model) mutable {
    how.largest_whole = std::min(together, elements_of(model) / kPieces);
    return units_by_module(model, how, [](const std::string& entry) {
      const auto defaults = zero::LeafModule().classes;
      if (std::find(defaults.begin(), defaults.end(), entry) == defaults.end())
        logs::warn("accelerate.parallel",
                   "DeepSpeed configuration: leaf_module has '{}', which no module of the model is: it has no effect.",
                   entry);
    });
  };
  settings.forward = {.prefetch = ahead ? residency::Policy::kWholePass : 0,
                      .prefetch_bytes = bytes_of(given.prefetch_bucket_size, zero),
                      .outstanding = 2,
                      .budget_bytes = bytes_of(given.max_live_parameters, zero),
                      .evict_after_use = true,
                      .reuse_bytes = bytes_of(given.max_reuse_distance, zero)};
  settings.backward = settings.forward;
}

DiskPlace disk_place(const std::optional<std::string>& folder, const zero::Aio& aio) {
  return {.folder = folder.value(),
          .requests = {.bytes = aio.block_size,
                       .depth = aio.queue_depth,
                       .threads = aio.intra_op_parallelism,
                       .one_by_one = aio.single_submit,
                       .refills_at_once = aio.overlap_events}};
}

void lay_on_disk(const ZeroSettings& zero, ShardingSettings& settings) {
  const auto& states = zero.zero_optimization.offload_optimizer;
  const auto& parameters = zero.zero_optimization.offload_param;
  if (states.device == "nvme")
    settings.states_on_disk = StatesOnDisk{.place = disk_place(states.nvme_path, zero.aio),
                                           .reads_ahead = states.pipeline_read,
                                           .writes_behind = states.pipeline_write,
                                           .group_elements = zero.zero_optimization.sub_group_size,
                                           .groups_in_memory = states.buffer_count};
  if (zero.zero_optimization.stage < 3 || parameters.device != "nvme") return;
  settings.parameters_on_disk = ParametersOnDisk{.place = disk_place(parameters.nvme_path, zero.aio),
                                                 .elements_in_memory = parameters.max_in_cpu};
  // Parameters that come ahead of their use lie in the buffers.
  const int64_t buffers = bytes_of(parameters.buffer_count > kMostBytes / std::max<int64_t>(parameters.buffer_size, 1)
                                       ? kMostBytes
                                       : parameters.buffer_count * parameters.buffer_size,
                                   zero);
  for (auto* const policy : {&settings.forward, &settings.backward})
    policy->prefetch_bytes = std::min(policy->prefetch_bytes.value_or(buffers), buffers);
}

/// ZeRO++.
void travel_in_few_bits(const ZeroSettings& zero, ShardingSettings& settings) {
  const auto& given = zero.zero_optimization;
  settings.near = given.zero_hpz_partition_size;
  settings.near_name = "DeepSpeed configuration: zero_hpz_partition_size";
  settings.quantized = {.weights = given.zero_quantized_weights,
                        .gradients = given.zero_quantized_gradients,
                        .frozen = given.zero_quantized_nontrainable_weights};
}

}  // namespace

std::vector<comm::AxisSize> axes_of(const ZeroSettings& zero, int64_t ranks) {
  const int64_t pieces = zero.zero_optimization.stage == 0 ? 1 : ranks;
  return {{comm::Axis::dp_replicate, ranks / pieces}, {comm::Axis::dp_shard, pieces}};
}

std::optional<at::ScalarType> autocast_dtype(const ZeroSettings& zero) {
  if (!zero.torch_autocast.enabled) return std::nullopt;
  return zero.torch_autocast.dtype.value_or("bfloat16") == "float16" ? at::kHalf : at::kBFloat16;
}

std::optional<at::ScalarType> compute_dtype(const ZeroSettings& zero) {
  if (zero.fp16.enabled) return at::kHalf;
  if (zero.bf16.enabled) return at::kBFloat16;
  return std::nullopt;
}

ShardingSettings settings_of(const ZeroSettings& zero, int64_t ranks) {
  const int64_t stage = zero.zero_optimization.stage;
  ShardingSettings settings;
  if (ranks > 1) settings.axes = axes_of(zero, ranks);  // alone nothing is laid out
  if (stage == 3) travel_in_few_bits(zero, settings);
  if (stage == 3) hold_in_pieces(zero, settings);
  else hold_whole(zero, settings);
  settings.keep_until_step = true;
  settings.all_have_gradients = !zero.zero_optimization.ignore_unused_parameters;
  if (stage == 2)
    settings.always_reduces =
        "DeepSpeed's stage 2 keeps only this rank's piece of a gradient, expected stage 0 or 1; leave no_sync out "
        "(accumulate() goes on working)";
  if (stage == 3)
    settings.always_reduces =
        "DeepSpeed's stage 3 keeps only this rank's piece of a gradient, expected stage 0 or 1; leave no_sync out "
        "(accumulate() goes on working)";
  const auto sums = dtype_named(zero.data_types.grad_accum_dtype);
  const bool widens_sums = sums == at::kFloat && compute_dtype(zero);
  if (stage == 1 && widens_sums)
    settings.always_reduces =
        "data_types.grad_accum_dtype is fp32, and parameters have 16 bits: sums are of this rank's pieces, expected it "
        "to be left out; leave no_sync out (accumulate() goes on working)";
  settings.param_dtype = compute_dtype(zero);
  if (compute_dtype(zero)) settings.buffer_dtype = dtype_named(zero.data_types.buffer_dtype);
  settings.masters_in_param_dtype = zero.has_low_masters();
  if (const auto dtype = autocast_dtype(zero)) settings.their_reduce_dtype = *dtype;
  settings.first_values_in_param_dtype = true;
  if (zero.fp16.enabled && zero.fp16.auto_cast) settings.input_dtype = at::kHalf;
  settings.overlap_reduction = stage == 0 || zero.zero_optimization.overlap_comm.value();
  settings.reduce_dtype = dtype_named(zero.communication_data_type);
  settings.sums_gradients = zero.gradient_allreduce_op == "sum";
  if (!settings.sums_gradients)
    settings.divides_before = zero.prescale_gradients ? static_cast<double>(ranks) : zero.gradient_predivide_factor;
  // Stages 0 to 2 keep 16 bits, as DeepSpeed's do; stage 3 adds up in fp32 from the first one on, as its own does,
  // where no copy in 16 bits lies beside the masters.
  if (sums && compute_dtype(zero) && !widens_sums) settings.kept_gradients = KeptGradients::as_reduced;
  else if (stage < 3 || ranks == 1) settings.kept_gradients = KeptGradients::as_reduced_until_added;
  const auto& offload = zero.zero_optimization;
  settings.offload = offload.offload_optimizer.device != "none" || offload.offload_param.device != "none";
  if (stage > 0) lay_on_disk(zero, settings);
  settings.offload_share = offload.offload_optimizer.ratio;
  settings.pin_memory = offload.offload_optimizer.pin_memory || offload.offload_param.pin_memory;
  settings.tells_changed_order = stage == 3 && zero.zero_optimization.log_trace_cache_warnings;
  settings.states_stay =
      stage == 0 ? "the DeepSpeed configuration has stage 0, which splits nothing, expected stage 1, 2 or 3"
      : offload.offload_param.device != "none"
          ? "the DeepSpeed configuration has offload_param, which keeps parameters elsewhere already, expected none"
          : nullptr;
  settings.from_rank0 = true;
  return settings;
}

}  // namespace accelerate::parallel
