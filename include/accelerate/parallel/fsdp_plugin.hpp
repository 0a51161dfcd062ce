#pragma once

/// How a model is sharded over the ranks: the reference's FullyShardedDataParallelPlugin.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The tensors that are split over the ranks. Values are the reference's numbers, which the environment may use instead
/// of names.
enum class ShardingStrategy {
  full_shard = 1,  ///< parameters, gradients and optimizer states; parameters are given back after each forward
  shard_grad_op,   ///< as full_shard, but gathered parameters stay from forward to backward
  no_shard,        ///< nothing: every rank holds all, from rank 0's values on; gradients are all-reduced
  hybrid_shard,  ///< full_shard among the ranks of one machine, or as dp_shard_size says; other machines hold replicas
  hybrid_shard_zero2  ///< the same with shard_grad_op
};

/// When backward asks for the parameters of the unit that comes next.
enum class BackwardPrefetch {
  backward_pre = 1,  ///< before it computes the present unit: most overlap, most memory
  backward_post,     ///< after it
  no_prefetch        ///< when it gets there
};

enum class StateDictType {
  full_state_dict = 1,  ///< whole tensors under their own names
  local_state_dict,     ///< each rank's flat shard as it is
  sharded_state_dict    ///< each rank's shards of every tensor
};

/// Which modules become units, whose parameters are gathered and given back together.
enum class AutoWrapPolicy {
  transformer_based_wrap,  ///< each module of a class in `transformer_cls_names_to_wrap`, or that says so itself
  size_based_wrap,         ///< modules of at least `min_num_params` parameters that are in no unit yet
  no_wrap                  ///< the whole model is one unit
};

/// Names as the environment and configuration files write them ("FULL_SHARD"). Any case; numbers where the reference
/// takes them.
/// "_HYBRID_SHARD_ZERO2" is HYBRID_SHARD_ZERO2. @throws ConfigError listing the valid names and the nearest.
ACCELERATE_API ShardingStrategy parse_sharding_strategy(std::string_view name);
ACCELERATE_API BackwardPrefetch parse_backward_prefetch(std::string_view name);
ACCELERATE_API StateDictType parse_state_dict_type(std::string_view name);
ACCELERATE_API AutoWrapPolicy parse_auto_wrap_policy(std::string_view name);
ACCELERATE_API std::string to_string(ShardingStrategy value);
ACCELERATE_API std::string to_string(BackwardPrefetch value);
ACCELERATE_API std::string to_string(StateDictType value);
ACCELERATE_API std::string to_string(AutoWrapPolicy value);

/// Decides about a module, as torch.distributed.fsdp.wrap's policies do. `recurse`: whether to look at its children
/// (else they stay in the unit above); then, when they were looked at, whether it becomes a unit. `nonwrapped_numel`:
/// its parameter elements that are in no unit so far.
using WrapFunction = std::function<bool(const Submodule& module, bool recurse, int64_t nonwrapped_numel)>;

/// A policy that looks at every module and makes those units for which `wrap` says so.
inline WrapFunction lambda_auto_wrap_policy(std::function<bool(const Submodule&)> wrap) {
  return [wrap = std::move(wrap)](const Submodule& module, bool recurse, int64_t) { return recurse || wrap(module); };
}

/// The place of the shards between uses.
struct CPUOffload {
  CPUOffload(bool offload_params = false, bool pin_memory = true)
      : offload_params(offload_params), pin_memory(pin_memory) {}  // so that `.cpu_offload = true` reads as in Python

  /// Parameters, gradients and the optimizer's step on the host.
  bool offload_params;
  /// In page-locked memory where there is an accelerator. Off: less pressure on the host, slower copies.
  bool pin_memory;
};

/// The reference's MixedPrecision (fsdp_version 1) and MixedPrecisionPolicy (2). Shards stay in the parameters' own
/// dtype; an unset dtype changes nothing.
struct MixedPrecision {
  /// "fp16", "bf16", "fp8" (computes in bf16) or "fp32": fills those of the dtypes below that are unset and that the
  /// version has. Empty: none.
  std::string preset;
  /// Parameters as gathered and computed with.
  std::optional<at::ScalarType> param_dtype;
  /// Gradients on the wire between ranks. Unset: as they are computed.
  std::optional<at::ScalarType> reduce_dtype;
  /// Buffers, converted once. Version 1.
  std::optional<at::ScalarType> buffer_dtype;
  /// Floating-point results of the model's forward. Version 2. Unset: as the model gives them, under the Accelerator's
  /// mixed precision fp32, also where that precision made this policy.
  std::optional<at::ScalarType> output_dtype;
  /// Leave gradients in reduce_dtype for the optimizer. Version 1.
  bool keep_low_precision_grads = false;
  /// Convert inputs of the model's forward to param_dtype. Unset: true in version 2. Inputs of units within stay as the
  /// model makes them, because calls of LibTorch's modules can't be seen; operators name dtypes that don't fit. So in
  /// version 1, where it is about these units alone, true is an error; unset is false there.
  std::optional<bool> cast_forward_inputs;
  /// The same for version 1.
  bool cast_root_forward_inputs = true;
  /// Classes of modules that become units of their own and compute in full precision. Unset: the batch norms. Only
  /// version 1 lets choose.
  std::optional<std::vector<std::string>> module_classes_to_ignore;
};

/// The form in which get_state_dict() and get_optimizer_state_dict() give states with full_state_dict. Files are
/// written alike whatever it says: by rank 0, part by part. With the other types anything but the defaults is an error,
/// because their shards go to files only.
struct StateDictConfig {
  /// Tensors come on the host. Off: they stay on the device that computes.
  bool offload_to_cpu = true;
  /// Only rank 0 gets the tensors. full_state_dict only. Unset: true there.
  std::optional<bool> rank0_only;
};

/// Fields that are unset come from the environment variable FSDP_<FIELD> that `accelerate launch` sets, else the
/// default stands here. Fields that are set win. Fields "of version 1" have no meaning in version 2: set there, they
/// warn and become unset.
struct FullyShardedDataParallelPlugin {
  /// Which of PyTorch's two interfaces the other fields are read as. Both are one engine here. FSDP_VERSION, else 1.
  std::optional<int64_t> fsdp_version;
  /// Of version 1. FSDP_SHARDING_STRATEGY, else full_shard.
  std::optional<ShardingStrategy> sharding_strategy;
  /// Version 2: give gathered parameters back after forward; a number n > 1 keeps them split over n neighbouring ranks
  /// until backward, which then gathers among these (a rank holds an n-th of the model meanwhile). It must divide the
  /// ranks that the model is split over; 1 is false. With shared memory nothing is given back, and it changes nothing.
  /// (Numbers: our extension, as torch's fully_shard.) Version 1: another way to write sharding_strategy.
  /// FSDP_RESHARD_AFTER_FORWARD, else true; in version 1 the environment's is not read, and `accelerate launch` hands a
  /// strategy that it finds there on as FSDP_SHARDING_STRATEGY.
  std::optional<std::variant<bool, int64_t, ShardingStrategy>> reshard_after_forward;
  /// For replicas of a sharded model: dp_replicate_size times dp_shard_size ranks; either follows from the other.
  /// Neighbouring ranks hold one replica. Version 1: for the hybrid strategies, whose default is one replica per
  /// machine (LOCAL_WORLD_SIZE). Version 2: makes reshard_after_forward hybrid. When ACCELERATE_USE_PARALLELISM_CONFIG
  /// is true: PARALLELISM_CONFIG_DP_REPLICATE_SIZE and _DP_SHARD_SIZE, where 1 says nothing.
  std::optional<int64_t> dp_replicate_size, dp_shard_size;
  /// Of version 1. FSDP_BACKWARD_PREFETCH, else no_prefetch.
  std::optional<BackwardPrefetch> backward_prefetch;
  /// Unset: what the Accelerator's mixed_precision says.
  std::optional<MixedPrecision> mixed_precision_policy;
  /// A policy of the reference or your own. FSDP_AUTO_WRAP_POLICY, else no_wrap.
  std::optional<std::variant<AutoWrapPolicy, WrapFunction>> auto_wrap_policy;
  /// FSDP_OFFLOAD_PARAMS, else false.
  std::optional<CPUOffload> cpu_offload;
  /// Our extension: shards, masters, what optimizers keep and, from backward to step, gradients lie in files of this
  /// folder (docs/fsdp.md), which is made where there is none. FSDP_OFFLOAD_FOLDER.
  std::optional<std::filesystem::path> offload_folder;
  /// Modules whose parameters are left alone (with all that is below them), or a regular expression that a module's
  /// whole dotted name must match. FSDP_IGNORED_MODULES.
  std::optional<std::variant<std::vector<ModelRef>, std::string>> ignored_modules;
  /// FSDP_STATE_DICT_TYPE, else full_state_dict in version 1 and sharded_state_dict in 2, which has no
  /// local_state_dict.
  std::optional<StateDictType> state_dict_type;
  /// Unset: offloaded, and on rank 0 only if full. Of get_state_dict().
  std::optional<StateDictConfig> state_dict_config;
  /// The same of get_optimizer_state_dict().
  std::optional<StateDictConfig> optim_state_dict_config;
  /// At most two gathers are under way, so that whole parameters don't fill the memory. Off: where units are fetched
  /// ahead (in forward, and in backward with backward_pre), all that the pass still needs is asked for at once: most
  /// overlap, and up to the whole model present.
  bool limit_all_gathers = true;
  /// Of version 1 (2 always does). Accepted for parity: parameters are the original ones here, always.
  /// FSDP_USE_ORIG_PARAMS, else false.
  std::optional<bool> use_orig_params;
  /// Gives parameters of a module that has none yet (deferred initialisation) memory and values. Unset: memory without
  /// values.
  std::function<void(torch::nn::Module&)> param_init_fn;
  /// Of version 1: rank 0's parameters and buffers for everyone at the start; ignored modules are left alone.
  /// FSDP_SYNC_MODULE_STATES, else false; true with cpu_ram_efficient_loading.
  std::optional<bool> sync_module_states;
  /// Of version 1: ask for the next unit in forward as well; the order of units must not change. Setting it in version
  /// 2 is an error. FSDP_FORWARD_PREFETCH, else false.
  std::optional<bool> forward_prefetch;
  /// Recompute each unit's activations in backward, with nothing changed in the model: what operators do from the first
  /// touch of a unit's parameters until the touch of another unit's is written down, and runs again. The root's unit is
  /// left out. Values that the model writes through a pointer can't be seen and must not change; a
  /// torch::autograd::Function in a unit is an error; batch norms move their running statistics twice, as in PyTorch.
  /// FSDP_ACTIVATION_CHECKPOINTING, else false.
  std::optional<bool> activation_checkpointing;
  /// Keep the inputs that recomputing starts from on the host. Version 2, with activation_checkpointing.
  /// FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD, else false.
  std::optional<bool> activation_checkpointing_offload;
  /// Only rank 0 reads a checkpoint, the others build the model without memory (init_empty_weights) or with any values:
  /// prepare() gives all ranks rank 0's parameters, those of ignored modules among them, and buffers, one tensor at a
  /// time. FSDP_CPU_RAM_EFFICIENT_LOADING, else false.
  std::optional<bool> cpu_ram_efficient_loading;
  /// For transformer_based_wrap: class names, with or without namespace and `Impl`. FSDP_TRANSFORMER_CLS_TO_WRAP,
  /// separated by commas, else the classes that derive from NoSplit (model/no_split.hpp), as the layers of
  /// accelerate::models do.
  std::optional<std::vector<std::string>> transformer_cls_names_to_wrap;
  /// For size_based_wrap; 0 is no_wrap. FSDP_MIN_NUM_PARAMS, else 0.
  std::optional<int64_t> min_num_params;
  /// ZeRO++ by DeepSpeed's names (our extension; arXiv:2306.10209), for parameters of two or more dimensions;
  /// docs/fsdp.md has the formulas. Ranks share no memory then: numbers are those of what is sent, wherever ranks are.
  /// Trained ones are gathered as 8-bit codes, from each rank's own shard, too. FSDP_QUANTIZED_WEIGHTS, else false.
  std::optional<bool> quantized_weights;
  /// Gradients travel as 4-bit codes: among the ranks of a machine, whose average travels so between machines.
  /// FSDP_QUANTIZED_GRADIENTS, else false.
  std::optional<bool> quantized_gradients;
  /// Weights that are frozen in prepare() are kept as 8-bit codes, travel so, and can't be trained afterwards.
  /// FSDP_QUANTIZED_NONTRAINABLE_WEIGHTS, else false.
  std::optional<bool> quantized_nontrainable_weights;
  /// Our extension: when a unit's gradients are complete, the optimizer computes its step on them while backward goes
  /// on, into memory of its own; step() then takes the new values over where it would compute the same ones, and
  /// computes anew what has changed in between (gradients that were clipped, a learning rate). Results are those of
  /// false to the bit, and nothing can be seen before step(). It costs a copy of what this rank holds of parameters and
  /// of the optimizer's states (where those lie on a disk, there), so it is never on by itself. For optimizers with a
  /// step of ours (AcceleratedOptimizer::step_ahead) on parameters that lie on the host. FSDP_STEP_IN_BACKWARD, else
  /// false.
  std::optional<bool> step_in_backward;
  /// Our extension: as soon as a unit's gradients are complete, the optimizer steps on it, in place, and they are
  /// freed; step() has nothing left to do there, and closes the step. Costs no copies and no time, and holds gradients
  /// of one unit at a time. Gradients can't be looked at, clipped or added to by a second backward, learning rates
  /// can't change between backward and step(), and no forward comes there: each is a ConfigError, as are loss scales,
  /// two optimizers of one model and optimizers that need all parameters at once. With it step_in_backward means
  /// nothing more. FSDP_STEP_AT_ONCE, else false.
  std::optional<bool> step_at_once;
};

namespace parallel {

/// Whether `accelerate launch --use_fsdp` started this process: ACCELERATE_USE_FSDP is true. @throws ConfigError when
/// it is no truth value.
ACCELERATE_API bool fsdp_requested();

/// The plugin with every field decided, by the reference's rules. Unset stay: fields without a meaning in the version,
/// policies' arguments where the policy takes none, mixed_precision_policy and ignored_modules when nobody gave any.
/// Rank 0 warns of settings that have no effect.
/// @throws ConfigError for values and combinations that the version does not have.
/// Source: accelerate 1.15.0, FullyShardedDataParallelPlugin. Conformance: fsdp_plugin.json.
ACCELERATE_API FullyShardedDataParallelPlugin resolve(FullyShardedDataParallelPlugin plugin);

/// The policy that a mixed precision by name means; "fp8" computes in bf16. @throws ConfigError for other names than
/// fp8, fp16, bf16, fp32.
ACCELERATE_API MixedPrecision mixed_precision_policy(std::string_view name, int64_t fsdp_version);

/// The strategy that a resolved plugin asks for, in version 1's terms. Version 2: full_shard or shard_grad_op, or where
/// dp_replicate_size or dp_shard_size is set the hybrid ones.
ACCELERATE_API ShardingStrategy effective_strategy(const FullyShardedDataParallelPlugin& resolved);

}  // namespace parallel
}  // namespace accelerate
