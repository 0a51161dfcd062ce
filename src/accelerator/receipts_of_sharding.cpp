/// Receipts of FullyShardedDataParallelPlugin and ParallelismConfig.

#include <strings.h>

#include "accelerator/receipts.hpp"
#include "utils/environment.hpp"

namespace accelerate::receipts {
namespace {

using Fsdp = FullyShardedDataParallelPlugin;
using parallel::effective_strategy;

template <auto Field> Asked fsdp(const Facts& f) { return asked<&Facts::fsdp, Field>(f); }
template <auto Field> Asked policy(const Facts& f) { return asked<&Facts::precision_policy, Field>(f); }
template <auto Field> Asked parallelism(const Facts& f) { return asked<&Facts::parallelism, Field>(f); }

constexpr const char* kSharded = "in sharded models";
constexpr const char* kSharding = "in prepare() of sharded models";
constexpr const char* kOverRanks = "in models sharded over several processes";

/// Plugins without a model to shard, or without anything to do.
std::optional<Deed> no_sharding(const Facts& f) {
  if (!f.sharding) return nothing("models are not sharded (no fsdp_plugin, no --use_fsdp)");
  if (f[Count::units] == 0) return not_due("no model was prepared");
  return std::nullopt;
}
std::optional<Deed> no_sharding_over_ranks(const Facts& f) {
  if (const auto none = no_sharding(f)) return none;
  if (f.ranks == 1) return nothing("one process holds everything");
  return std::nullopt;
}
/// What is about units that come and go.
std::optional<Deed> no_gathering(const Facts& f) {
  if (const auto none = no_sharding_over_ranks(f)) return none;
  if (f[Count::elements_held] == f[Count::elements_sharded]) return nothing("every rank holds the whole model");
  if (f[Count::units_shared] > 0)
    return nothing("the ranks of this host see all parameters in shared memory, so nothing is gathered or given back");
  if (f[Count::forwards_sharded] == 0) return not_due("no prepared model was called");
  return std::nullopt;
}
std::optional<Deed> not_of_version(const Facts& f, int64_t version) {
  if (f.sharding && f.sharding->fsdp_version != version)
    return nothing("fsdp_version is {}, and only {} has it", *f.sharding->fsdp_version, version);
  return std::nullopt;
}
std::string shares(const Facts& f) {
  return fmt::format("this rank holds {} of {} elements (with padding), in {}", f[Count::elements_held],
                     f[Count::elements_sharded], counted(f[Count::units], "unit", "units"));
}

Deed fsdp_version(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  return acted("the other settings were read as those of version {}", *f.sharding->fsdp_version);
}
Deed sharding_strategy(const Facts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  return acted("{}: {}", to_string(effective_strategy(*f.sharding)), shares(f));
}
Deed reshard_after_forward(const Facts& f) {
  if (f.sharding && f.sharding->fsdp_version == 1) {
    // The launcher makes a strategy that stands there the other setting.
    const auto given = environment::text("FSDP_RESHARD_AFTER_FORWARD");
    const std::string strategy = to_string(effective_strategy(*f.sharding));
    if (f.sharding->reshard_after_forward || (given && ::strcasecmp(given->c_str(), strategy.c_str()) == 0))
      return sharding_strategy(f);
    return nothing("in version 1 it is a strategy, and another is in force: {}", strategy);
  }
  if (const auto none = no_gathering(f)) return *none;
  if (f[Count::units] == 1) return nothing("all parameters are in one unit, which stays; auto_wrap_policy makes more");
  return acted("units were gathered {} and given back {}", counted(f.fetches, "time", "times"),
               counted(f.evictions, "time", "times"));
}
Deed replicas(const Facts& f) {
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  if (f[Count::replica_gradients] > 0)
    return acted("{}; gradients of {} were averaged over replicas", shares(f),
                 counted(f[Count::replica_gradients], "part", "parts"));
  return acted("{}", shares(f));
}
/// Of a ParallelismConfig, which may be about data parallelism alone.
Deed axis(const Facts& f) {
  if (f.sharding) return replicas(f);
  if (f.ranks == 1) return nothing("one process is not laid out");
  return acted("{} ranks hold a whole model each and average their gradients", f.ranks);
}
Deed fetching_ahead(const Facts& f) {
  if (const auto none = no_gathering(f)) return *none;
  return acted("{} of {} gathers were under way before their unit was needed", f.fetches_ahead, f.fetches);
}
Deed backward_prefetch(const Facts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  return fetching_ahead(f);
}
Deed forward_prefetch(const Facts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  if (f.sharding && !f.sharding->forward_prefetch.value_or(false)) return off("off");
  return fetching_ahead(f);
}
Deed limit_all_gathers(const Facts& f) {
  if (const auto none = no_gathering(f)) return *none;
  return acted("at most {} at a time",
               counted(f[Count::fetches_most], "gather was under way", "gathers were under way"));
}
Deed auto_wrap_policy(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  const int64_t units = f[Count::units];
  if (units > f.models) return acted("models were cut into {}", counted(units, "unit", "units"));
  return f.fsdp.auto_wrap_policy ? nothing("no module became a unit besides the whole model")
                                 : off("the whole model is one unit");
}
Asked wrap_policy_asked(const Facts& f) {
  const auto& given = f.fsdp.auto_wrap_policy;
  if (!given) return {false, "unset"};
  const auto* policy = std::get_if<AutoWrapPolicy>(&*given);
  return {true, policy ? to_string(*policy) : "a function"};
}
Deed transformer_cls_names_to_wrap(const Facts& f) {
  if (!f.sharding || !f.sharding->transformer_cls_names_to_wrap) return no_sharding(f).value_or(off("unset"));
  const auto* wrap = std::get_if<AutoWrapPolicy>(&*f.sharding->auto_wrap_policy);
  if (!wrap || *wrap != AutoWrapPolicy::transformer_based_wrap)
    return nothing("auto_wrap_policy is not TRANSFORMER_BASED_WRAP");
  return auto_wrap_policy(f);
}
Deed min_num_params(const Facts& f) {
  if (!f.sharding || !f.sharding->min_num_params) return no_sharding(f).value_or(off("unset"));
  const auto* wrap = std::get_if<AutoWrapPolicy>(&*f.sharding->auto_wrap_policy);
  if (!wrap || *wrap != AutoWrapPolicy::size_based_wrap) return nothing("auto_wrap_policy is not SIZE_BASED_WRAP");
  return auto_wrap_policy(f);
}

Deed offload_params(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->cpu_offload->offload_params) return off("off");
  if (f[Count::parts_offloaded] == 0)
    return nothing("the device is the {}, so parameters are on the host already", f.device.str());
  return acted("{} of units live on the host", counted(f[Count::parts_offloaded], "part", "parts"));
}
Deed pin_memory(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->cpu_offload->offload_params) return nothing("offload_params is off");
  if (f[Count::parts_offloaded] == 0)
    return nothing("the device is the {}, which needs no page-locked memory", f.device.str());
  return acted("in page-locked memory: {} of {}", f[Count::parts_pinned],
               counted(f[Count::parts_offloaded], "part", "parts"));
}
Deed ignored_modules(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->ignored_modules) return off("unset");
  if (f[Count::parameters_ignored] == 0) return nothing("no module of the prepared models is meant by it");
  return acted("{} left alone", counted(f[Count::parameters_ignored], "parameter was", "parameters were"));
}
Asked ignored_modules_asked(const Facts& f) {
  const auto& given = f.fsdp.ignored_modules;
  if (!given) return {false, "unset"};
  const auto* pattern = std::get_if<std::string>(&*given);
  return {true, pattern ? *pattern : "a list"};
}

// ---- states

Deed state_dict_type(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (f[Count::checkpoints] == 0) return not_due("nothing was saved");
  return acted("{} written as {}", counted(f[Count::checkpoints], "checkpoint was", "checkpoints were"),
               to_string(*f.sharding->state_dict_type));
}
Deed whole_states(const Facts& f, Count which, const std::optional<StateDictConfig>& config, const char* function) {
  if (const auto none = no_sharding(f)) return *none;
  if (f.sharding->state_dict_type != StateDictType::full_state_dict)
    return nothing("state_dict_type is {}, whose pieces go to files only", to_string(*f.sharding->state_dict_type));
  if (f[which] == 0) return not_due("{}() was not called", function);
  return acted("{} given to {}, {}", counted(f[which], "whole state was", "whole states were"),
               config->rank0_only.value_or(true) ? "rank 0" : "all ranks",
               config->offload_to_cpu ? "on the host" : "on their device");
}
Deed state_dict_config(const Facts& f) {
  return whole_states(f, Count::whole_states, f.sharding ? f.sharding->state_dict_config : std::nullopt,
                      "get_state_dict");
}
Deed optim_state_dict_config(const Facts& f) {
  return whole_states(f, Count::whole_optimizer_states, f.sharding ? f.sharding->optim_state_dict_config : std::nullopt,
                      "get_optimizer_state_dict");
}

/// Of offload_to_cpu, which is about devices that are not the CPU.
template <Deed (*Of)(const Facts&)> Deed on_host(const Facts& f) {
  if (f.sharding && f.device.is_cpu()) return nothing("the device is the CPU, so states are on the host already");
  return Of(f);
}

// ---- starting

Deed use_orig_params(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (const auto none = not_of_version(f, 1)) return *none;
  if (f.sharding->use_orig_params.value_or(false))
    return acted("parameters are the original ones, as they always are here");
  return f.fsdp.use_orig_params ? nothing("parameters are the original ones here, always")
                                : off("parameters are the original ones here, always");
}
Deed param_init_fn(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.fsdp.param_init_fn) return off("unset");
  if (f[Count::modules_initialised] == 0) return nothing("no parameter was without memory (init_empty_weights)");
  return acted("called for {}", counted(f[Count::modules_initialised], "module", "modules"));
}
Asked param_init_fn_asked(const Facts& f) {
  const bool given = f.fsdp.param_init_fn != nullptr;
  return {given, given ? "a function" : "unset"};
}
Deed from_rank0(const Facts& f, bool on) {
  if (!on) return off("off");
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  return acted("{}, {}, from rank 0", counted(f[Count::tensors_from_rank0], "tensor", "tensors"),
               bytes(f[Count::bytes_from_rank0]));
}
Deed sync_module_states(const Facts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  return from_rank0(f, f.sharding && f.sharding->sync_module_states.value_or(false));
}
Deed cpu_ram_efficient_loading(const Facts& f) {
  return from_rank0(f, f.sharding && f.sharding->cpu_ram_efficient_loading.value_or(false));
}
Deed activation_checkpointing(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->activation_checkpointing.value_or(false)) return off("off");
  if (f[Count::units_recomputed] == 0) return not_due("nothing was trained");
  return acted("units were recomputed {}", counted(f[Count::units_recomputed], "time", "times"));
}
Deed activation_checkpointing_offload(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.sharding->activation_checkpointing_offload.value_or(false)) return off("off");
  if (f.device.is_cpu()) return nothing("the device is the CPU, so inputs of units are on the host already");
  if (f[Count::inputs_offloaded] == 0) return not_due("nothing was trained");
  return acted("{} of units waited on the host", counted(f[Count::inputs_offloaded], "input", "inputs"));
}

// ---- mixed_precision_policy

std::optional<Deed> no_forward(const Facts& f) {
  if (const auto none = no_sharding(f)) return none;
  if (f[Count::forwards_sharded] == 0) return not_due("no prepared model was called");
  return std::nullopt;
}
Deed param_dtype(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.policy().param_dtype) return off("unset");
  if (f[Count::elements_converted] == 0)
    return nothing("parameters are {} already", c10::toString(*f.policy().param_dtype));
  return acted("{} of {} elements are computed with as {}", f[Count::elements_converted], f[Count::elements_sharded],
               c10::toString(*f.policy().param_dtype));
}
Deed reduce_dtype(const Facts& f) {
  if (const auto none = no_sharding_over_ranks(f)) return *none;
  if (!f.policy().reduce_dtype) return off("unset");
  if (f[Count::gradients_reduced] == 0) return not_due("nothing was trained");
  if (*f.policy().reduce_dtype == f.policy().param_dtype.value_or(at::kFloat))
    return nothing("gradients are computed as {} already", c10::toString(*f.policy().reduce_dtype));
  return acted("{} elements of gradients travelled in {}, as {}", f[Count::gradient_elements],
               bytes(f[Count::gradient_wire_bytes]), c10::toString(*f.policy().reduce_dtype));
}
Deed buffer_dtype(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.policy().buffer_dtype) return off("unset");
  if (f[Count::buffers_converted] == 0) return nothing("no buffer had another floating-point type");
  return acted("{} converted to {}", counted(f[Count::buffers_converted], "buffer was", "buffers were"),
               c10::toString(*f.policy().buffer_dtype));
}
Deed output_dtype(const Facts& f) {
  if (const auto none = no_forward(f)) return *none;
  if (!f.policy().output_dtype) return off("unset");
  return acted("results of {} came as {}", counted(f[Count::forwards_sharded], "forward", "forwards"),
               c10::toString(*f.policy().output_dtype));
}
Deed preset(const Facts& f) {
  if (const auto none = no_forward(f)) return *none;
  if (f.policy().preset.empty()) return off("unset");
  return param_dtype(f);
}
Deed keep_low_precision_grads(const Facts& f) {
  if (const auto none = no_forward(f)) return *none;
  if (!f.policy().keep_low_precision_grads) return off("off");
  if (f[Count::low_precision_gradients] == 0)
    return nothing("no gradient has a narrower type than its parameter (reduce_dtype)");
  return acted("optimizers got {} as they were reduced",
               counted(f[Count::low_precision_gradients], "gradient", "gradients"));
}
Deed casting(const Facts& f, bool casts) {
  if (const auto none = no_forward(f)) return *none;
  if (!f.policy().param_dtype) return nothing("there is no param_dtype to convert to");
  return casts ? acted("inputs of {} were converted to {}", counted(f[Count::forwards_sharded], "forward", "forwards"),
                       c10::toString(*f.policy().param_dtype))
               : acted("inputs of {} came as they were", counted(f[Count::forwards_sharded], "forward", "forwards"));
}
Deed cast_forward_inputs(const Facts& f) {
  if (const auto none = not_of_version(f, 2)) return *none;
  return casting(f, f.policy().cast_forward_inputs.value_or(true));
}
Deed cast_root_forward_inputs(const Facts& f) {
  if (const auto none = not_of_version(f, 1)) return *none;
  return casting(f, f.policy().cast_root_forward_inputs);
}
Deed module_classes_to_ignore(const Facts& f) {
  if (const auto none = no_sharding(f)) return *none;
  if (!f.policy().module_classes_to_ignore) return off("unset");
  const int64_t units = f[Count::full_precision_units];
  if (units > 0) return acted("{} compute in full precision", counted(units, "unit", "units"));
  const auto& given = f.precision_policy.module_classes_to_ignore;
  return given && given->empty() ? acted("no module computes in full precision")
                                 : nothing("the models have no module of these classes");
}

}  // namespace

std::vector<Row> rows_of_sharding() {
  return {
      {"fsdp_plugin.fsdp_version", "FSDP_VERSION", kSharding, fsdp<&Fsdp::fsdp_version>, fsdp_version},
      {"fsdp_plugin.sharding_strategy", "FSDP_SHARDING_STRATEGY", kOverRanks, fsdp<&Fsdp::sharding_strategy>,
       sharding_strategy},
      {"fsdp_plugin.reshard_after_forward", "FSDP_RESHARD_AFTER_FORWARD", kOverRanks,
       fsdp<&Fsdp::reshard_after_forward>, reshard_after_forward},
      {"fsdp_plugin.dp_replicate_size", nullptr, kOverRanks, fsdp<&Fsdp::dp_replicate_size>, replicas},
      {"fsdp_plugin.dp_shard_size", nullptr, kOverRanks, fsdp<&Fsdp::dp_shard_size>, replicas},
      {"fsdp_plugin.backward_prefetch", "FSDP_BACKWARD_PREFETCH", kOverRanks, fsdp<&Fsdp::backward_prefetch>,
       backward_prefetch},
      {"fsdp_plugin.auto_wrap_policy", "FSDP_AUTO_WRAP_POLICY", kSharding, wrap_policy_asked, auto_wrap_policy},
      {"fsdp_plugin.cpu_offload.offload_params", "FSDP_OFFLOAD_PARAMS", kSharded,
       asked<&Facts::cpu_offload, &CPUOffload::offload_params>, offload_params},
      {"fsdp_plugin.cpu_offload.pin_memory", nullptr, "with offload_params",
       asked<&Facts::cpu_offload, &CPUOffload::pin_memory>, pin_memory},
      {"fsdp_plugin.ignored_modules", "FSDP_IGNORED_MODULES", kSharding, ignored_modules_asked, ignored_modules},
      {"fsdp_plugin.state_dict_type", "FSDP_STATE_DICT_TYPE", kSaving, fsdp<&Fsdp::state_dict_type>, state_dict_type},
      {"fsdp_plugin.state_dict_config.offload_to_cpu", nullptr, "in get_state_dict()",
       asked<&Facts::state_dict_config, &StateDictConfig::offload_to_cpu>, on_host<state_dict_config>},
      {"fsdp_plugin.state_dict_config.rank0_only", nullptr, "in get_state_dict()",
       asked<&Facts::state_dict_config, &StateDictConfig::rank0_only>, state_dict_config},
      {"fsdp_plugin.optim_state_dict_config.offload_to_cpu", nullptr, "in get_optimizer_state_dict()",
       asked<&Facts::optim_state_dict_config, &StateDictConfig::offload_to_cpu>, on_host<optim_state_dict_config>},
      {"fsdp_plugin.optim_state_dict_config.rank0_only", nullptr, "in get_optimizer_state_dict()",
       asked<&Facts::optim_state_dict_config, &StateDictConfig::rank0_only>, optim_state_dict_config},
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
}

}  // namespace accelerate::receipts
