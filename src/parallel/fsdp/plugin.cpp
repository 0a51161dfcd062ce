#include "accelerate/parallel/fsdp_plugin.hpp"

#include <algorithm>
#include <cctype>
#include <span>
#include <utility>
#include <variant>

#include "accelerate/config.hpp"
#include "parallel/fsdp/wrap_policy.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::string upper(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return std::toupper(c); });
  return result;
}

/// Names of an enum's values, in their order.
template <class Enum> struct EnumNames {
  const char* what;
  Enum first;
  /// As many of them, from the first, may be given by number, from 1.
  int64_t numbered;
  std::vector<std::string> names;

  std::string name_of(Enum value) const { return names.at(static_cast<size_t>(value) - static_cast<size_t>(first)); }

  Enum parse(std::string_view given) const {
    const auto value = [this](size_t index) { return static_cast<Enum>(static_cast<size_t>(first) + index); };
    const std::string word = upper(given);
    for (size_t i = 0; i < names.size(); ++i)
      if (word == names[i] || (static_cast<int64_t>(i) < numbered && word == std::to_string(i + 1))) return value(i);
    const auto nearest = nearest_name(word, names);
    raise<ConfigError>("FSDP plugin: {} is '{}', expected one of {}{}{}", what, given, fmt::join(names, ", "),
                       numbered ? fmt::format(", or a number from 1 to {}", numbered) : "",
                       nearest ? fmt::format("; did you mean {}?", *nearest) : "");
  }
};

const EnumNames<ShardingStrategy>& sharding_strategies() {
  static const EnumNames<ShardingStrategy> names{
      "the sharding strategy (FSDP_SHARDING_STRATEGY)",
      ShardingStrategy::full_shard,
      5,
      {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}};
  return names;
}

const EnumNames<BackwardPrefetch>& backward_prefetches() {
  static const EnumNames<BackwardPrefetch> names{"the backward prefetch (FSDP_BACKWARD_PREFETCH)",
                                                 BackwardPrefetch::backward_pre,
                                                 2,
                                                 {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}};
  return names;
}

const EnumNames<StateDictType>& state_dict_types() {
  static const EnumNames<StateDictType> names{"the state dict type (FSDP_STATE_DICT_TYPE)",
                                              StateDictType::full_state_dict,
                                              3,
                                              {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}};
  return names;
}

const EnumNames<AutoWrapPolicy>& auto_wrap_policies() {
  static const EnumNames<AutoWrapPolicy> names{"the auto wrap policy (FSDP_AUTO_WRAP_POLICY)",
                                               AutoWrapPolicy::transformer_based_wrap,
                                               0,
                                               {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}};
  return names;
}

}  // namespace

ShardingStrategy parse_sharding_strategy(std::string_view name) {
  return upper(name) == "_HYBRID_SHARD_ZERO2" ? ShardingStrategy::hybrid_shard_zero2
                                              : sharding_strategies().parse(name);
}
BackwardPrefetch parse_backward_prefetch(std::string_view name) { return backward_prefetches().parse(name); }
StateDictType parse_state_dict_type(std::string_view name) { return state_dict_types().parse(name); }
AutoWrapPolicy parse_auto_wrap_policy(std::string_view name) { return auto_wrap_policies().parse(name); }
std::string to_string(ShardingStrategy value) { return sharding_strategies().name_of(value); }
std::string to_string(BackwardPrefetch value) { return backward_prefetches().name_of(value); }
std::string to_string(StateDictType value) { return state_dict_types().name_of(value); }
std::string to_string(AutoWrapPolicy value) { return auto_wrap_policies().name_of(value); }

namespace parallel {
namespace {

template <class... Args> [[noreturn]] void refuse_fsdp(fmt::format_string<Args...> text, Args&&... args) {
  raise<ConfigError>("FSDP plugin: {}", fmt::format(text, std::forward<Args>(args)...));
}

bool flag_or_false(const char* name) { return environment::flag(name).value_or(false); }

at::ScalarType dtype_of(std::string_view name) {
  if (name == "fp16") return at::kHalf;
  if (name == "bf16" || name == "fp8") return at::kBFloat16;  // 8-bit products are taken from, and give, 16-bit tensors
  if (name == "fp32") return at::kFloat;
  const auto nearest = nearest_name(name, {"fp8", "fp16", "bf16", "fp32"});
  refuse_fsdp("the mixed precision policy is '{}', expected one of fp8, fp16, bf16, fp32{}", name,
              nearest ? fmt::format("; did you mean {}?", *nearest) : "");
}

MixedPrecision resolve(MixedPrecision policy, int64_t version) {
  const auto only = [](bool set, const char* field, int64_t needed) {
    if (set)
      refuse_fsdp(
          "mixed_precision_policy.{0} is set, but only fsdp_version {1} has it; leave it out, or set fsdp_version to "
          "{1}",
          field, needed);
  };
  only(version == 1 && policy.output_dtype.has_value(), "output_dtype", 2);
  only(version == 2 && policy.buffer_dtype.has_value(), "buffer_dtype", 1);
  only(version == 2 && policy.keep_low_precision_grads, "keep_low_precision_grads", 1);
  only(version == 2 && !policy.cast_root_forward_inputs, "cast_root_forward_inputs", 1);
  only(version == 2 && policy.module_classes_to_ignore.has_value(), "module_classes_to_ignore", 1);
  auto& last = version == 1 ? policy.buffer_dtype : policy.output_dtype;
  if (!policy.preset.empty()) {
    const auto dtype = dtype_of(policy.preset);
    for (auto* field : {&policy.param_dtype, &policy.reduce_dtype, &last})
      if (!*field) *field = dtype;
  }
  for (const auto& field : {policy.param_dtype, policy.reduce_dtype, last})
    if (field && !at::isFloatingType(*field))
      refuse_fsdp(
          "mixed_precision_policy has the dtype {}, expected floating-point types such as Half, BFloat16 or Float",
          at::toString(*field));
  if (version == 1 && policy.cast_forward_inputs.value_or(false))
    refuse_fsdp(
        "mixed_precision_policy.cast_forward_inputs is true, which in fsdp_version 1 is about the inputs of units "
        "within the model, but calls of LibTorch's modules can't be seen, expected false; cast_root_forward_inputs "
        "converts the model's inputs, and x.to(...) in a forward those of a module");
  if (!policy.cast_forward_inputs) policy.cast_forward_inputs = version == 2;
  if (version == 1 && !policy.module_classes_to_ignore) policy.module_classes_to_ignore = batch_norm_classes();
  return policy;
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard || strategy == ShardingStrategy::hybrid_shard_zero2;
}

/// After the strategy.
void resolve_replicas(FullyShardedDataParallelPlugin& plugin, int64_t version) {
  if (flag_or_false("ACCELERATE_USE_PARALLELISM_CONFIG") && !plugin.dp_replicate_size && !plugin.dp_shard_size) {
    const auto given = [](const char* name) {
      const auto ranks = environment::integer({name});
      return ranks && *ranks != 1 ? ranks : std::nullopt;
    };
    plugin.dp_replicate_size = given("PARALLELISM_CONFIG_DP_REPLICATE_SIZE");
    plugin.dp_shard_size = given("PARALLELISM_CONFIG_DP_SHARD_SIZE");
  }
  for (const auto& [name, ranks] :
       {std::pair("dp_replicate_size", plugin.dp_replicate_size), std::pair("dp_shard_size", plugin.dp_shard_size)})
    if (ranks && *ranks < 1) refuse_fsdp("{} is {}, expected a number of ranks, 1 at least", name, *ranks);
  if (version == 1 && plugin.dp_replicate_size.value_or(1) > 1 && !is_hybrid(effective_strategy(plugin)))
    refuse_fsdp(
        "dp_replicate_size is {}, but the sharding strategy {} has no replicas; use HYBRID_SHARD or "
        "HYBRID_SHARD_ZERO2, or leave it out",
        *plugin.dp_replicate_size, to_string(effective_strategy(plugin)));
}

/// A truth value, or a number of ranks from 2 on.
std::variant<bool, int64_t, ShardingStrategy> reshard_of_environment() {
  constexpr const char* kVariable = "FSDP_RESHARD_AFTER_FORWARD";
  const auto text = environment::text(kVariable);
  const bool is_number = text && !text->empty() && *text != "0" && *text != "1" &&
                         std::all_of(text->begin(), text->end(), [](unsigned char c) { return std::isdigit(c); });
  if (is_number) return environment::integer({kVariable}).value();
  return environment::flag(kVariable).value_or(true);
}

void resolve_sharding(FullyShardedDataParallelPlugin& plugin, int64_t version) {
  auto& reshard = plugin.reshard_after_forward;
  if (version == 1) {
    if (reshard && !std::holds_alternative<ShardingStrategy>(*reshard))
      refuse_fsdp(
          "reshard_after_forward is a bool or a number, which only fsdp_version 2 knows. In version 1 give a "
          "ShardingStrategy: full_shard is true, shard_grad_op is false");
    if (reshard && plugin.sharding_strategy && *plugin.sharding_strategy != std::get<ShardingStrategy>(*reshard))
      refuse_fsdp(
          "sharding_strategy is {}, but reshard_after_forward is {}. In version 1 both mean the same setting; give one "
          "of them",
          to_string(*plugin.sharding_strategy), to_string(std::get<ShardingStrategy>(*reshard)));
    if (!plugin.sharding_strategy)
      plugin.sharding_strategy =
          parse_sharding_strategy(environment::text("FSDP_SHARDING_STRATEGY").value_or("FULL_SHARD"));
    return;
  }
  // As in the reference, a sharding_strategy keeps the environment's value out: whoever writes version 1's setting has
  // to say what it means in version 2.
  if (!reshard && !plugin.sharding_strategy) reshard = reshard_of_environment();
  if (!reshard || std::holds_alternative<ShardingStrategy>(*reshard))
    refuse_fsdp(
        "fsdp_version 2 has no sharding strategies ({} was given), expected reshard_after_forward as a bool or a "
        "number: true is FULL_SHARD, false is SHARD_GRAD_OP; the hybrid ones are these with dp_replicate_size",
        to_string(reshard ? std::get<ShardingStrategy>(*reshard) : *plugin.sharding_strategy));
  if (const auto* ranks = std::get_if<int64_t>(&*reshard)) {
    if (*ranks < 1)
      refuse_fsdp(
          "reshard_after_forward is {}, expected true, false or a number of ranks, which must divide those that the "
          "model is sharded over",
          *ranks);
    if (*ranks == 1) reshard = false;  // split over one rank is not split
  }
}

void resolve_state_dict(FullyShardedDataParallelPlugin& plugin, int64_t version) {
  if (!plugin.state_dict_type)
    plugin.state_dict_type = parse_state_dict_type(
        environment::text("FSDP_STATE_DICT_TYPE").value_or(version == 1 ? "FULL_STATE_DICT" : "SHARDED_STATE_DICT"));
  const bool full = *plugin.state_dict_type == StateDictType::full_state_dict;
  const bool local = *plugin.state_dict_type == StateDictType::local_state_dict;
  if (version == 2 && local)
    refuse_fsdp(
        "state_dict_type is LOCAL_STATE_DICT, which fsdp_version 2 does not have: its shards always belong to named "
        "tensors. Set it to SHARDED_STATE_DICT or FULL_STATE_DICT");
  const auto resolve_config = [&](const char* name, std::optional<StateDictConfig>& config) {
    if (!config && !local) config = StateDictConfig{};
    if (!config) return;
    if (!full && config->rank0_only.value_or(false))
      refuse_fsdp("{} has rank0_only, but state_dict_type is {}, of which every rank has a part; use FULL_STATE_DICT",
                  name, to_string(*plugin.state_dict_type));
    if (!full && !config->offload_to_cpu)
      refuse_fsdp(
          "{} has offload_to_cpu = false, but state_dict_type is {}, whose pieces never come to the program and go "
          "to files through the host, expected true; leave it out, or use FULL_STATE_DICT",
          name, to_string(*plugin.state_dict_type));
    if (!config->rank0_only) config->rank0_only = full;
  };
  resolve_config("state_dict_config", plugin.state_dict_config);
  resolve_config("optim_state_dict_config", plugin.optim_state_dict_config);
}

void resolve_wrapping(FullyShardedDataParallelPlugin& plugin) {
  if (!plugin.auto_wrap_policy)
    plugin.auto_wrap_policy = parse_auto_wrap_policy(environment::text("FSDP_AUTO_WRAP_POLICY").value_or("NO_WRAP"));
  if (const auto* function = std::get_if<WrapFunction>(&*plugin.auto_wrap_policy); function && !*function)
    refuse_fsdp("auto_wrap_policy is an empty function; leave it unset for NO_WRAP");
  const auto* policy = std::get_if<AutoWrapPolicy>(&*plugin.auto_wrap_policy);
  if (policy && *policy == AutoWrapPolicy::transformer_based_wrap && !plugin.transformer_cls_names_to_wrap) {
    if (auto names = environment::text("FSDP_TRANSFORMER_CLS_TO_WRAP")) {
      plugin.transformer_cls_names_to_wrap.emplace();
      for (size_t begin = 0; begin <= names->size();) {
        const size_t end = std::min(names->find(',', begin), names->size());
        plugin.transformer_cls_names_to_wrap->push_back(names->substr(begin, end - begin));
        begin = end + 1;
      }
    }
  }
  if (policy && *policy == AutoWrapPolicy::size_based_wrap && !plugin.min_num_params)
    plugin.min_num_params = environment::integer({"FSDP_MIN_NUM_PARAMS"}).value_or(0);
  if (plugin.min_num_params && *plugin.min_num_params < 0)
    refuse_fsdp("min_num_params is {}, expected a number of parameter elements, or 0 to wrap nothing",
                *plugin.min_num_params);
}

void resolve_few_bits(FullyShardedDataParallelPlugin& plugin) {
  const auto decide = [&](std::optional<bool>& field, const char* name, const char* variable, bool travels) {
    if (!field) field = flag_or_false(variable);
    if (*field && travels && effective_strategy(plugin) == ShardingStrategy::no_shard)
      refuse_fsdp(
          "{} ({}) is true, but NO_SHARD leaves the model whole on each rank, so that no shards travel, expected "
          "another sharding strategy; or leave it out, and choose a comm_hook of DistributedDataParallelKwargs without "
          "fsdp_plugin",
          name, variable);
  };
  decide(plugin.quantized_weights, "quantized_weights", "FSDP_QUANTIZED_WEIGHTS", true);
  decide(plugin.quantized_gradients, "quantized_gradients", "FSDP_QUANTIZED_GRADIENTS", true);
  decide(plugin.quantized_nontrainable_weights, "quantized_nontrainable_weights", "FSDP_QUANTIZED_NONTRAINABLE_WEIGHTS",
         false);
}

}  // namespace

bool fsdp_requested() { return flag_or_false("ACCELERATE_USE_FSDP"); }

MixedPrecision mixed_precision_policy(std::string_view name, int64_t fsdp_version) {
  dtype_of(name);  // refuses an empty name too
  return resolve(MixedPrecision{.preset = std::string(name)}, fsdp_version);
}

FullyShardedDataParallelPlugin resolve(FullyShardedDataParallelPlugin plugin) {
  std::string warnings;
  const auto warn = [&](const std::string& text) { warnings += "\n  " + text; };

  if (!plugin.fsdp_version) plugin.fsdp_version = environment::integer({"FSDP_VERSION"}).value_or(1);
  const int64_t version = *plugin.fsdp_version;
  if (version != 1 && version != 2) refuse_fsdp("fsdp_version (FSDP_VERSION) is {}, expected 1 or 2", version);

  resolve_sharding(plugin, version);
  resolve_replicas(plugin, version);
  if (version == 2 && plugin.sharding_strategy)
    warn("sharding_strategy has no effect with fsdp_version 2, reshard_after_forward decides; leave it out.");

  if (!plugin.cpu_offload) plugin.cpu_offload = CPUOffload(flag_or_false("FSDP_OFFLOAD_PARAMS"));
  if (!plugin.offload_folder)
    if (const auto folder = environment::text("FSDP_OFFLOAD_FOLDER"); !folder.value_or("").empty())
      plugin.offload_folder = *folder;
  if (plugin.offload_folder) plugin.cpu_offload->offload_params = true;

  if (!plugin.backward_prefetch)
    plugin.backward_prefetch =
        parse_backward_prefetch(environment::text("FSDP_BACKWARD_PREFETCH").value_or("NO_PREFETCH"));
  if (version == 2) {
    if (*plugin.backward_prefetch != BackwardPrefetch::no_prefetch)
      warn("backward_prefetch has no effect with fsdp_version 2, which always fetches one unit ahead; leave it out.");
    plugin.backward_prefetch.reset();
  }

  resolve_state_dict(plugin, version);
  resolve_wrapping(plugin);
  resolve_few_bits(plugin);

  const auto of_version_1 = [&](std::optional<bool>& field, const char* name, const char* variable, const char* why) {
    if (version == 1) {
      if (!field) field = flag_or_false(variable);
    } else if (field) {
      warn(fmt::format("{} has no effect with fsdp_version 2, {}; leave it out.", name, why));
      field.reset();
    }
  };
  of_version_1(plugin.use_orig_params, "use_orig_params", "FSDP_USE_ORIG_PARAMS",
               "which always keeps the original parameters");
  of_version_1(plugin.sync_module_states, "sync_module_states", "FSDP_SYNC_MODULE_STATES",
               "which starts from what each rank has, or from rank 0 with cpu_ram_efficient_loading");
  if (version == 2 && plugin.forward_prefetch)
    refuse_fsdp("forward_prefetch is set, but only fsdp_version 1 has it; leave it out, or set fsdp_version to 1");
  if (version == 1 && !plugin.forward_prefetch) plugin.forward_prefetch = flag_or_false("FSDP_FORWARD_PREFETCH");

  if (!plugin.activation_checkpointing)
    plugin.activation_checkpointing = flag_or_false("FSDP_ACTIVATION_CHECKPOINTING");
  if (!plugin.activation_checkpointing_offload) {
    const bool asked = flag_or_false("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD");
    // Files and launchers share it with other programs; what the program itself sets has to fit together.
    if (asked && !*plugin.activation_checkpointing)
      warn(
          "activation_checkpointing_offload (FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD) has no effect without "
          "activation_checkpointing.");
    plugin.activation_checkpointing_offload = asked && *plugin.activation_checkpointing;
  }
  if (*plugin.activation_checkpointing_offload && !*plugin.activation_checkpointing)
    refuse_fsdp(
        "activation_checkpointing_offload is true, but activation_checkpointing, whose inputs it would move to the "
        "host, is false; set both");
  if (*plugin.activation_checkpointing_offload && version != 2)
    refuse_fsdp("activation_checkpointing_offload is true, which needs fsdp_version 2, but fsdp_version is 1");

  if (!plugin.step_in_backward) plugin.step_in_backward = flag_or_false("FSDP_STEP_IN_BACKWARD");
  if (!plugin.step_at_once) plugin.step_at_once = flag_or_false("FSDP_STEP_AT_ONCE");
  if (*plugin.step_at_once && plugin.offload_folder)
    refuse_fsdp(
        "step_at_once is true, which steps in memory, but offload_folder lays parameters and states on a disk; leave "
        "one of them out, or set step_in_backward, which streams them");

  if (!plugin.ignored_modules)
    if (auto pattern = environment::text("FSDP_IGNORED_MODULES")) plugin.ignored_modules = std::move(*pattern);

  if (!plugin.cpu_ram_efficient_loading)
    plugin.cpu_ram_efficient_loading = flag_or_false("FSDP_CPU_RAM_EFFICIENT_LOADING");
  if (version == 1 && *plugin.cpu_ram_efficient_loading && !*plugin.sync_module_states) {
    warn("cpu_ram_efficient_loading needs sync_module_states, because only rank 0 has values: it is now true.");
    plugin.sync_module_states = true;
  }
  if (plugin.mixed_precision_policy)
    plugin.mixed_precision_policy = resolve(std::move(*plugin.mixed_precision_policy), version);

  // All ranks find the same; once is enough. The environment knows the rank before there is a process group.
  if (!warnings.empty() && environment::integer({"RANK"}).value_or(0) == 0)
    logs::warn("accelerate.parallel", "FSDP plugin:{}", warnings);
  return plugin;
}

ShardingStrategy effective_strategy(const FullyShardedDataParallelPlugin& resolved) {
  const auto& reshard = resolved.reshard_after_forward;
  if (!reshard) return resolved.sharding_strategy.value();
  // Version 1: resolve() saw to it that a strategy given here is the only one that the program gave; the other came
  // from the environment or is the default.
  if (const auto* strategy = std::get_if<ShardingStrategy>(&*reshard)) return *strategy;
  const auto* whether = std::get_if<bool>(&*reshard);
  const bool keeps = whether && !*whether;
  if (resolved.dp_replicate_size.value_or(1) > 1 || resolved.dp_shard_size)
    return keeps ? ShardingStrategy::hybrid_shard_zero2 : ShardingStrategy::hybrid_shard;
  return keeps ? ShardingStrategy::shard_grad_op : ShardingStrategy::full_shard;
}

}  // namespace parallel
}  // namespace accelerate
