/// Receipts of FullyShardedDataParallelPlugin and ParallelismConfig.
//
// settings: FullyShardedDataParallelPlugin as fsdp_plugin.
// settings: CPUOffload as fsdp_plugin.cpu_offload.
// settings: MixedPrecision as fsdp_plugin.mixed_precision_policy.
// settings: StateDictConfig as fsdp_plugin.state_dict_config., fsdp_plugin.optim_state_dict_config.
// settings: ParallelismConfig as parallelism_config.
// without: fsdp_plugin.cpu_offload: its fields have entries
// without: fsdp_plugin.mixed_precision_policy: its fields have entries
// without: fsdp_plugin.state_dict_config: its fields have entries
// without: fsdp_plugin.optim_state_dict_config: its fields have entries
// without: parallelism_config.tp_size: anything but its default is refused
// without: parallelism_config.cp_size: anything but its default is refused
// without: parallelism_config.sp_size: anything but its default is refused
// without: parallelism_config.cp_backend: of an axis that is refused
// without: parallelism_config.sp_backend: of an axis that is refused
// without: parallelism_config.tp_handler: of an axis that is refused
// without: parallelism_config.cp_handler: of an axis that is refused
// without: parallelism_config.sp_handler: of an axis that is refused

#include "parallel/fsdp/receipts.hpp"

#include <strings.h>
#include <type_traits>

#include "accelerate/residency.hpp"
#include "optim/receipts.hpp"
#include "parallel/sharding/counts.hpp"
#include "residency/counters.hpp"
#include "utils/environment.hpp"

namespace accelerate::receipts {
namespace {

using parallel::ShardingCount;
using residency::ResidencyCount;
using Fsdp = FullyShardedDataParallelPlugin;
using parallel::effective_strategy;

template <auto Field> Asked fsdp(const ShardedFacts& f) { return asked<&ShardedFacts::given, Field>(f); }
/// The answer for a part of the plugin that may be left out.
template <auto Part, auto Field> Asked part(const ShardedFacts& f) {
  using T = std::decay_t<decltype(*(f.given.*Part))>;
  const auto value = (f.given.*Part).value_or(T()).*Field;
  return {value != T().*Field, text_of(value)};
}
template <auto Field> Asked policy(const ShardedFacts& f) { return part<&Fsdp::mixed_precision_policy, Field>(f); }
template <auto Field> Asked parallelism(const ShardedFacts& f) { return asked<&ShardedFacts::parallelism, Field>(f); }

int64_t fetches() {
  const auto moved = residency::stats();
  return moved.faults + moved.prefetch_hits;
}
/// The resolved plugin's precision; empty where there is none.
MixedPrecision policy_of(const ShardedFacts& f) {
  return f.sharding ? f.sharding->mixed_precision_policy.value_or(MixedPrecision{}) : MixedPrecision{};
}

constexpr const char* kSharded = "in sharded models";
constexpr const char* kSharding = "in prepare() of sharded models";
constexpr const char* kOverRanks = "in models sharded over several processes";

/// Plugins without a model to shard, or without anything to do.
std::optional<Deed> no_sharding(const ShardedFacts& f) {
  if (!f.sharding) return nothing("models are not sharded (no fsdp_plugin, no --use_fsdp)");
  if (read(ShardingCount::units) == 0) return not_due("no model was prepared");
  return std::nullopt;
}
std::optional<Deed> no_sharding_over_ranks(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return none;
  if (f.run.ranks == 1) return nothing("one process holds everything");
  return std::nullopt;
}
/// The answer of settings about units that come and go.
std::optional<Deed> no_gathering(const ShardedFacts& f) {
  if (const auto none = no_sharding_over_ranks(f)) return none;
  if (read(ShardingCount::elements_held) == read(ShardingCount::elements_sharded))
    return nothing("every rank holds the whole model");
  if (read(ShardingCount::units_shared) > 0)
    return nothing("the ranks of this host see all parameters in shared memory, so nothing is gathered or given back");
  if (read(ShardingCount::forwards_sharded) == 0) return not_due("no prepared model was called");
  return std::nullopt;
}
std::optional<Deed> not_of_version(const ShardedFacts& f, int64_t version) {
  if (f.sharding && f.sharding->fsdp_version != version)
    return nothing("fsdp_version is {}, and only {} has it", *f.sharding->fsdp_version, version);
  return std::nullopt;
}
std::string shares(const ShardedFacts& f) {
  return fmt::format("this rank holds {} of {} elements (with padding), in {}", read(ShardingCount::elements_held),
                     read(ShardingCount::elements_sharded), counted(read(ShardingCount::units), "unit", "units"));
}

Deed fsdp_version(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  return acted("the other settings were read as those of version {}", *f.sharding->fsdp_version);
}
Deed sharding_strategy(const ShardedFacts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  return acted("{}: {}", to_string(effective_strategy(*f.sharding)), shares(f));
}
Deed reshard_after_forward(const ShardedFacts& f) {
  if (f.sharding && f.sharding->fsdp_version == 1) {
    // The launcher makes a strategy that stands there the other setting.
    const auto given = environment::text("FSDP_RESHARD_AFTER_FORWARD");
    const std::string strategy = to_string(effective_strategy(*f.sharding));
    if (f.sharding->reshard_after_forward || (given && ::strcasecmp(given->c_str(), strategy.c_str()) == 0))
      return sharding_strategy(f);
    return nothing("in version 1 it is a strategy, and another is in force: {}", strategy);
  }
  if (const auto none = no_gathering(f)) return *none;
  if (read(ShardingCount::units) == 1)
    return nothing("all parameters are in one unit, which stays; auto_wrap_policy makes more");
  return acted("units were gathered {} and given back {}", counted(fetches(), "time", "times"),
               counted(residency::stats().evictions, "time", "times"));
}
Deed replicas(const ShardedFacts& f) {
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  if (read(ShardingCount::replica_gradients) > 0)
    return acted("{}; gradients of {} were averaged over replicas", shares(f),
                 counted(read(ShardingCount::replica_gradients), "part", "parts"));
  return acted("{}", shares(f));
}
/// The effect of a ParallelismConfig, which may be about data parallelism alone.
Deed axis(const ShardedFacts& f) {
  if (f.sharding) return replicas(f);
  if (f.run.ranks == 1) return nothing("one process is not laid out");
  return acted("{} ranks hold a whole model each and average their gradients", f.run.ranks);
}
Deed fetching_ahead(const ShardedFacts& f) {
  if (const auto none = no_gathering(f)) return *none;
  return acted("{} of {} gathers were under way before their unit was needed", residency::stats().prefetch_hits,
               fetches());
}
Deed backward_prefetch(const ShardedFacts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  return fetching_ahead(f);
}
Deed forward_prefetch(const ShardedFacts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  if (f.sharding && !f.sharding->forward_prefetch.value_or(false)) return off("off");
  return fetching_ahead(f);
}
Deed limit_all_gathers(const ShardedFacts& f) {
  if (const auto none = no_gathering(f)) return *none;
  return acted("at most {} at a time",
               counted(read(ResidencyCount::fetches_most), "gather was under way", "gathers were under way"));
}
Deed auto_wrap_policy(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  const int64_t units = read(ShardingCount::units);
  if (units > f.run.models) return acted("models were cut into {}", counted(units, "unit", "units"));
  return f.given.auto_wrap_policy ? nothing("no module became a unit besides the whole model")
                                  : off("the whole model is one unit");
}
Asked wrap_policy_asked(const ShardedFacts& f) {
  const auto& given = f.given.auto_wrap_policy;
  if (!given) return {false, "unset"};
  const auto* policy = std::get_if<AutoWrapPolicy>(&*given);
  return {true, policy ? to_string(*policy) : "a function"};
}
Deed transformer_cls_names_to_wrap(const ShardedFacts& f) {
  if (!f.sharding || !f.sharding->transformer_cls_names_to_wrap) return no_sharding(f).value_or(off("unset"));
  const auto* wrap = std::get_if<AutoWrapPolicy>(&*f.sharding->auto_wrap_policy);
  if (!wrap || *wrap != AutoWrapPolicy::transformer_based_wrap)
    return nothing("auto_wrap_policy is not TRANSFORMER_BASED_WRAP");
  return auto_wrap_policy(f);
}
Deed min_num_params(const ShardedFacts& f) {
  if (!f.sharding || !f.sharding->min_num_params) return no_sharding(f).value_or(off("unset"));
  const auto* wrap = std::get_if<AutoWrapPolicy>(&*f.sharding->auto_wrap_policy);
  if (!wrap || *wrap != AutoWrapPolicy::size_based_wrap) return nothing("auto_wrap_policy is not SIZE_BASED_WRAP");
  return auto_wrap_policy(f);
}

Deed offload_params(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->cpu_offload->offload_params) return off("off");
  if (read(ShardingCount::parts_offloaded) == 0)
    return nothing("the device is the {}, so parameters are on the host already", f.run.device.str());
  return acted("{} of units live on the host", counted(read(ShardingCount::parts_offloaded), "part", "parts"));
}
Deed pin_memory(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->cpu_offload->offload_params) return nothing("offload_params is off");
  if (read(ShardingCount::parts_offloaded) == 0)
    return nothing("the device is the {}, which needs no page-locked memory", f.run.device.str());
  return acted("in page-locked memory: {} of {}", read(ShardingCount::parts_pinned),
               counted(read(ShardingCount::parts_offloaded), "part", "parts"));
}
Deed offload_folder(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->offload_folder) return off("unset");
  return acted("{} of units live in files, and {} of states have come from one to be stepped on",
               counted(read(ShardingCount::parts_on_disk), "part", "parts"),
               counted(read(ShardingCount::groups_from_disk) + read(ShardingCount::groups_ahead), "group", "groups"));
}
Asked offload_folder_asked(const ShardedFacts& f) {
  const auto& folder = f.given.offload_folder;
  return {folder.has_value(), folder ? folder->string() : "unset"};
}
Deed step_in_backward(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->step_in_backward.value_or(false)) return off("off");
  return f.sharding->step_at_once.value_or(false) ? of_steps_at_once() : of_steps_ahead();
}
Deed step_at_once(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->step_at_once.value_or(false)) return off("off");
  return of_steps_at_once();
}
Deed ignored_modules(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->ignored_modules) return off("unset");
  if (read(ShardingCount::parameters_ignored) == 0) return nothing("no module of the prepared models is meant by it");
  return acted("{} left alone", counted(read(ShardingCount::parameters_ignored), "parameter was", "parameters were"));
}
Asked ignored_modules_asked(const ShardedFacts& f) {
  const auto& given = f.given.ignored_modules;
  if (!given) return {false, "unset"};
  const auto* pattern = std::get_if<std::string>(&*given);
  return {true, pattern ? *pattern : "a list"};
}

// ---- few bits

/// Why nothing travels in few bits between the ranks that hold one model together.
std::optional<Deed> nothing_in_few_bits(const ShardedFacts& f, const std::optional<bool>& asked) {
  if (!asked.value_or(false)) return off("off");
  if (const auto none = no_sharding_over_ranks(f)) return none;
  if (read(ShardingCount::elements_held) == read(ShardingCount::elements_sharded))
    return nothing("every rank holds the whole model");
  return std::nullopt;
}
Deed quantized_weights(const ShardedFacts& f) {
  if (const auto none = nothing_in_few_bits(f, f.sharding ? f.sharding->quantized_weights : std::nullopt)) return *none;
  if (read(ShardingCount::parts_as_int8) == 0) return nothing("no trained parameter has two dimensions");
  return acted("{} gathered as 8-bit codes", counted(read(ShardingCount::parts_as_int8), "part is", "parts are"));
}
Deed quantized_gradients(const ShardedFacts& f) {
  if (const auto none = nothing_in_few_bits(f, f.sharding ? f.sharding->quantized_gradients : std::nullopt))
    return *none;
  if (read(ShardingCount::parts_as_int4) == 0) return nothing("no trained parameter has two dimensions");
  if (read(ShardingCount::gradients_reduced) == 0) return not_due("nothing was trained");
  return acted("{} elements of gradients travelled in {}", read(ShardingCount::gradient_elements),
               bytes(read(ShardingCount::gradient_wire_bytes)));
}
Deed quantized_nontrainable_weights(const ShardedFacts& f) {
  if (!f.sharding || !f.sharding->quantized_nontrainable_weights.value_or(false)) return off("off");
  if (const auto none = no_sharding(f)) return *none;
  if (read(ShardingCount::parts_coded) == 0) return nothing("no frozen parameter has two dimensions");
  return acted("{} kept as 8-bit codes",
               counted(read(ShardingCount::parts_coded), "frozen part is", "frozen parts are"));
}

// ---- states

Deed state_dict_type(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (f.checkpoints == 0) return not_due("nothing was saved");
  return acted("{} written as {}", counted(f.checkpoints, "checkpoint was", "checkpoints were"),
               to_string(*f.sharding->state_dict_type));
}
Deed whole_states(const ShardedFacts& f, int64_t given, const std::optional<StateDictConfig>& config,
                  const char* function) {
  if (const auto none = no_sharding(f)) return *none;
  if (f.sharding->state_dict_type != StateDictType::full_state_dict)
    return nothing("state_dict_type is {}, whose pieces go to files only", to_string(*f.sharding->state_dict_type));
  if (given == 0) return not_due("{}() was not called", function);
  return acted("{} given to {}, {}", counted(given, "whole state was", "whole states were"),
               config->rank0_only.value_or(true) ? "rank 0" : "all ranks",
               config->offload_to_cpu ? "on the host" : "on their device");
}
Deed state_dict_config(const ShardedFacts& f) {
  return whole_states(f, f.whole_states, f.sharding ? f.sharding->state_dict_config : std::nullopt, "get_state_dict");
}
Deed optim_state_dict_config(const ShardedFacts& f) {
  return whole_states(f, f.whole_optimizer_states, f.sharding ? f.sharding->optim_state_dict_config : std::nullopt,
                      "get_optimizer_state_dict");
}

/// The effect of offload_to_cpu, which is about devices that are not the CPU.
template <Deed (*Of)(const ShardedFacts&)> Deed on_host(const ShardedFacts& f) {
  if (f.sharding && f.run.device.is_cpu()) return nothing("the device is the CPU, so states are on the host already");
  return Of(f);
}

// ---- starting

Deed use_orig_params(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (const auto none = not_of_version(f, 1)) return *none;
  if (f.sharding->use_orig_params.value_or(false))
    return acted("parameters are the original ones, as they always are here");
  return f.given.use_orig_params ? nothing("parameters are the original ones here, always")
                                 : off("parameters are the original ones here, always");
}
Deed param_init_fn(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.given.param_init_fn) return off("unset");
  if (read(ShardingCount::modules_initialised) == 0)
    return nothing("no parameter was without memory (init_empty_weights)");
  return acted("called for {}", counted(read(ShardingCount::modules_initialised), "module", "modules"));
}
Asked param_init_fn_asked(const ShardedFacts& f) { return asked_for(f.given.param_init_fn, "a function"); }
Deed from_rank0(const ShardedFacts& f, bool on) {
  if (!on) return off("off");
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  return acted("{}, {}, from rank 0", counted(read(ShardingCount::tensors_from_rank0), "tensor", "tensors"),
               bytes(read(ShardingCount::bytes_from_rank0)));
}
Deed sync_module_states(const ShardedFacts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  return from_rank0(f, f.sharding && f.sharding->sync_module_states.value_or(false));
}
Deed cpu_ram_efficient_loading(const ShardedFacts& f) {
  return from_rank0(f, f.sharding && f.sharding->cpu_ram_efficient_loading.value_or(false));
}
Deed activation_checkpointing(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->activation_checkpointing.value_or(false)) return off("off");
  if (read(ResidencyCount::units_recomputed) == 0) return not_due("nothing was trained");
  return acted("units were recomputed {}", counted(read(ResidencyCount::units_recomputed), "time", "times"));
}
Deed activation_checkpointing_offload(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->activation_checkpointing_offload.value_or(false)) return off("off");
  if (f.run.device.is_cpu()) return nothing("the device is the CPU, so inputs of units are on the host already");
  if (read(ResidencyCount::inputs_offloaded) == 0) return not_due("nothing was trained");
  return acted("{} of units waited on the host", counted(read(ResidencyCount::inputs_offloaded), "input", "inputs"));
}

// ---- mixed_precision_policy

std::optional<Deed> no_forward(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return none;
  if (read(ShardingCount::forwards_sharded) == 0) return not_due("no prepared model was called");
  return std::nullopt;
}
Deed param_dtype(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!policy_of(f).param_dtype) return off("unset");
  if (read(ShardingCount::elements_converted) == 0)
    return nothing("parameters are {} already", c10::toString(*policy_of(f).param_dtype));
  return acted("{} of {} elements are computed with as {}", read(ShardingCount::elements_converted),
               read(ShardingCount::elements_sharded), c10::toString(*policy_of(f).param_dtype));
}
Deed reduce_dtype(const ShardedFacts& f) {
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  if (!policy_of(f).reduce_dtype) return off("unset");
  if (read(ShardingCount::gradients_reduced) == 0) return not_due("nothing was trained");
  if (*policy_of(f).reduce_dtype == policy_of(f).param_dtype.value_or(at::kFloat))
    return nothing("gradients are computed as {} already", c10::toString(*policy_of(f).reduce_dtype));
  return acted("{} elements of gradients travelled in {}, as {}", read(ShardingCount::gradient_elements),
               bytes(read(ShardingCount::gradient_wire_bytes)), c10::toString(*policy_of(f).reduce_dtype));
}
Deed buffer_dtype(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!policy_of(f).buffer_dtype) return off("unset");
  if (read(ShardingCount::buffers_converted) == 0) return nothing("no buffer had another floating-point type");
  return acted("{} converted to {}", counted(read(ShardingCount::buffers_converted), "buffer was", "buffers were"),
               c10::toString(*policy_of(f).buffer_dtype));
}
Deed output_dtype(const ShardedFacts& f) {
  if (const auto none = no_forward(f)) return *none;
  if (!policy_of(f).output_dtype) return off("unset");
  return acted("results of {} came as {}", counted(read(ShardingCount::forwards_sharded), "forward", "forwards"),
               c10::toString(*policy_of(f).output_dtype));
}
Deed preset(const ShardedFacts& f) {
  if (const auto none = no_forward(f)) return *none;
  if (policy_of(f).preset.empty()) return off("unset");
  return param_dtype(f);
}
Deed keep_low_precision_grads(const ShardedFacts& f) {
  if (const auto none = no_forward(f)) return *none;
  if (!policy_of(f).keep_low_precision_grads) return off("off");
  if (read(ShardingCount::low_precision_gradients) == 0)
    return nothing("no gradient has a narrower type than its parameter (reduce_dtype)");
  return acted("optimizers got {} as they were reduced",
               counted(read(ShardingCount::low_precision_gradients), "gradient", "gradients"));
}
Deed casting(const ShardedFacts& f, bool casts) {
  if (const auto none = no_forward(f)) return *none;
  if (!policy_of(f).param_dtype) return nothing("there is no param_dtype to convert to");
  return casts ? acted("inputs of {} were converted to {}",
                       counted(read(ShardingCount::forwards_sharded), "forward", "forwards"),
                       c10::toString(*policy_of(f).param_dtype))
               : acted("inputs of {} came as they were",
                       counted(read(ShardingCount::forwards_sharded), "forward", "forwards"));
}
Deed cast_forward_inputs(const ShardedFacts& f) {
  if (const auto none = not_of_version(f, 2)) return *none;
  return casting(f, policy_of(f).cast_forward_inputs.value_or(true));
}
Deed cast_root_forward_inputs(const ShardedFacts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  return casting(f, policy_of(f).cast_root_forward_inputs);
}
Deed module_classes_to_ignore(const ShardedFacts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!policy_of(f).module_classes_to_ignore) return off("unset");
  const int64_t units = read(ShardingCount::full_precision_units);
  if (units > 0) return acted("{} compute in full precision", counted(units, "unit", "units"));
  const auto given = f.given.mixed_precision_policy.value_or(MixedPrecision{}).module_classes_to_ignore;
  return given && given->empty() ? acted("no module computes in full precision")
                                 : nothing("the models have no module of these classes");
}

constexpr ReceiptRow<ShardedFacts> kShardedRows[] = {
    {"fsdp_plugin.fsdp_version", "FSDP_VERSION", kSharding, fsdp<&Fsdp::fsdp_version>, fsdp_version},
    {"fsdp_plugin.sharding_strategy", "FSDP_SHARDING_STRATEGY", kOverRanks, fsdp<&Fsdp::sharding_strategy>,
     sharding_strategy},
    {"fsdp_plugin.reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD", kOverRanks, fsdp<&Fsdp::reshard_after_forward>,
     reshard_after_forward},
    {"fsdp_plugin.dp_replicate_size", nullptr, kOverRanks, fsdp<&Fsdp::dp_replicate_size>, replicas},
    {"fsdp_plugin.dp_shard_size", nullptr, kOverRanks, fsdp<&Fsdp::dp_shard_size>, replicas},
    {"fsdp_plugin.backward_prefetch", "FSDP_BACKWARD_PREFETCH", kOverRanks, fsdp<&Fsdp::backward_prefetch>,
     backward_prefetch},
    {"fsdp_plugin.auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY", kSharding, wrap_policy_asked, auto_wrap_policy},
    {"fsdp_plugin.cpu_offload.offload_params", "FSDP_OFFLOAD_PARAMS", kSharded,
     part<&Fsdp::cpu_offload, &CPUOffload::offload_params>, offload_params},
    {"fsdp_plugin.offload_folder", "FSDP_OFFLOAD_FOLDER", kSharded, offload_folder_asked, offload_folder},
    {"fsdp_plugin.cpu_offload.pin_memory", nullptr, "with offload_params",
     part<&Fsdp::cpu_offload, &CPUOffload::pin_memory>, pin_memory},
    {"fsdp_plugin.ignored_modules", "FSDP_IGNORED_MODULES", kSharding, ignored_modules_asked, ignored_modules},
    {"fsdp_plugin.state_dict_type", "FSDP_STATE_DICT_TYPE", kSaving, fsdp<&Fsdp::state_dict_type>, state_dict_type},
    {"fsdp_plugin.state_dict_config.offload_to_cpu", nullptr, "in get_state_dict()",
     part<&Fsdp::state_dict_config, &StateDictConfig::offload_to_cpu>, on_host<state_dict_config>},
    {"fsdp_plugin.state_dict_config.rank0_only", nullptr, "in get_state_dict()",
     part<&Fsdp::state_dict_config, &StateDictConfig::rank0_only>, state_dict_config},
    {"fsdp_plugin.optim_state_dict_config.offload_to_cpu", nullptr, "in get_optimizer_state_dict()",
     part<&Fsdp::optim_state_dict_config, &StateDictConfig::offload_to_cpu>, on_host<optim_state_dict_config>},
    {"fsdp_plugin.optim_state_dict_config.rank0_only", nullptr, "in get_optimizer_state_dict()",
     part<&Fsdp::optim_state_dict_config, &StateDictConfig::rank0_only>, optim_state_dict_config},
    {"fsdp_plugin.limit_all_gathers", nullptr, kOverRanks, fsdp<&Fsdp::limit_all_gathers>, limit_all_gathers},
    {"fsdp_plugin.use_orig_params", "FSDP_USE_ORIG_PARAMS", "never: it is always so", fsdp<&Fsdp::use_orig_params>,
     use_orig_params},
    {"fsdp_plugin.param_init_fn", nullptr, "for modules without memory", param_init_fn_asked, param_init_fn},
    {"fsdp_plugin.sync_module_states", "FSDP_SYNC_MODULE_STATES", kOverRanks, fsdp<&Fsdp::sync_module_states>,
     sync_module_states},
    {"fsdp_plugin.forward_prefetch", "FSDP_FORWARD_PREFETCH", kOverRanks, fsdp<&Fsdp::forward_prefetch>,
     forward_prefetch},
    {"fsdp_plugin.activation_checkpointing", "FSDP_ACTIVATION_CHECKPOINTING", "in backward()",
     fsdp<&Fsdp::activation_checkpointing>, activation_checkpointing},
    {"fsdp_plugin.activation_checkpointing_offload", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
     "where the device is not the CPU", fsdp<&Fsdp::activation_checkpointing_offload>,
     activation_checkpointing_offload},
    {"fsdp_plugin.cpu_ram_efficient_loading", "FSDP_CPU_RAM_EFFICIENT_LOADING", kOverRanks,
     fsdp<&Fsdp::cpu_ram_efficient_loading>, cpu_ram_efficient_loading},
    {"fsdp_plugin.transformer_cls_names_to_wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP", "with TRANSFORMER_BASED_WRAP",
     fsdp<&Fsdp::transformer_cls_names_to_wrap>, transformer_cls_names_to_wrap},
    {"fsdp_plugin.min_num_params", "FSDP_MIN_NUM_PARAMS", "with SIZE_BASED_WRAP", fsdp<&Fsdp::min_num_params>,
     min_num_params},
    {"fsdp_plugin.quantized_weights", "FSDP_QUANTIZED_WEIGHTS", kOverRanks, fsdp<&Fsdp::quantized_weights>,
     quantized_weights},
    {"fsdp_plugin.quantized_gradients", "FSDP_QUANTIZED_GRADIENTS", kOverRanks, fsdp<&Fsdp::quantized_gradients>,
     quantized_gradients},
    {"fsdp_plugin.quantized_nontrainable_weights", "FSDP_QUANTIZED_NONTRAINABLE_WEIGHTS", kSharding,
     fsdp<&Fsdp::quantized_nontrainable_weights>, quantized_nontrainable_weights},
    {"fsdp_plugin.step_in_backward", "FSDP_STEP_IN_BACKWARD", "in backward()", fsdp<&Fsdp::step_in_backward>,
     step_in_backward},
    {"fsdp_plugin.step_at_once", "FSDP_STEP_AT_ONCE", "in backward()", fsdp<&Fsdp::step_at_once>, step_at_once},
    {"fsdp_plugin.mixed_precision_policy.preset", nullptr, kSharded, policy<&MixedPrecision::preset>, preset},
    {"fsdp_plugin.mixed_precision_policy.param_dtype", nullptr, kSharded, policy<&MixedPrecision::param_dtype>,
     param_dtype},
    {"fsdp_plugin.mixed_precision_policy.reduce_dtype", nullptr, kOverRanks, policy<&MixedPrecision::reduce_dtype>,
     reduce_dtype},
    {"fsdp_plugin.mixed_precision_policy.buffer_dtype", nullptr, kSharded, policy<&MixedPrecision::buffer_dtype>,
     buffer_dtype},
    {"fsdp_plugin.mixed_precision_policy.output_dtype", nullptr, kSharded, policy<&MixedPrecision::output_dtype>,
     output_dtype},
    {"fsdp_plugin.mixed_precision_policy.keep_low_precision_grads", nullptr, kSharded,
     policy<&MixedPrecision::keep_low_precision_grads>, keep_low_precision_grads},
    {"fsdp_plugin.mixed_precision_policy.cast_forward_inputs", nullptr, kSharded,
     policy<&MixedPrecision::cast_forward_inputs>, cast_forward_inputs},
    {"fsdp_plugin.mixed_precision_policy.cast_root_forward_inputs", nullptr, kSharded,
     policy<&MixedPrecision::cast_root_forward_inputs>, cast_root_forward_inputs},
    {"fsdp_plugin.mixed_precision_policy.module_classes_to_ignore", nullptr, kSharded,
     policy<&MixedPrecision::module_classes_to_ignore>, module_classes_to_ignore},
    {"parallelism_config.dp_replicate_size", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", kOverRanks,
     parallelism<&ParallelismConfig::dp_replicate_size>, axis},
    {"parallelism_config.dp_shard_size", "PARALLELISM_CONFIG_DP_SHARD_SIZE", kOverRanks,
     parallelism<&ParallelismConfig::dp_shard_size>, axis},
};

}  // namespace

std::vector<Receipt> of_sharding(const ShardedFacts& facts) { return made(kShardedRows, facts); }

}  // namespace accelerate::receipts
