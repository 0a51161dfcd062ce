// FullyShardedDataParallelPlugin: what the environment and the program's settings become and what they do in a run, and
// mixed precision by name.
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "environment.hpp"
#include "fsdp_effects.hpp"

namespace conformance::fsdp_plugin_cases {
namespace {

using accelerate::AutoWrapPolicy;
using accelerate::FullyShardedDataParallelPlugin;
using accelerate::ShardingStrategy;

/// Python's rendering of enum members: the reference's torch spells one of them with an underscore.
json rendered(const std::optional<ShardingStrategy>& value) {
  if (!value) return nullptr;
  return "ShardingStrategy." + std::string(*value == ShardingStrategy::hybrid_shard_zero2 ? "_" : "") +
         to_string(*value);
}

FullyShardedDataParallelPlugin plugin_of(const json& kwargs) {
  FullyShardedDataParallelPlugin plugin;
  for (const auto& [name, value] : kwargs.items()) {
    if (name == "reshard_after_forward" && value.is_boolean()) plugin.reshard_after_forward = value.get<bool>();
    else if (name == "reshard_after_forward")
      plugin.reshard_after_forward = accelerate::parse_sharding_strategy(value.get<std::string>());
    else if (name == "sharding_strategy")
      plugin.sharding_strategy = accelerate::parse_sharding_strategy(value.get<std::string>());
    else if (name == "cpu_offload") plugin.cpu_offload = value.get<bool>();
    else if (name == "backward_prefetch")
      plugin.backward_prefetch = accelerate::parse_backward_prefetch(value.get<std::string>());
    else if (name == "auto_wrap_policy")
      plugin.auto_wrap_policy = accelerate::parse_auto_wrap_policy(value.get<std::string>());
    else throw std::runtime_error("no such field in the runner: " + name);
  }
  return plugin;
}

json state_dict_config(const std::optional<accelerate::StateDictConfig>& config, bool full, const std::string& kind) {
  if (!config) return nullptr;
  json result{{"__class__", (full ? "Full" : "Sharded") + kind}, {"offload_to_cpu", config->offload_to_cpu}};
  if (full) result["rank0_only"] = config->rank0_only.value();
  return result;
}

json fields_of(const FullyShardedDataParallelPlugin& plugin) {
  const bool first = plugin.fsdp_version == 1;
  const bool full = plugin.state_dict_type == accelerate::StateDictType::full_state_dict;
  json result{{"fsdp_version", plugin.fsdp_version.value()},
              {"sharding_strategy", rendered(plugin.sharding_strategy)},
              {"reshard_after_forward", nullptr}};
  if (const auto& reshard = plugin.reshard_after_forward) {
    if (const auto* whether = std::get_if<bool>(&*reshard)) result["reshard_after_forward"] = *whether;
    else if (const auto* ranks = std::get_if<int64_t>(&*reshard)) result["reshard_after_forward"] = *ranks;
    else result["reshard_after_forward"] = rendered(std::get<ShardingStrategy>(*reshard));
  }
  const bool prefetches =
      plugin.backward_prefetch && *plugin.backward_prefetch != accelerate::BackwardPrefetch::no_prefetch;
  result["backward_prefetch"] = prefetches ? json("BackwardPrefetch." + to_string(*plugin.backward_prefetch)) : json();
  const auto policy = std::get<AutoWrapPolicy>(plugin.auto_wrap_policy.value());
  result["auto_wrap_policy"] = policy == AutoWrapPolicy::no_wrap ? json()
                                                                 : json(policy == AutoWrapPolicy::size_based_wrap
                                                                            ? "fn:size_based_auto_wrap_policy"
                                                                            : "fn:transformer_auto_wrap_policy");
  const auto& offload = plugin.cpu_offload.value();
  if (first) result["cpu_offload"] = {{"__class__", "CPUOffload"}, {"offload_params", offload.offload_params}};
  else if (offload.offload_params)
    result["cpu_offload"] = {{"__class__", "CPUOffloadPolicy"}, {"pin_memory", offload.pin_memory}};
  else result["cpu_offload"] = {{"__class__", "OffloadPolicy"}};
  result["state_dict_type"] = "StateDictType." + to_string(plugin.state_dict_type.value());
  result["state_dict_config"] = state_dict_config(plugin.state_dict_config, full, "StateDictConfig");
  result["optim_state_dict_config"] = state_dict_config(plugin.optim_state_dict_config, full, "OptimStateDictConfig");
  result["limit_all_gathers"] = plugin.limit_all_gathers;
  result["use_orig_params"] = or_null(plugin.use_orig_params);
  result["sync_module_states"] = or_null(plugin.sync_module_states);
  result["forward_prefetch"] = or_null(plugin.forward_prefetch);
  result["activation_checkpointing"] = plugin.activation_checkpointing.value();
  result["activation_checkpointing_offload"] = plugin.activation_checkpointing_offload.value();
  result["cpu_ram_efficient_loading"] = plugin.cpu_ram_efficient_loading.value();
  result["transformer_cls_names_to_wrap"] = or_null(plugin.transformer_cls_names_to_wrap);
  result["min_num_params"] = or_null(plugin.min_num_params);
  result["ignored_modules"] = plugin.ignored_modules ? json(std::get<std::string>(*plugin.ignored_modules)) : json();
  return result;
}

json policy_of(const accelerate::MixedPrecision& policy, int64_t version) {
  const auto dtype = [](const std::optional<at::ScalarType>& type) -> json {
    if (!type) return nullptr;
    return *type == at::kHalf       ? "torch.float16"
           : *type == at::kBFloat16 ? "torch.bfloat16"
           : *type == at::kFloat    ? "torch.float32"
                                    : "another dtype";
  };
  json result{{"param_dtype", dtype(policy.param_dtype)},
              {"reduce_dtype", dtype(policy.reduce_dtype)},
              {"cast_forward_inputs", policy.cast_forward_inputs.value()}};
  if (version == 2) {
    result.update({{"__class__", "MixedPrecisionPolicy"}, {"output_dtype", dtype(policy.output_dtype)}});
  } else {
    result.update({{"__class__", "MixedPrecision"},
                   {"buffer_dtype", dtype(policy.buffer_dtype)},
                   {"keep_low_precision_grads", policy.keep_low_precision_grads},
                   {"cast_root_forward_inputs", policy.cast_root_forward_inputs},
                   {"_module_classes_to_ignore", {"fn:_BatchNorm"}}});
    if (!policy.module_classes_to_ignore || policy.module_classes_to_ignore->front() != "BatchNorm1d")
      result["_module_classes_to_ignore"] = or_null(policy.module_classes_to_ignore);
  }
  return result;
}

/// The texts of errors are Python's: informative.
void run_case(const json& row, Report& report) {
  const json& kwargs = row[1];
  json expected = row[2];
  if (kwargs.contains("min_num_params") && kwargs["min_num_params"].is_string())
    return report.differs(row, "min_num_params is an integer by type: text does not compile, the reference raises");
  const Environment environment(row[0]);
  const json found = outcome([&] { return fields_of(accelerate::parallel::resolve(plugin_of(kwargs))); });
  const std::string refused = expected.value("error", "");
  if (refused.find("no available devices") != std::string::npos) {
    // Settings that the reference takes on a machine with a GPU only: there it goes on with sync_module_states.
    if (found.is_object() && found["sync_module_states"] == true)
      report.differs(row,
                     "sync_module_states also works on the CPU, for which the reference says that it finds no device");
    else report.check(false, [&] { return row.dump() + "\n    found " + found.dump(); });
    return;
  }
  if (refused.find("requires `activation_checkpointing=True`") != std::string::npos && found.is_object() &&
      !kwargs.contains("activation_checkpointing_offload"))
    return report.differs(
        row,
        "activation_checkpointing_offload of the environment, without checkpointing, is a remark; the "
        "reference raises");
  for (const char* config :
       {"state_dict_config", "optim_state_dict_config"})  // _use_dtensor is Python's choice of a tensor type
    if (expected.contains(config) && expected[config].is_object()) expected[config].erase("_use_dtensor");
  report.check(row, expected.contains("error") ? found.is_null() : found == expected,
               [&] { return row.dump() + "\n    found " + found.dump(); });
  if (found.is_null() || expected.contains("error")) return;
  const json effects = effects_of(plugin_of(kwargs));
  const json wanted = expected_effects(expected);
  report.check(effects == wanted, [&] {
    return row[0].dump() + " " + kwargs.dump() + "\n    did      " + effects.dump() + "\n    expected " + wanted.dump();
  });
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases")) report.guarded(row, [&] { run_case(row, report); });
  for (const json& row : file.at("mixed_precision")) {
    const int64_t version = row[0];
    const json found = outcome([&] {
      return policy_of(accelerate::parallel::mixed_precision_policy(row[1].get<std::string>(), version), version);
    });
    report.check(row[2].contains("error") ? found.is_null() : found == row[2],
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

const Registration registration("fsdp_plugin", {run});

}  // namespace
}  // namespace conformance::fsdp_plugin_cases
