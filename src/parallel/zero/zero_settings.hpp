#pragma once

/// The settings of a DeepSpeed configuration, read and checked. The members are named as DeepSpeed's keys are; their
/// initial values are the defaults of DeepSpeed 0.19.8. Needs no LibTorch.
///
/// Which values a key may have, what it does here, and why it does nothing where that is so, stands in one table
/// (settings_table.cpp), from which reading, checking and the effective configuration come.
/// Conformance: deepspeed_config.json, deepspeed_loss_scaler.json (config).

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::zero {

enum class Verdict {
  acts,       ///< the value does what DeepSpeed documents
  no_meaning  ///< it is accepted and changes nothing here; the entry says why
};

/// A line of the effective configuration.
struct Entry {
  std::string key;         ///< "zero_optimization.stage"
  std::string value = {};  ///< that holds, as JSON
  bool given = false;      ///< by the file; else it is the default or follows from others
  Verdict verdict = Verdict::acts;
  std::string reason = {};  ///< of a key without meaning
};

struct OffloadOptimizer {
  std::string device = "none";  ///< none, cpu, nvme
  std::optional<std::string> nvme_path;
  int64_t buffer_count = 4;
  bool pin_memory = true, pipeline_read = false, pipeline_write = false, fast_init = false;
  double ratio = 1;
  bool super_offload = false;
  double cpuadam_cores_perc = 0.8;
};

struct OffloadParam {
  std::string device = "none";  ///< none, cpu, nvme
  std::optional<std::string> nvme_path;
  int64_t buffer_count = 5, buffer_size = 100'000'000, max_in_cpu = 1'000'000'000;  ///< the last two in elements
  bool pin_memory = true;
};

/// Modules that are fetched as a whole.
struct LeafModule {
  std::vector<std::string> classes{"transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
                                   "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
                                   "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"};
  std::vector<std::string> names, name_suffixes;
};

/// Sizes are numbers of elements. Keys that DeepSpeed spells with stage3_ before them are without it here.
struct ZeroOptimization {
  int64_t stage = 0;
  bool contiguous_gradients = true, reduce_scatter = true;
  int64_t reduce_bucket_size = 500'000'000;
  bool use_multi_rank_bucket_allreduce = true, allgather_partitions = true;
  int64_t allgather_bucket_size = 500'000'000;
  std::optional<bool> overlap_comm;  ///< decided by the stage once it is read: never empty then
  bool compute_grad_norm = true, load_from_fp32_weights = true, elastic_checkpoint = false;
  OffloadParam offload_param;
  OffloadOptimizer offload_optimizer;
  int64_t sub_group_size = 1'000'000'000, prefetch_bucket_size = 50'000'000, param_persistence_threshold = 100'000,
          model_persistence_threshold = std::numeric_limits<int64_t>::max(), max_live_parameters = 1'000'000'000,
          max_reuse_distance = 1'000'000'000;
  bool gather_16bit_weights_on_model_save = false;
  int64_t module_granularity_threshold = 0;
  bool use_all_reduce_for_fetch_params = false, allgather_sequential = false, ignore_unused_parameters = true,
       legacy_stage1 = false, round_robin_gradients = false, parameter_alignment = false;
  int64_t zero_hpz_partition_size = 1;  ///< ranks
  bool zero_quantized_weights = false, zero_quantized_nontrainable_weights = false, zero_quantized_gradients = false,
       memory_efficient_linear = true, pipeline_loading_checkpoint = false, override_module_apply = true,
       log_trace_cache_warnings = false, enable_sanity_checks = false, save_muon_momentum_buffer_in_memory = false;
  LeafModule leaf_module;
};

struct Fp16 {
  bool enabled = false, auto_cast = false;
  double loss_scale = 0;  ///< 0: dynamic
  int64_t initial_scale_power = 16, loss_scale_window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
  int64_t min_loss_scale = 1;
  bool fp16_master_weights_and_grads = false;
};

struct Bf16 {
  bool enabled = false, immediate_grad_update = false, check_grad_overflow = true,
       bf16_master_weights_and_grads = false, bf16_optimizer_states = false;
};

/// Parameters of all types together; a type has those that the table names for it, and those have its defaults.
struct OptimizerParams {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool torch_adam = false, adam_w_mode = true, bias_correction = true, amsgrad = false, fp32_optimizer_states = true;
  double momentum = 0, dampening = 0, alpha = 0.99, lr_decay = 0, initial_accumulator_value = 0;
  bool nesterov = false, centered = false;
  double max_coeff = 10, min_coeff = 0.01;
  bool eps_inside_sqrt = false;
  std::optional<double> muon_lr, adam_lr;
  std::string ns_method = "gram";
};

struct Optimizer {
  std::string type;  ///< as DeepSpeed or torch.optim spells it, whatever the file's letters are
  OptimizerParams params;
};

/// As for optimizers: parameters of all types. A list of learning rates has one for each group, one element for all.
struct SchedulerParams {
  std::vector<double> warmup_min_lr{0}, warmup_max_lr;  ///< no warmup_max_lr: each group's own
  int64_t warmup_num_steps = 1000;
  std::string warmup_type = "log";
  int64_t last_batch_iteration = -1;
  int64_t total_num_steps = 0;
  double warmup_min_ratio = 0, cos_min_ratio = 1e-4;
  std::vector<double> cycle_min_lr, cycle_max_lr;
  double decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size;  ///< none: as the first
  int64_t cycle_first_stair_count = 0;
  std::optional<int64_t> cycle_second_stair_count;  ///< none: as the first
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9, decay_mom_rate = 0;
  std::vector<double> lr_range_test_min_lr{1e-3};
  int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;
};

struct SchedulerSettings {
  std::string type;  ///< WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest
  SchedulerParams params;
  /// Not a key: without warmup_max_lr all groups take the first one's, as before 0.19.4.
  bool first_groups_lr_for_all = false;
};

struct ActivationCheckpointing {
  bool partition_activations = false, contiguous_memory_optimization = false, cpu_checkpointing = false;
  std::optional<int64_t> number_checkpoints;
  bool synchronize_checkpoint_boundary = false, profile = false;
};

struct Aio {
  int64_t block_size = 1 << 20;  ///< bytes
  int64_t queue_depth = 8, intra_op_parallelism = 1;
  bool single_submit = false, overlap_events = true, use_gds = false;
};

struct ParallelWrite {
  bool pipeline_stage = false;
};
struct CheckpointWriter {
  bool decoupled = false, show_statistics = false;
};
struct CheckpointSettings {
  std::string tag_validation = "Warn";  ///< Ignore, Warn, Fail
  bool load_universal = false, use_node_local_storage = false;
  ParallelWrite parallel_write;
  CheckpointWriter writer;
};

/// fp32, fp16 or bf16; none: the model's own.
struct DataTypes {
  std::optional<std::string> grad_accum_dtype, param_dtype, buffer_dtype;
  /// Patterns; the one word auto: the model's own list, of which none has one here.
  std::vector<std::string> keep_in_fp32_modules;
};

struct TorchAutocast {
  bool enabled = false;
  std::optional<std::string> dtype;  ///< bfloat16 or float16; none: torch's default for the device
  std::vector<std::string> lower_precision_safe_modules{"torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d",
                                                        "torch.nn.Conv3d"};
};

struct Throughput {
  bool enabled = true, synchronized = true;
};
struct Timers {
  Throughput throughput;
};

struct MonitorSettings {
  bool enabled = false;
  std::string output_path, job_name = "DeepSpeedJobName";
};

struct Wandb {
  bool enabled = false;
  std::optional<std::string> group, team;
  std::string project = "deepspeed";
};

struct Comet {
  bool enabled = false;
  int64_t samples_log_interval = 100;
  std::optional<std::string> project, workspace, api_key, experiment_key, mode;
};

struct FlopsProfiler {
  bool enabled = false;
  int64_t profile_step = 1, module_depth = -1, top_modules = 1;
  bool detailed = true;
  std::optional<std::string> output_file;
  double recompute_fwd_factor = 0;
};

struct CommsLogger {
  bool enabled = false, verbose = false, prof_all = true;
  std::vector<std::string> prof_ops;
};

struct ACCELERATE_API ZeroSettings {
  int64_t train_batch_size = 1, train_micro_batch_size_per_gpu = 1, gradient_accumulation_steps = 1;
  bool managed_gradient_accumulation = true;
  double gradient_clipping = 1;  ///< 0 or less: none
  bool zero_allow_untested_optimizer = false, zero_force_ds_cpu_optimizer = true;
  std::optional<double> steps_per_print;  ///< infinite: never
  bool wall_clock_breakdown = false, memory_breakdown = false, dump_state = false;
  std::optional<std::string> log_level;
  std::optional<std::string> communication_data_type, seq_parallel_communication_data_type;  ///< fp32, fp16, bf16
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1;
  std::string gradient_allreduce_op = "mean";  ///< or sum
  std::optional<int64_t> sequence_parallel_size, data_parallel_size;
  ZeroOptimization zero_optimization;
  Fp16 fp16;
  Bf16 bf16;
  std::optional<Optimizer> optimizer;
  std::optional<SchedulerSettings> scheduler;
  ActivationCheckpointing activation_checkpointing;
  Aio aio;
  CheckpointSettings checkpoint;
  DataTypes data_types;
  TorchAutocast torch_autocast;
  Timers timers;
  MonitorSettings tensorboard, csv_monitor;
  Wandb wandb;
  Comet comet;
  FlopsProfiler flops_profiler;
  CommsLogger comms_logger;

  // Not keys:

  std::string as_of_version = "0.19.8";  ///< of DeepSpeed, whose defaults hold

  /// How long collectives wait for other ranks, unless DEEPSPEED_TIMEOUT says.
  int64_t timeout_minutes = 10;
  /// Every key that DeepSpeed knows, in the table's order: complete, and never with a secret.
  std::vector<Entry> effective;
  /// Warnings for the author of the file, a line each.
  std::vector<std::string> warnings;

  /// Optimizers step on masters of 16 bits.
  bool has_low_masters() const {
    return fp16.enabled ? fp16.fp16_master_weights_and_grads : bf16.enabled && bf16.bf16_master_weights_and_grads;
  }
  /// Some buffers stay fp32 by their names.
  bool keeps_buffers() const {
    const auto& names = data_types.keep_in_fp32_modules;
    return !names.empty() && names != std::vector<std::string>{"auto"};
  }
  /// Masters and optimizers' states lie elsewhere than the device.
  bool offloads_states() const {
    return zero_optimization.stage > 0 && zero_optimization.offload_optimizer.device != "none";
  }
  /// The entries of the file that change nothing here.
  std::vector<Entry> without_meaning() const;
};

struct ReadOptions {
  int64_t ranks = 1;                     ///< of the data axis
  std::string as_of_version = "0.19.8";  ///< whose defaults hold
  bool cuda = false;                     ///< tensors are on a GPU
  bool has_program_optimizer = false;    ///< DeepSpeed's `optimizer` is not made: the program has its own
  /// Settings that this version does not do yet are refused. False: they are read all the same, to compare the reading.
  bool later_is_error = true;
};

/// @throws ConfigError that names every key with something wrong: found, expected, why, what to do.
ACCELERATE_API ZeroSettings read_settings(const DeepSpeedConfig& config, const ReadOptions& options = {});

/// The members that the table has, as a JSON object of objects: for tests and for saving.
ACCELERATE_API std::string to_json(const ZeroSettings& settings);

}  // namespace accelerate::zero
