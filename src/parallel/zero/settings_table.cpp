#include "parallel/zero/settings_table.hpp"

#include <algorithm>
#include <charconv>
#include <map>

#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

using enum SettingState;

// ---- Why a key changes nothing with other settings as they are.

constexpr const char* kOneMemory = "without a GPU all memory is the host's";

const char* below_stage_3(const ZeroSettings& s, const ReadOptions&) {
  return s.zero_optimization.stage < 3 ? "only stage 3 splits parameters" : nullptr;
}
const char* not_stage_1_or_2(const ZeroSettings& s, const ReadOptions&) {
  const int64_t stage = s.zero_optimization.stage;
  return stage == 1 || stage == 2 ? nullptr : "only stages 1 and 2 gather parameters after the step";
}
const char* at_stage_0(const ZeroSettings& s, const ReadOptions&) {
  return s.zero_optimization.stage == 0 ? "stage 0 splits nothing, and trains as without a plugin" : nullptr;
}
const char* states_stay(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = at_stage_0(s, options)) return why;
  return s.zero_optimization.offload_optimizer.device == "none" ? "offload_optimizer.device is none" : nullptr;
}
/// On a CPU cpu is where everything lies anyway.
const char* states_move_nowhere(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = at_stage_0(s, options)) return why;
  return options.cuda || s.zero_optimization.offload_optimizer.device != "cpu" ? nullptr : kOneMemory;
}
const char* parameters_move_nowhere(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = below_stage_3(s, options)) return why;
  return options.cuda || s.zero_optimization.offload_param.device != "cpu" ? nullptr : kOneMemory;
}
const char* no_states_in_files(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = states_stay(s, options)) return why;
  return s.zero_optimization.offload_optimizer.device == "nvme" ? nullptr
                                                                : "only states in files are read and written in parts";
}
const char* states_on_cpu(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = states_stay(s, options)) return why;
  return options.cuda ? nullptr : kOneMemory;
}
const char* no_momentum_in_files(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = no_states_in_files(s, options)) return why;
  return s.optimizer && s.optimizer->type == "Muon" ? nullptr : "the optimizer is not Muon";
}
const char* no_parameters_in_files(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = below_stage_3(s, options)) return why;
  return s.zero_optimization.offload_param.device == "nvme" ? nullptr : "only parameters in files are read in parts";
}
const char* parameters_on_cpu(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = below_stage_3(s, options)) return why;
  if (s.zero_optimization.offload_param.device == "none") return "offload_param.device is none";
  return options.cuda ? nullptr : kOneMemory;
}
const char* no_files(const ZeroSettings& s, const ReadOptions& options) {
  const bool files = !no_states_in_files(s, options) || !no_parameters_in_files(s, options);
  return files ? nullptr : "nothing is kept in files: no offload device is nvme";
}
const char* nothing_is_fetched(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = below_stage_3(s, options)) return why;
  const bool offloads = s.offloads_states() || s.zero_optimization.offload_param.device != "none";
  const bool files = !no_parameters_in_files(s, options);
  return options.ranks > 1 || files || (options.cuda && offloads) ? nullptr
                                                                  : "one process has all parameters, and fetches none";
}
const char* nothing_travels(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = below_stage_3(s, options)) return why;
  return options.ranks > 1 ? nullptr : "one process sends nothing";
}
const char* all_are_near(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = nothing_travels(s, options)) return why;
  return s.zero_optimization.zero_hpz_partition_size < options.ranks
             ? nullptr
             : "all ranks together are the node, and backward gathers from them in any case";
}
const char* not_fp16(const ZeroSettings& s, const ReadOptions&) { return s.fp16.enabled ? nullptr : "fp16 is off"; }
const char* no_dynamic_scale(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = not_fp16(s, options)) return why;
  return s.fp16.loss_scale == 0 ? nullptr : "the loss scale is fixed";
}
const char* not_bf16(const ZeroSettings& s, const ReadOptions&) { return s.bf16.enabled ? nullptr : "bf16 is off"; }
const char* not_low(const ZeroSettings& s, const ReadOptions&) {
  return s.fp16.enabled || s.bf16.enabled ? nullptr : "buffers are cast only with fp16 or bf16";
}
const char* keeps_nothing(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = not_low(s, options)) return why;
  return s.keeps_buffers() ? nullptr : "no buffer is named: models here have no list of their own";
}
const char* no_autocast(const ZeroSettings& s, const ReadOptions&) {
  return s.torch_autocast.enabled ? nullptr : "torch_autocast is off";
}
const char* no_tensorboard(const ZeroSettings& s, const ReadOptions&) {
  return s.tensorboard.enabled ? nullptr : "tensorboard is off";
}
const char* no_csv(const ZeroSettings& s, const ReadOptions&) {
  return s.csv_monitor.enabled ? nullptr : "csv_monitor is off";
}
const char* no_wandb(const ZeroSettings& s, const ReadOptions&) { return s.wandb.enabled ? nullptr : "wandb is off"; }
const char* no_comet(const ZeroSettings& s, const ReadOptions&) { return s.comet.enabled ? nullptr : "comet is off"; }
const char* no_comms(const ZeroSettings& s, const ReadOptions&) {
  return s.comms_logger.enabled ? nullptr : "comms_logger is off";
}
const char* nothing_to_log(const ZeroSettings& s, const ReadOptions& options) {
  if (!s.comms_logger.enabled) return nullptr;
  if (options.ranks == 1) return "one process has no collectives";
  return s.comms_logger.prof_all || !s.comms_logger.prof_ops.empty() ? nullptr
                                                                     : "prof_all is false, and prof_ops names nothing";
}
const char* all_are_logged(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = no_comms(s, options)) return why;
  return s.comms_logger.prof_all ? "prof_all counts all operations" : nullptr;
}
const char* no_flops(const ZeroSettings& s, const ReadOptions&) {
  return s.flops_profiler.enabled ? nullptr : "flops_profiler is off";
}
const char* inputs_on_cpu(const ZeroSettings&, const ReadOptions& options) {
  return options.cuda ? nullptr : kOneMemory;
}
const char* no_streams(const ZeroSettings&, const ReadOptions& options) {
  return options.cuda ? nullptr : "operators of a CPU are done when they return";
}
const char* always_decoupled(const ZeroSettings& s, const ReadOptions&) {
  return s.optimizer && s.optimizer->type == "AdamW"
             ? "type AdamW decays weights apart from gradients, whatever it says"
             : nullptr;
}
const char* moments_are_as_masters(const ZeroSettings& s, const ReadOptions&) {
  if (!s.has_low_masters()) return "masters are fp32, and so are moments";
  if (!s.offloads_states()) return "without offload_optimizer moments have the masters' dtype";
  return s.bf16.bf16_optimizer_states ? "bf16_optimizer_states has moments in bf16" : nullptr;
}
const char* nothing_is_divided(const ZeroSettings& s, const ReadOptions&) {
  return s.gradient_allreduce_op == "sum" ? "gradients are summed (gradient_allreduce_op)" : nullptr;
}
const char* nothing_is_predivided(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = nothing_is_divided(s, options)) return why;
  return s.prescale_gradients ? "prescale_gradients has gradients divided by the number of ranks" : nullptr;
}
const char* not_guarded(const ZeroSettings& s, const ReadOptions& options) { return at_stage_0(s, options); }
const char* no_program_optimizer(const ZeroSettings& s, const ReadOptions& options) {
  if (const char* why = states_stay(s, options)) return why;
  return options.has_program_optimizer ? nullptr : "the optimizer is made of this file";
}

// ---- Reasons that several rows give.

constexpr const char* kUnits = "the pieces of a unit lie in one stretch here, and move by one operation";
constexpr const char* kNoGarbage = "there is no Python here";
constexpr const char* kDeadThere = "DeepSpeed 0.19.8 does not read it either";
constexpr const char* kLoaders = "loaders are the program's: set it there";
constexpr const char* kLibTorchSteps = "says how torch's optimizers step; there is one step here";
constexpr const char* kTracker = "record with a tracker of the Accelerator (log_with)";
constexpr const char* kAdams = "Adam AdamW";
constexpr const char* kAllOptimizers = "Adam AdamW Adagrad Lion Lamb Muon SGD RMSprop";
constexpr const char* kWarmups = "WarmupLR WarmupDecayLR WarmupCosineLR";
constexpr const char* kDtypes = "fp32|fp16|bf16";

// A key with its place, written once.
#define ROW_PLACE(path) [](ZeroSettings& s) -> Place { return &s.path; }
#define ROW(path) .key = #path, .place = ROW_PLACE(path)
#define STAGE3(name) \
  .key = "zero_optimization.stage3_" #name, .place = ROW_PLACE(zero_optimization.name), .other_name = #name
#define OPTIMIZER(name) .key = "optimizer.params." #name, .place = ROW_PLACE(optimizer->params.name)
#define SCHEDULER(name) .key = "scheduler.params." #name, .place = ROW_PLACE(scheduler->params.name)

std::vector<Row> general_rows() {
  return {
      {ROW(train_batch_size), .nullable = true},
      {ROW(train_micro_batch_size_per_gpu), .nullable = true},
      {ROW(gradient_accumulation_steps), .nullable = true},
      {ROW(managed_gradient_accumulation), .since = "0.19.4"},
      {ROW(gradient_clipping), .no_truth = true, .infinite = true, .moved = "0.19.3", .before = "0.0"},
      {ROW(zero_allow_untested_optimizer), .idle = not_guarded},
      {ROW(zero_force_ds_cpu_optimizer), .idle = no_program_optimizer},
      {ROW(steps_per_print), .state = no_meaning,
       .reason = "the plugin turns these lines off, as the reference does: print them from the program",
       .infinite = true, .moved = "0.15.2", .before = "10.0"},
      {ROW(wall_clock_breakdown)},
      {ROW(memory_breakdown)},
      {ROW(dump_state)},
      {ROW(log_level), .choices = "debug|info|warning|error|critical", .since = "0.19.3"},
      {.key = "disable_python_gc", .fallback = "false", .state = no_meaning, .reason = kNoGarbage, .since = "0.19.7"},
      {.key = "dataloader_drop_last", .fallback = "false", .state = no_meaning, .reason = kLoaders},
      {.key = "vocabulary_size",
       .fallback = "null",
       .state = no_meaning,
       .reason = "it only warns of sizes that are no multiple of 8"},
      {.key = "disable_allgather", .fallback = "false", .state = no_meaning, .reason = kDeadThere},
      {ROW(timers.throughput.enabled), .state = no_meaning, .reason = kTracker},
      {ROW(timers.throughput.synchronized), .state = no_meaning, .reason = kTracker},
      {.key = "use_data_before_expert_parallelism",
       .fallback = "false",
       .state = no_meaning,
       .reason = "there is no axis of experts"},
      {ROW(sequence_parallel_size), .state = refused,
       .reason = "sequences are not split over ranks in this version; leave it out", .fine = "[1]", .least = 1},
      {ROW(data_parallel_size), .least = 1},
      {ROW(communication_data_type), .choices = kDtypes},
      {ROW(seq_parallel_communication_data_type), .state = no_meaning, .reason = "no sequences are split over ranks",
       .choices = kDtypes},
      {ROW(prescale_gradients), .idle = nothing_is_divided},
      {ROW(gradient_predivide_factor), .idle = nothing_is_predivided, .least = 0, .above = true},
      {ROW(gradient_allreduce_op), .choices = "mean|sum", .since = "0.19.6"},
      {ROW(comms_logger.enabled), .idle = nothing_to_log},
      {ROW(comms_logger.verbose), .idle = no_comms},
      {ROW(comms_logger.prof_all), .idle = no_comms},
      {.key = "comms_logger.debug",
       .fallback = "false",
       .state = no_meaning,
       .reason = "it names the function of Python that called"},
      {ROW(comms_logger.prof_ops), .idle = all_are_logged},
  };
}

std::vector<Row> optimizer_rows() {
  return {
      {.key = "optimizer.type", .place = ROW_PLACE(optimizer->type)},
      {.key = "optimizer.legacy_fusion", .fallback = "false", .state = no_meaning, .reason = kLibTorchSteps},
      {OPTIMIZER(lr), .types = kAllOptimizers, .least = 0},
      {OPTIMIZER(betas), .types = "Adam AdamW Lion Lamb Muon", .least = 0, .most = 1, .below = true},
      {OPTIMIZER(eps), .types = "Adam AdamW Adagrad Lamb Muon RMSprop", .least = 0},
      {OPTIMIZER(weight_decay), .types = kAllOptimizers, .least = 0},
      {OPTIMIZER(momentum), .types = "SGD RMSprop Muon", .least = 0},
      {OPTIMIZER(dampening), .types = "SGD"},
      {OPTIMIZER(nesterov), .types = "SGD"},
      {OPTIMIZER(alpha), .types = "RMSprop", .least = 0},
      {OPTIMIZER(centered), .types = "RMSprop"},
      {OPTIMIZER(initial_accumulator_value), .types = "Adagrad", .least = 0},
      {OPTIMIZER(lr_decay), .types = "Adagrad", .least = 0},
      {OPTIMIZER(torch_adam), .types = kAdams, .state = no_meaning,
       .reason = "there is one implementation here, which equals torch's within rounding"},
      {OPTIMIZER(adam_w_mode), .types = kAdams, .idle = always_decoupled},
      {OPTIMIZER(bias_correction), .types = "Adam AdamW Lamb"},
      {OPTIMIZER(amsgrad), .types = "Adam AdamW Adagrad Lamb"},
      {OPTIMIZER(fp32_optimizer_states), .types = "Adam AdamW Adagrad Lion", .idle = moments_are_as_masters},
      {.key = "optimizer.params.set_grad_none",
       .fallback = "true",
       .types = kAllOptimizers,
       .state = no_meaning,
       .reason = kLibTorchSteps},
      {.key = "optimizer.params.foreach",
       .fallback = "null",
       .types = kAllOptimizers,
       .state = no_meaning,
       .reason = kLibTorchSteps},
      {.key = "optimizer.params.fused",
       .fallback = "null",
       .types = kAllOptimizers,
       .state = no_meaning,
       .reason = kLibTorchSteps},
      {.key = "optimizer.params.capturable",
       .fallback = "false",
       .types = kAllOptimizers,
       .state = no_meaning,
       .reason = kLibTorchSteps},
      {OPTIMIZER(max_coeff), .types = "Lamb"},
      {OPTIMIZER(min_coeff), .types = "Lamb"},
      {OPTIMIZER(eps_inside_sqrt), .types = "Lamb"},
      {OPTIMIZER(muon_lr), .types = "Muon", .least = 0},
      {OPTIMIZER(adam_lr), .types = "Muon", .least = 0},
      {OPTIMIZER(ns_method), .types = "Muon", .choices = "gram|standard"},
      {.key = "optimizer.params.per_head_muon",
       .fallback = "false",
       .types = "Muon",
       .state = refused,
       .reason = "heads are not known here; leave it out"},
      {.key = "optimizer.params.max_grad_norm",
       .fallback = "null",
       .types = kAllOptimizers,
       .state = refused,
       .reason = "DeepSpeed's optimizers do not have it; write gradient_clipping at the top of the file"},
  };
}

std::vector<Row> scheduler_rows() {
  return {
      {.key = "scheduler.type", .place = ROW_PLACE(scheduler->type)},
      {SCHEDULER(warmup_min_lr), .types = "WarmupLR WarmupDecayLR", .least = 0},
      {SCHEDULER(warmup_max_lr), .types = "WarmupLR WarmupDecayLR", .least = 0},
      {SCHEDULER(warmup_num_steps), .types = kWarmups},
      {SCHEDULER(warmup_type), .types = kWarmups},
      {SCHEDULER(total_num_steps), .types = "WarmupDecayLR WarmupCosineLR", .needed = true, .least = 0},
      {SCHEDULER(warmup_min_ratio), .types = "WarmupCosineLR", .least = 0},
      {SCHEDULER(cos_min_ratio), .types = "WarmupCosineLR", .least = 0},
      {SCHEDULER(cycle_min_lr), .types = "OneCycle", .needed = true, .least = 0},
      {SCHEDULER(cycle_max_lr), .types = "OneCycle", .needed = true, .least = 0},
      {SCHEDULER(decay_lr_rate), .types = "OneCycle"},
      {SCHEDULER(cycle_first_step_size), .types = "OneCycle", .least = 0, .above = true},
      {SCHEDULER(cycle_second_step_size), .types = "OneCycle", .least = 0, .above = true},
      {SCHEDULER(cycle_first_stair_count), .types = "OneCycle", .least = 0},
      {SCHEDULER(cycle_second_stair_count), .types = "OneCycle", .least = 0},
      {SCHEDULER(decay_step_size), .types = "OneCycle", .least = 0},
      {SCHEDULER(cycle_momentum), .types = "OneCycle"},
      {SCHEDULER(cycle_min_mom), .types = "OneCycle"},
      {SCHEDULER(cycle_max_mom), .types = "OneCycle"},
      {SCHEDULER(decay_mom_rate), .types = "OneCycle"},
      {SCHEDULER(lr_range_test_min_lr), .types = "LRRangeTest", .least = 0},
      {SCHEDULER(lr_range_test_step_size), .types = "LRRangeTest", .least = 0, .above = true},
      {SCHEDULER(lr_range_test_step_rate), .types = "LRRangeTest"},
      {SCHEDULER(lr_range_test_staircase), .types = "LRRangeTest"},
      {SCHEDULER(last_batch_iteration), .types = "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
       .least = -1},
  };
}

std::vector<Row> precision_rows() {
  return {
      {ROW(fp16.enabled)},
      {ROW(fp16.auto_cast), .idle = not_fp16},
      {ROW(fp16.loss_scale), .idle = not_fp16, .least = 0, .no_truth = true},
      {ROW(fp16.initial_scale_power), .idle = no_dynamic_scale},
      {ROW(fp16.loss_scale_window), .idle = no_dynamic_scale, .no_truth = true},
      {ROW(fp16.hysteresis), .idle = no_dynamic_scale},
      {ROW(fp16.consecutive_hysteresis), .idle = no_dynamic_scale},
      {ROW(fp16.min_loss_scale), .idle = no_dynamic_scale, .no_truth = true},
      {ROW(fp16.fp16_master_weights_and_grads), .idle = not_fp16},
      {ROW(bf16.enabled)},
      {ROW(bf16.immediate_grad_update), .state = no_meaning,
       .reason = "gradients are added as soon as they are whole, always"},
      {ROW(bf16.check_grad_overflow), .idle = not_bf16, .moved = "0.19.3", .before = "false"},
      {ROW(bf16.bf16_master_weights_and_grads), .idle = not_bf16},
      {ROW(bf16.bf16_optimizer_states), .idle = not_bf16},
      {ROW(torch_autocast.enabled)},
      {ROW(torch_autocast.dtype), .idle = no_autocast, .choices = "bfloat16|float16|bf16|fp16|half"},
      {ROW(torch_autocast.lower_precision_safe_modules), .idle = no_autocast},
      {ROW(data_types.grad_accum_dtype), .choices = kDtypes},
      {ROW(data_types.param_dtype), .choices = kDtypes},
      {ROW(data_types.buffer_dtype), .idle = not_low, .choices = kDtypes, .since = "0.19.2"},
      {ROW(data_types.keep_in_fp32_modules), .idle = keeps_nothing, .choices = "auto", .since = "0.19.8"},
  };
}

std::vector<Row> zero_rows() {
  return {
      {ROW(zero_optimization.stage), .least = 0, .most = 3},
      {ROW(zero_optimization.contiguous_gradients), .state = no_meaning, .reason = kUnits},
      {ROW(zero_optimization.reduce_scatter), .state = no_meaning,
       .reason = "gradients go to those who own them, by one operation, in any case"},
      {ROW(zero_optimization.reduce_bucket_size), .least = 0, .above = true},
      {ROW(zero_optimization.use_multi_rank_bucket_allreduce), .state = no_meaning, .reason = kUnits,
       .since = "0.12.4"},
      {ROW(zero_optimization.allgather_partitions), .state = no_meaning, .reason = kDeadThere},
      {ROW(zero_optimization.allgather_bucket_size), .idle = not_stage_1_or_2, .least = 0},
      {ROW(zero_optimization.overlap_comm), .idle = at_stage_0},
      {ROW(zero_optimization.compute_grad_norm), .state = no_meaning,
       .reason = "a norm is worked out only where something asks for it", .since = "0.19.7"},
      {ROW(zero_optimization.load_from_fp32_weights), .idle = at_stage_0},
      {ROW(zero_optimization.elastic_checkpoint), .state = no_meaning,
       .reason = "checkpoints load with any number of ranks"},
      {ROW(zero_optimization.sub_group_size), .idle = no_states_in_files, .least = 0},
      {ROW(zero_optimization.offload_optimizer.device), .idle = states_move_nowhere, .choices = "none|cpu|nvme"},
      {ROW(zero_optimization.offload_optimizer.nvme_path), .idle = no_states_in_files},
      {ROW(zero_optimization.offload_optimizer.buffer_count), .idle = no_states_in_files, .least = 1},
      {ROW(zero_optimization.offload_optimizer.pin_memory), .idle = states_on_cpu, .moved = "0.19.5",
       .before = "false"},
      {ROW(zero_optimization.offload_optimizer.pipeline_read), .idle = no_states_in_files},
      {ROW(zero_optimization.offload_optimizer.pipeline_write), .idle = no_states_in_files},
      {ROW(zero_optimization.offload_optimizer.fast_init), .state = no_meaning,
       .reason = "states begin as holes in their files: nothing is written at the start"},
      {ROW(zero_optimization.offload_optimizer.ratio), .idle = states_on_cpu, .least = 0, .most = 1},
      {ROW(zero_optimization.offload_optimizer.super_offload), .state = no_meaning,
       .reason = "DeepSpeedPlugin::step_in_backward computes steps while backward runs, without it"},
      {ROW(zero_optimization.offload_optimizer.cpuadam_cores_perc), .state = no_meaning,
       .reason = "all threads of the process step", .least = 0, .most = 1},
      {ROW(zero_optimization.offload_param.device), .idle = parameters_move_nowhere, .choices = "none|cpu|nvme"},
      {ROW(zero_optimization.offload_param.nvme_path), .idle = no_parameters_in_files},
      {ROW(zero_optimization.offload_param.buffer_count), .idle = no_parameters_in_files, .least = 0},
      {ROW(zero_optimization.offload_param.buffer_size), .idle = no_parameters_in_files, .least = 0},
      {ROW(zero_optimization.offload_param.max_in_cpu), .idle = no_parameters_in_files, .least = 0},
      {ROW(zero_optimization.offload_param.pin_memory), .idle = parameters_on_cpu, .moved = "0.19.5",
       .before = "false"},
      {.key = "zero_optimization.zenflow",
       .fallback = "null",
       .state = refused,
       .reason = "updates that come late change the training, and DeepSpeedPlugin::step_in_backward hides the "
                 "optimizer's time without them; leave it out",
       .since = "0.17.5"},
      {.key = "zero_optimization.cpu_offload", .fallback = "false", .nullable = true},
      {.key = "zero_optimization.cpu_offload_param", .fallback = "false", .nullable = true},
      {.key = "zero_optimization.cpu_offload_use_pin_memory",
       .fallback = "false",
       .state = no_meaning,
       .reason = "DeepSpeed drops it as well: write pin_memory into offload_optimizer or offload_param",
       .nullable = true},
      {STAGE3(prefetch_bucket_size), .idle = below_stage_3, .least = 0},
      {STAGE3(param_persistence_threshold), .idle = below_stage_3, .least = 0},
      {STAGE3(model_persistence_threshold), .idle = below_stage_3, .least = 0},
      {STAGE3(max_live_parameters), .idle = below_stage_3, .least = 0},
      {STAGE3(max_reuse_distance), .idle = below_stage_3, .least = 0},
      {STAGE3(gather_16bit_weights_on_model_save), .idle = below_stage_3},
      {.key = "zero_optimization.stage3_gather_fp16_weights_on_model_save", .fallback = "false", .idle = below_stage_3},
      {STAGE3(module_granularity_threshold), .idle = below_stage_3, .least = 0, .since = "0.16.0"},
      {STAGE3(use_all_reduce_for_fetch_params), .state = no_meaning, .reason = "a unit is gathered in place",
       .since = "0.14.3"},
      {STAGE3(allgather_sequential), .idle = below_stage_3, .since = "0.18.5"},
      {ROW(zero_optimization.ignore_unused_parameters)},
      {ROW(zero_optimization.legacy_stage1), .state = refused, .reason = "there is one stage 1; leave it out"},
      {ROW(zero_optimization.round_robin_gradients), .state = no_meaning, .reason = "each unit is cut over all ranks"},
      {ROW(zero_optimization.parameter_alignment), .state = no_meaning,
       .reason = "it says how DeepSpeed's flat groups are padded, which are not made here", .since = "0.19.7"},
      {ROW(zero_optimization.zero_hpz_partition_size), .idle = all_are_near, .least = 0},
      {ROW(zero_optimization.zero_quantized_weights), .idle = nothing_travels},
      {ROW(zero_optimization.zero_quantized_gradients), .idle = nothing_travels},
      {ROW(zero_optimization.zero_quantized_nontrainable_weights), .idle = below_stage_3},
      {ROW(zero_optimization.memory_efficient_linear), .state = no_meaning,
       .reason = "weights are fetched again in backward"},
      {ROW(zero_optimization.override_module_apply), .state = no_meaning, .reason = "values are set after the split"},
      {ROW(zero_optimization.pipeline_loading_checkpoint), .state = no_meaning,
       .reason = "each rank reads only its own bytes"},
      {ROW(zero_optimization.log_trace_cache_warnings), .idle = nothing_is_fetched, .since = "0.16.4"},
      {ROW(zero_optimization.enable_sanity_checks), .state = no_meaning,
       .reason = "ranks that reduce in other orders are named in any case"},
      {ROW(zero_optimization.save_muon_momentum_buffer_in_memory), .state = later,
       .reason = "leave it out: all states lie in files", .idle = no_momentum_in_files, .since = "0.18.9"},
      {ROW(zero_optimization.leaf_module.classes), .idle = below_stage_3, .since = "0.18.0"},
      {ROW(zero_optimization.leaf_module.names), .idle = below_stage_3, .since = "0.18.0"},
      {ROW(zero_optimization.leaf_module.name_suffixes), .idle = below_stage_3, .since = "0.18.0"},
      {.key = "allgather_size", .fallback = "500000000", .idle = not_stage_1_or_2, .least = 0},
  };
}

std::vector<Row> file_rows() {
  return {
      {ROW(aio.block_size), .idle = no_files, .least = 1},
      {ROW(aio.queue_depth), .idle = no_files, .least = 1},
      {ROW(aio.intra_op_parallelism), .old_name = "thread_count", .idle = no_files, .least = 1, .since = "0.16.4"},
      {ROW(aio.single_submit), .idle = no_files},
      {ROW(aio.overlap_events), .idle = no_files},
      {ROW(aio.use_gds), .state = refused, .reason = "files are read through the host's memory; leave it out"},
      {ROW(activation_checkpointing.partition_activations), .state = no_meaning,
       .reason = "tensors are not split over ranks, so each rank's inputs are its own"},
      {ROW(activation_checkpointing.cpu_checkpointing), .idle = inputs_on_cpu},
      {ROW(activation_checkpointing.contiguous_memory_optimization), .state = no_meaning,
       .reason = "each layer's inputs stay where they were computed"},
      {ROW(activation_checkpointing.number_checkpoints), .state = no_meaning,
       .reason = "each layer's inputs are kept by themselves", .least = 0},
      {ROW(activation_checkpointing.synchronize_checkpoint_boundary), .idle = no_streams},
      {ROW(activation_checkpointing.profile)},
      {ROW(checkpoint.tag_validation), .choices = "Ignore|Warn|Fail", .any_case = true},
      {ROW(checkpoint.load_universal)},
      {ROW(checkpoint.use_node_local_storage)},
      {ROW(checkpoint.parallel_write.pipeline_stage), .state = no_meaning, .reason = "the model is no pipeline"},
      {.key = "checkpoint.checkpoint_serialization", .fallback = "true", .state = no_meaning, .reason = kNoGarbage},
      {.key = "checkpoint.writer.type", .fallback = "null", .state = later},
      {ROW(checkpoint.writer.decoupled), .state = later},
      {ROW(checkpoint.writer.show_statistics), .state = later},
      {.key = "checkpoint.writer.io_buffer_size", .fallback = "67108864", .state = no_meaning},
      {.key = "checkpoint.writer.io_buffer_double", .fallback = "true", .state = no_meaning},
      {.key = "checkpoint.writer.data_parallel", .fallback = "null", .state = no_meaning},
      {.key = "checkpoint.writer.io_multiplier", .fallback = "1", .state = no_meaning},
      {.key = "datastates_ckpt",
       .fallback = "null",
       .state = refused,
       .reason = "a Python package; save_state behind training is here without it"},
  };
}

std::vector<Row> monitor_rows() {
  return {
      {ROW(tensorboard.enabled)},
      {ROW(tensorboard.output_path), .idle = no_tensorboard},
      {ROW(tensorboard.job_name), .idle = no_tensorboard},
      {ROW(csv_monitor.enabled)},
      {ROW(csv_monitor.output_path), .idle = no_csv},
      {ROW(csv_monitor.job_name), .idle = no_csv},
      {ROW(wandb.enabled)},
      {ROW(wandb.group), .idle = no_wandb, .nullable = true},
      {ROW(wandb.team), .idle = no_wandb, .nullable = true},
      {ROW(wandb.project), .idle = no_wandb},
      {ROW(comet.enabled)},
      {ROW(comet.samples_log_interval), .idle = no_comet, .least = 0, .above = true},
      {ROW(comet.project), .idle = no_comet, .nullable = true},
      {ROW(comet.workspace), .idle = no_comet, .nullable = true},
      {ROW(comet.api_key), .idle = no_comet, .nullable = true, .secret = true},
      {.key = "comet.experiment_name",
       .fallback = "null",
       .state = no_meaning,
       .reason = "comet_ml.start takes it from COMET_START_EXPERIMENT_NAME"},
      {ROW(comet.experiment_key), .idle = no_comet, .nullable = true},
      {.key = "comet.online", .fallback = "null", .state = no_meaning, .reason = "COMET_START_ONLINE says it"},
      {ROW(comet.mode), .idle = no_comet, .nullable = true},
      {ROW(flops_profiler.enabled)},
      {ROW(flops_profiler.profile_step), .idle = no_flops, .least = 0},
      {ROW(flops_profiler.module_depth), .idle = no_flops, .least = -1},
      {ROW(flops_profiler.top_modules), .idle = no_flops, .least = 0},
      {ROW(flops_profiler.detailed), .idle = no_flops},
      {ROW(flops_profiler.output_file), .idle = no_flops},
      {ROW(flops_profiler.recompute_fwd_factor), .idle = no_flops, .least = 0},
      {.key = "autotuning.enabled",
       .fallback = "false",
       .state = refused,
       .reason = "`accelerate estimate-memory --strategy ...` finds without runs what fits"},
      {.key = "autotuning.fast", .fallback = "true", .state = no_meaning},
      {.key = "autotuning.results_dir", .fallback = "null", .state = no_meaning},
      {.key = "autotuning.exps_dir", .fallback = "null", .state = no_meaning},
      {.key = "autotuning.overwrite", .fallback = "true", .state = no_meaning},
      {.key = "autotuning.metric",
       .fallback = R"("throughput")",
       .state = no_meaning,
       .choices = "throughput|latency|flops"},
      {.key = "autotuning.metric_path", .fallback = "null", .state = no_meaning},
      {.key = "autotuning.start_profile_step", .fallback = "3", .state = no_meaning},
      {.key = "autotuning.end_profile_step", .fallback = "5", .state = no_meaning},
      {.key = "autotuning.tuner_type",
       .fallback = R"("gridsearch")",
       .state = no_meaning,
       .choices = "gridsearch|model_based|random"},
      {.key = "autotuning.tuner_early_stopping", .fallback = "5", .state = no_meaning},
      {.key = "autotuning.tuner_num_trials", .fallback = "50", .state = no_meaning},
      {.key = "autotuning.arg_mappings", .fallback = "null", .state = no_meaning},
      {.key = "autotuning.max_train_batch_size", .fallback = "null", .state = no_meaning},
      {.key = "autotuning.min_train_batch_size", .fallback = "1", .state = no_meaning},
      {.key = "autotuning.max_train_micro_batch_size_per_gpu", .fallback = "1024", .state = no_meaning},
      {.key = "autotuning.min_train_micro_batch_size_per_gpu", .fallback = "1", .state = no_meaning},
      {.key = "autotuning.num_tuning_micro_batch_sizes", .fallback = "3", .state = no_meaning},
      {.key = "autotuning.mp_size", .fallback = "1", .state = no_meaning},
      {.key = "autotuning.model_info", .fallback = "null", .state = no_meaning},
      {.key = "autotuning.model_info_path", .fallback = "null", .state = no_meaning},
  };
}

/// Rows of a section of which nobody needs the values.
void add_unneeded(std::vector<Row>& rows, std::initializer_list<std::pair<const char*, const char*>> keys) {
  for (const auto& [key, fallback] : keys) rows.push_back({.key = key, .fallback = fallback, .state = no_meaning});
}
void add_refused(std::vector<Row>& rows, std::initializer_list<std::pair<const char*, const char*>> keys,
                 const char* reason, const char* fine = nullptr) {
  for (const auto& [key, fallback] : keys)
    rows.push_back({.key = key, .fallback = fallback, .state = refused, .reason = reason, .fine = fine});
}

std::vector<Row> other_engines_rows() {
  std::vector<Row> rows;
  constexpr const char* kTensors =
      "tensors are not split over ranks in this version; ParallelismConfig::tp_size will say it";
  add_refused(rows, {{"tensor_parallel.autotp_size", "0"}, {"tensor_parallel.tp.tp_size", "1"}}, kTensors, "[0, 1]");
  add_refused(rows,
              {{"tensor_parallel.kernel_inject", "false"}, {"tensor_parallel.replace_with_kernel_inject", "false"}},
              "DeepSpeed's CUDA kernels are not here; leave it out");
  add_unneeded(rows, {{"tensor_parallel.tp.tp_grain_size", "1"},
                      {"tensor_parallel.tp_overlap_comm", "false"},
                      {"tensor_parallel.preset_model", "null"},
                      {"tensor_parallel.partition_config", "null"},
                      {"tensor_parallel.dtype", "null"},
                      {"tensor_parallel.vocab_parallel_lm_head", "false"},
                      {"tensor_parallel.vocab_parallel_ce_backend", "\"torch\""},
                      {"tensor_parallel.injection_policy_tuple", "null"},
                      {"tensor_parallel.keep_module_on_host", "false"}});
  add_refused(rows, {{"expert_parallel.enabled", "false"}},
              "experts are not split over ranks in this version; leave it out");
  add_refused(rows, {{"expert_parallel.load_balance_coeff", "null"}}, "DeepSpeed does not have it yet either");
  add_unneeded(rows, {{"expert_parallel.autoep_size", "1"},
                      {"expert_parallel.expert_tensor_parallel_size", "1"},
                      {"expert_parallel.disable_triton_grouped_mm", "false"}});
  add_unneeded(rows, {{"expert_parallel.preset_model", "null"},
                      {"expert_parallel.moe_layer_pattern", "null"},
                      {"expert_parallel.router_pattern", "null"},
                      {"expert_parallel.expert_pattern", "null"},
                      {"expert_parallel.shared_experts_pattern", "null"},
                      {"expert_parallel.shared_experts_gate_pattern", "null"},
                      {"expert_parallel.expert_w1", "null"},
                      {"expert_parallel.expert_w2", "null"},
                      {"expert_parallel.expert_w3", "null"},
                      {"expert_parallel.num_experts_attr", "null"},
                      {"expert_parallel.top_k_attr", "null"},
                      {"expert_parallel.top_k", "null"},
                      {"expert_parallel.score_func", "null"},
                      {"expert_parallel.score_apply", "null"},
                      {"expert_parallel.route_norm", "null"},
                      {"expert_parallel.route_scale", "null"},
                      {"expert_parallel.routed_scaling_factor", "\"auto\""},
                      {"expert_parallel.num_expert_groups", "null"},
                      {"expert_parallel.num_limited_groups", "null"},
                      {"expert_parallel.has_shared_experts", "null"},
                      {"expert_parallel.use_grouped_mm", "null"},
                      {"expert_parallel.validate_folding_routing", "null"},
                      {"expert_parallel.async_split_plan", "null"},
                      {"expert_parallel.combine_impl", "null"},
                      {"expert_parallel.row_weighting_impl", "null"},
                      {"expert_parallel.gate_up_impl", "null"},
                      {"expert_parallel.expert_activation", "null"},
                      {"expert_parallel.comm_backend", "null"},
                      {"expert_parallel.comm_num_sm", "null"},
                      {"expert_parallel.comm_qp_margin", "null"},
                      {"expert_parallel.comm_max_tokens_per_rank", "null"}});
  add_unneeded(rows, {{"pipeline.stages", "\"auto\""},
                      {"pipeline.partition", "\"best\""},
                      {"pipeline.seed_layers", "false"},
                      {"pipeline.activation_checkpoint_interval", "0"},
                      {"pipeline.pipe_partitioned", "true"},
                      {"pipeline.grad_partitioned", "true"},
                      {"pipeline.use_reentrant", "null"}});
  add_refused(rows, {{"hybrid_engine.enabled", "false"}},
              "text is generated with the model as it is trained; leave it out");
  add_unneeded(rows, {{"hybrid_engine.max_out_tokens", "512"},
                      {"hybrid_engine.inference_tp_size", "1"},
                      {"hybrid_engine.release_inference_cache", "false"},
                      {"hybrid_engine.pin_parameters", "true"},
                      {"hybrid_engine.tp_gather_partition_size", "8"},
                      {"hybrid_engine.enable_cuda_graph", "false"}});
  add_refused(rows, {{"compile.deepcompile", "false"}}, "there is no compiler of graphs in C++; leave it out");
  add_unneeded(rows, {{"compile.passes", "null"},
                      {"compile.offload_activation", "false"},
                      {"compile.offload_activation_pin_memory", "true"},
                      {"compile.offload_opt_states", "false"},
                      {"compile.offload_parameters", "false"},
                      {"compile.free_activation", "false"},
                      {"compile.free_activation_threshold", "10485760"},
                      {"compile.double_buffer", "true"},
                      {"compile.symmetric_memory", "false"},
                      {"compile.debug_log", "false"},
                      {"compile.sync_before_reduce", "false"},
                      {"compile.sync_after_reduce", "false"},
                      {"compile.sync_before_allgather", "false"},
                      {"compile.sync_after_allgather", "false"},
                      {"compile.keep_int_input_tensors", "true"},
                      {"compile.keep_all_input_tensors", "false"},
                      {"compile.autoep_non_moe", "null"}});
  constexpr const char* kSampling = "samplers and layers are the program's; leave it out";
  add_refused(rows,
              {{"data_efficiency.enabled", "false"},
               {"data_efficiency.data_sampling.enabled", "false"},
               {"data_efficiency.data_sampling.curriculum_learning.enabled", "false"},
               {"data_efficiency.data_sampling.dynamic_batching.enabled", "false"},
               {"data_efficiency.data_routing.enabled", "false"},
               {"data_efficiency.data_routing.random_ltd.enabled", "false"}},
              kSampling);
  add_unneeded(rows, {{"data_efficiency.seed", "1234"},
                      {"data_efficiency.data_sampling.num_epochs", "1000"},
                      {"data_efficiency.data_sampling.num_workers", "0"},
                      {"data_efficiency.data_sampling.pin_memory", "false"},
                      {"data_efficiency.data_sampling.curriculum_learning.data_cluster_path", "null"},
                      {"data_efficiency.data_sampling.curriculum_learning.curriculum_metrics", "null"},
                      {"data_efficiency.data_sampling.dynamic_batching.metrics_path", "null"},
                      {"data_efficiency.data_sampling.dynamic_batching.lr_scaling_method", "\"linear\""},
                      {"data_efficiency.data_sampling.dynamic_batching.min_batch_size", "1"},
                      {"data_efficiency.data_sampling.dynamic_batching.max_batch_size", "null"},
                      {"data_efficiency.data_sampling.dynamic_batching.sequence_picking_order", "\"dataloader\""},
                      {"data_efficiency.data_sampling.dynamic_batching.max_tokens", "null"},
                      {"data_efficiency.data_sampling.dynamic_batching.verbose", "false"},
                      {"data_efficiency.data_routing.random_ltd.total_layer_num", "null"},
                      {"data_efficiency.data_routing.random_ltd.random_ltd_layer_num", "null"},
                      {"data_efficiency.data_routing.random_ltd.random_ltd_layer_id", "null"},
                      {"data_efficiency.data_routing.random_ltd.model_mask_name", "null"},
                      {"data_efficiency.data_routing.random_ltd.model_type", "null"},
                      {"data_efficiency.data_routing.random_ltd.hidden_state_order", "null"},
                      {"data_efficiency.data_routing.random_ltd.random_ltd_schedule", "null"},
                      {"data_efficiency.data_routing.random_ltd.layer_token_lr_schedule", "null"}});
  add_refused(rows, {{"weight_quantization", "null"}}, "load the model with BnbQuantizationConfig", "[{}]");
  add_refused(rows, {{"msamp.enabled", "false"}},
              "MS-AMP is a Python package; use mixed_precision fp8 without DeepSpeed, with an FP8RecipeKwargs");
  add_unneeded(rows, {{"msamp.opt_level", "\"O1\""}});
  add_refused(rows, {{"fp32_allreduce", "false"}}, "write \"communication_data_type\": \"fp32\"");
  return rows;
}

#undef SCHEDULER
#undef OPTIMIZER
#undef STAGE3
#undef ROW
#undef ROW_PLACE

}  // namespace

const std::vector<Row>& setting_rows() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all;
    for (auto part : {general_rows, optimizer_rows, scheduler_rows, precision_rows, zero_rows, file_rows, monitor_rows,
                      other_engines_rows})
      for (auto& row : part()) all.push_back(row);
    return all;
  }();
  return rows;
}

const std::vector<Section>& setting_sections() {
  constexpr const char* kCompiled = "there is no compiler of graphs in C++";
  static const std::vector<Section> sections{
      {""},
      {.key = "zero_optimization", .classed = true},
      {.key = "zero_optimization.offload_optimizer", .classed = true, .nullable = true},
      {.key = "zero_optimization.offload_param", .classed = true, .nullable = true},
      {.key = "zero_optimization.leaf_module", .classed = true, .nullable = true},
      {.key = "fp16", .classed = true},
      {.key = "bf16", .classed = true},
      {"optimizer"},
      {"optimizer.params"},
      {"scheduler"},
      {"scheduler.params"},
      {"torch_autocast"},
      {"data_types"},
      {"activation_checkpointing"},
      {.key = "aio", .nullable = true, .lenient = true},
      {"checkpoint"},
      {"checkpoint.parallel_write"},
      {.key = "checkpoint.writer", .reason = "leave it out: files are written by all ranks, each its own"},
      {.key = "timers", .classed = true},
      {.key = "timers.throughput", .classed = true},
      {.key = "comms_logger", .classed = true},
      {.key = "tensorboard", .classed = true},
      {.key = "csv_monitor", .classed = true},
      {.key = "wandb", .classed = true},
      {.key = "comet", .classed = true},
      {"flops_profiler"},
      {.key = "autotuning", .reason = "autotuning is off"},
      {.key = "tensor_parallel", .classed = true, .reason = "tensors are not split over ranks"},
      {.key = "tensor_parallel.tp", .classed = true, .reason = "tensors are not split over ranks"},
      {.key = "expert_parallel", .reason = "expert_parallel is off"},
      {.key = "pipeline", .reason = "the model is no pipeline module"},
      {.key = "hybrid_engine", .classed = true, .reason = "hybrid_engine is off"},
      {.key = "compile", .classed = true, .reason = kCompiled},
      {.key = "data_efficiency", .reason = "data_efficiency is off"},
      {.key = "data_efficiency.data_sampling", .reason = "data_efficiency is off"},
      {.key = "data_efficiency.data_sampling.curriculum_learning", .reason = "data_efficiency is off"},
      {.key = "data_efficiency.data_sampling.dynamic_batching", .reason = "data_efficiency is off"},
      {.key = "data_efficiency.data_routing", .reason = "data_efficiency is off"},
      {.key = "data_efficiency.data_routing.random_ltd", .reason = "data_efficiency is off"},
      {.key = "msamp", .reason = "msamp is off"},
  };
  return sections;
}

const std::vector<Type>& optimizer_types() {
  constexpr const char* kOneBit = "DeepSpeed has removed it; use AdamW with \"communication_data_type\": \"bf16\"";
  constexpr const char* kMup =
      "widths of a base model are not known here; use Adam, AdamW or SGD, and scale lr by group";
  constexpr const char* kNoClass =
      "LibTorch does not have it; use AdamW or SGD, or give prepare() an optimizer of the program";
  static const std::vector<Type> types{
      {.name = "Adam", .any_case = true, .tested = true},
      {.name = "AdamW", .any_case = true, .tested = true},
      {.name = "Adagrad", .any_case = true, .tested = true, .defaults = R"({"lr": 0.01, "eps": 1e-10})"},
      {"SGD"},
      {.name = "RMSprop", .defaults = R"({"lr": 0.01})"},
      {.name = "Lion", .any_case = true, .tested = true},
      {.name = "Lamb", .any_case = true},
      {.name = "Muon",
       .any_case = true,
       .tested = true,
       .defaults = R"({"momentum": 0.95, "lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-10})"},
      {.name = "MuAdam", .state = refused, .reason = kMup, .any_case = true},
      {.name = "MuAdamW", .state = refused, .reason = kMup, .any_case = true},
      {.name = "MuSGD", .state = refused, .reason = kMup, .any_case = true},
      {"OneBitAdam", refused, kOneBit},
      {"ZeroOneAdam", refused, kOneBit},
      {"OneBitLamb", refused, kOneBit},
      {"Adadelta", refused, kNoClass},
      {"Adamax", refused, kNoClass},
      {"NAdam", refused, kNoClass},
      {"RAdam", refused, kNoClass},
      {"ASGD", refused, kNoClass},
      {"Rprop", refused, kNoClass},
      {"SparseAdam", refused, kNoClass},
      {"LBFGS", refused, kNoClass},
      {"Adafactor", refused, kNoClass},
  };
  return types;
}

const std::vector<Type>& scheduler_types() {
  constexpr const char* kProgram =
      "DeepSpeed fails with torch's schedules under ZeRO; use WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or "
      "LRRangeTest, or give prepare() a schedule of the program";
  static const std::vector<Type> types = [] {
    std::vector<Type> all{{"WarmupLR"},
                          {.name = "WarmupDecayLR", .defaults = R"({"warmup_max_lr": 0.001})"},
                          {"WarmupCosineLR"},
                          {"OneCycle"},
                          {"LRRangeTest"}};
    for (const char* name :
         {"LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR",
          "SequentialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR",
          "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR"})
      all.push_back({name, refused, kProgram});
    return all;
  }();
  return types;
}

const std::vector<Removed>& removed_settings() {
  constexpr const char* kEnabled = R"([{"enabled": false}, {}, false])";
  constexpr const char* kMics =
      "split over part of the ranks with ParallelismConfig, dp_replicate and dp_shard (hybrid sharding)";
  static const std::vector<Removed> removed{
      {"amp", "use the section fp16 or bf16", kEnabled},
      {"compression_training", "load the model with BnbQuantizationConfig", kEnabled},
      {"curriculum_learning", "order the samples in the program's sampler", kEnabled},
      {"elasticity",
       "write train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps; restarts with fewer "
       "ranks are the launcher's (--max_restarts)",
       kEnabled},
      {"eigenvalue", "it served quantize_training alone", kEnabled},
      {"graph_harvesting", "steps of a GPU are captured with CUDA graphs by other settings", "[false]"},
      {"nebula", "save with save_state, also behind training", kEnabled},
      {"progressive_layer_drop", "drop layers in the model's own forward", kEnabled},
      {"quantize_training", "load the model with BnbQuantizationConfig", kEnabled},
      {"sparse_attention", "use scaled_dot_product_attention with a mask", "[{}]"},
      {"sparse_gradients", "embeddings may have sparse gradients without a key", "[false]"},
      {"zero_optimization.mics_shard_size", kMics, "[-1]"},
      {"zero_optimization.mics_hierarchical_params_gather", kMics, "[false]"},
      {"zero_optimization.zeropp_loco_param", "quantized gradients have no error feedback", "[{}, null]"},
  };
  return removed;
}

const Section* section_called(std::string_view key) {
  for (const auto& section : setting_sections())
    if (section.key == key) return &section;
  return nullptr;
}

const Row* row_called(std::string_view section, std::string_view name) {
  static const auto by_key = [] {
    std::map<std::string, const Row*, std::less<>> rows;
    for (const auto& row : setting_rows()) {
      const std::string key = row.key;
      const std::string before = key.substr(0, key.rfind('.') + 1);
      rows[key] = &row;
      for (const char* other : {row.other_name, row.old_name})
        if (other) rows[before + other] = &row;
    }
    return rows;
  }();
  const auto found = by_key.find(section.empty() ? std::string(name) : std::string(section) + "." + std::string(name));
  return found == by_key.end() ? nullptr : found->second;
}

bool is_before(std::string_view version, std::string_view other) {
  const auto numbers = [](std::string_view text) {
    std::array<int64_t, 3> result{};
    const char *at = text.data(), *const end = at + text.size();
    for (auto& number : result) {
      const auto [next, error] = std::from_chars(at, end, number);
      const bool last = &number == &result.back();
      if (error != std::errc() || number < 0 || (last ? next != end : next == end || *next != '.'))
        raise<ConfigError>("DeepSpeed plugin: as_of_version is '{}', expected a version of DeepSpeed such as 0.19.8",
                           text.substr(0, 40));
      at = next + 1;
    }
    return result;
  };
  return numbers(version) < numbers(other);
}

}  // namespace accelerate::zero
