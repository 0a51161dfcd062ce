#include "parallel/zero/setting_rules.hpp"

#include <algorithm>

#include "parallel/zero/batch.hpp"
#include "parallel/zero/logged_operations.hpp"
#include "parallel/zero/settings_table.hpp"
#include "parallel/zero/units.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

void derive_batch(ZeroSettings& s, const GivenKeys& given, const ReadOptions& options, Findings& findings) {
  const auto if_given = [&](const char* key, int64_t value) {
    return given.contains(key) ? std::optional(value) : std::nullopt;
  };
  Batch batch{if_given("train_batch_size", s.train_batch_size),
              if_given("train_micro_batch_size_per_gpu", s.train_micro_batch_size_per_gpu),
              if_given("gradient_accumulation_steps", s.gradient_accumulation_steps)};
  if (auto problem = complete(batch, options.ranks); !problem.empty()) {
    findings.problems.push_back(std::move(problem));
    return;
  }
  s.train_batch_size = *batch.train_batch_size;
  s.train_micro_batch_size_per_gpu = *batch.train_micro_batch_size_per_gpu;
  s.gradient_accumulation_steps = *batch.gradient_accumulation_steps;
}

void derive_scheduler(SchedulerSettings& scheduler, const GivenKeys& given, const ReadOptions& options,
                      Findings& findings) {
  auto& params = scheduler.params;
  const bool warms_up = scheduler.type.starts_with("Warmup");
  if (warms_up && params.warmup_num_steps <= 0) {
    if (is_before(options.as_of_version, "0.19.6")) params.warmup_num_steps = 2;
    else
      findings.problems.push_back(fmt::format(
          "'scheduler.params.warmup_num_steps' is {}, expected a whole number above 0", params.warmup_num_steps));
  }
  if (warms_up && params.warmup_type != "log" && params.warmup_type != "linear") {
    findings.warnings.push_back(fmt::format("scheduler.params.warmup_type is '{}', neither log nor linear: log is used",
                                            params.warmup_type.substr(0, 40)));
    params.warmup_type = "log";
  }
  if (is_before(options.as_of_version, "0.19.4")) {
    scheduler.first_groups_lr_for_all = params.warmup_max_lr.empty();
    params.cycle_first_stair_count = 0;
    params.cycle_second_stair_count.reset();
  }
  if (!is_before(options.as_of_version, "0.19.6")) return;
  for (const auto& [key, list] :
       {std::pair("cycle_min_lr", &params.cycle_min_lr), std::pair("cycle_max_lr", &params.cycle_max_lr)})
    if (list->size() > 1 && given.contains(std::string("scheduler.params.") + key))
      findings.problems.push_back(
          fmt::format("'scheduler.params.{}' is a list, which DeepSpeed takes since 0.19.6, but as_of_version is {}; "
                      "write one number",
                      key, options.as_of_version));
}

}  // namespace

void derive(ZeroSettings& s, const GivenKeys& given, const ReadOptions& options, Findings& findings) {
  auto& zero = s.zero_optimization;
  const auto has = [&](const char* key) { return given.contains(key); };
  if (!zero.overlap_comm) zero.overlap_comm = zero.stage == 3;
  if (s.optimizer) {
    // torch's AdamW alone decays weights by itself.
    auto& params = s.optimizer->params;
    if (s.optimizer->type == "AdamW" && params.torch_adam && !has("optimizer.params.weight_decay"))
      params.weight_decay = 0.01;
  }
  if (s.scheduler) derive_scheduler(*s.scheduler, given, options, findings);
  if (s.flops_profiler.enabled) s.wall_clock_breakdown = true;
  if (is_before(options.as_of_version, "0.19.6")) s.timeout_minutes = 30;
  // Until then a whole model was cast, with its buffers.
  if (is_before(options.as_of_version, "0.19.2") && !s.data_types.buffer_dtype && (s.fp16.enabled || s.bf16.enabled))
    s.data_types.buffer_dtype = s.fp16.enabled ? "fp16" : "bf16";
  if (zero.stage == 3 && zero.zero_hpz_partition_size > options.ranks) {
    findings.warnings.push_back(
        fmt::format("zero_optimization.zero_hpz_partition_size is {}, more than the {} ranks: it is now {}",
                    zero.zero_hpz_partition_size, options.ranks, options.ranks));
    zero.zero_hpz_partition_size = options.ranks;
  }
  if (constexpr int64_t kPage = 4096; s.aio.block_size % kPage != 0) {
    const int64_t up = s.aio.block_size / kPage * kPage;
    if (up <= std::numeric_limits<int64_t>::max() - kPage) s.aio.block_size = up + kPage;
    findings.warnings.push_back(
        fmt::format("aio.block_size is no multiple of {} bytes: it is now {}", kPage, s.aio.block_size));
  }
  if (s.torch_autocast.dtype) {
    const auto& word = *s.torch_autocast.dtype;
    s.torch_autocast.dtype = word == "bf16" ? "bfloat16" : word == "fp16" || word == "half" ? "float16" : word;
  }
  derive_batch(s, given, options, findings);
}

void check_together(const ZeroSettings& s, const GivenKeys& given, const ReadOptions& options, Findings& findings) {
  const auto& zero = s.zero_optimization;
  const bool offloads = zero.stage > 0 && zero.offload_optimizer.device != "none";
  const auto has = [&](const char* key) { return given.contains(key); };
  const auto wrong = [&](bool is_wrong, const auto& text) {
    if (is_wrong) findings.problems.emplace_back(text);
  };

  // ---- precision
  wrong(s.fp16.enabled && s.bf16.enabled,
        "'fp16.enabled' and 'bf16.enabled' are both true, expected at most one; a model has one dtype. Remove one");
  if (s.fp16.loss_scale == 0) {
    for (const auto& [key, value] :
         {std::pair("loss_scale_window", s.fp16.loss_scale_window), std::pair("min_loss_scale", s.fp16.min_loss_scale)})
      wrong(value <= 0, fmt::format("'fp16.{}' is {}, expected a whole number above 0, since the loss scale is dynamic "
                                    "(fp16.loss_scale is 0)",
                                    key, value));
  }
  wrong(s.bf16.enabled && s.bf16.bf16_optimizer_states && !s.bf16.bf16_master_weights_and_grads,
        "'bf16.bf16_optimizer_states' is true without 'bf16.bf16_master_weights_and_grads'; moments have at least the "
        "bits of the masters. Set both, or neither");
  wrong(zero.stage == 0 && s.fp16.enabled && s.fp16.fp16_master_weights_and_grads,
        "'fp16.fp16_master_weights_and_grads' is true at stage 0, expected zero_optimization.stage 1, 2 or 3");
  wrong(zero.stage == 0 && s.bf16.enabled && s.bf16.bf16_master_weights_and_grads,
        "'bf16.bf16_master_weights_and_grads' is true at stage 0, expected zero_optimization.stage 1, 2 or 3");
  // Only DeepSpeed's Adam for the host has fp32 moments of 16-bit masters.
  const bool needs_host_adam =
      zero.stage > 0 && s.has_low_masters() && (!s.bf16.bf16_optimizer_states || offloads || s.fp16.enabled);
  const char* const low = s.fp16.enabled ? "fp16.fp16_master_weights_and_grads" : "bf16.bf16_master_weights_and_grads";
  wrong(needs_host_adam && !offloads,
        fmt::format("'{}' is true without zero_optimization.offload_optimizer, expected its device to be cpu, where "
                    "DeepSpeed's Adam keeps fp32 moments of 16-bit masters{}; set it, or leave the masters out",
                    low, s.bf16.enabled ? " (or 'bf16.bf16_optimizer_states')" : ""));
  wrong(
      needs_host_adam && s.optimizer &&
          ((s.optimizer->type != "Adam" && s.optimizer->type != "AdamW") || s.optimizer->params.torch_adam),
      fmt::format("'{}' is true with 'optimizer.type' {}{}, expected DeepSpeed's own Adam or AdamW, which alone steps "
                  "on 16-bit masters of the host; use one of these, or leave the masters out",
                  low, s.optimizer ? s.optimizer->type : "",
                  s.optimizer && s.optimizer->params.torch_adam ? " (torch_adam)" : ""));
  const std::string dtype = s.fp16.enabled ? "fp16" : s.bf16.enabled ? "bf16" : "fp32";
  wrong(zero.stage == 0 && s.data_types.grad_accum_dtype.value_or(dtype) != dtype,
        fmt::format(
            "'data_types.grad_accum_dtype' is {}, but at stage 0 gradients add up in the model's dtype, {}; leave "
            "it out, or use zero_optimization.stage 1, 2 or 3",
            s.data_types.grad_accum_dtype.value_or(""), dtype));
  // Gradients are added up in the dtype in which they travel, or in that of the masters.
  const auto& sums = s.data_types.grad_accum_dtype;
  const std::string travels = s.communication_data_type.value_or(dtype);
  wrong(zero.stage > 0 && sums && *sums != "fp32" && (*sums != dtype || travels != dtype),
        fmt::format(
            "'data_types.grad_accum_dtype' is {} in a model of {} whose gradients travel in {}, expected fp32, or "
            "one dtype for all of them; leave it out",
            sums.value_or(""), dtype, travels));
  wrong(s.data_types.param_dtype.value_or(dtype) != dtype,
        fmt::format("'data_types.param_dtype' is {}, but the sections fp16 and bf16 say {}; leave it out",
                    s.data_types.param_dtype.value_or(""), dtype));
  if (s.keeps_buffers())
    for (const auto& pattern : s.data_types.keep_in_fp32_modules) try {
        static_cast<void>(parallel::expression_of_buffers(pattern));
      } catch (const ConfigError& error) {
        wrong(true, fmt::format("'data_types.keep_in_fp32_modules' has '{}', expected a pattern of names of buffers, "
                                "where * stands for any characters ({}); correct it",
                                pattern.substr(0, 60), error.what()));
      }
  wrong(s.torch_autocast.enabled && zero.stage == 3 && zero.zero_quantized_weights &&
            has("torch_autocast.lower_precision_safe_modules"),
        "'torch_autocast.lower_precision_safe_modules' and 'zero_optimization.zero_quantized_weights' exclude each "
        "other: both say how weights travel. Leave one out");

  // ---- stages
  wrong(zero.allgather_bucket_size == 0 && (zero.stage == 1 || zero.stage == 2),
        "'zero_optimization.allgather_bucket_size' is 0, expected a whole number above 0: by pieces of 0 elements "
        "nothing is gathered");
  wrong(!zero.compute_grad_norm && (zero.stage == 0 || zero.stage == 3 || s.gradient_clipping > 0 || offloads),
        fmt::format(
            "'zero_optimization.compute_grad_norm' is false, which needs stage 1 or 2, gradient_clipping 0 and no "
            "offload_optimizer; found stage {}, gradient_clipping {}, offload_optimizer.device {}. Correct these, "
            "or leave it out",
            zero.stage, s.gradient_clipping, zero.offload_optimizer.device));
  wrong(s.gradient_allreduce_op == "sum" && zero.stage == 3,
        "'gradient_allreduce_op' is sum, which stage 3 does not have; use mean, or stage 0, 1 or 2");
  for (const auto& [key, used] : {std::pair("prescale_gradients", s.prescale_gradients),
                                  std::pair("gradient_predivide_factor", s.gradient_predivide_factor != 1)})
    wrong(used && zero.stage >= 2 && zero.reduce_scatter && s.gradient_allreduce_op == "mean",
          fmt::format("'{}' does not go with zero_optimization.reduce_scatter at stages 2 and 3; set that to false, or "
                      "leave it out",
                      key));
  wrong(
      !s.managed_gradient_accumulation && zero.stage <= 1 && zero.overlap_comm.value_or(false),
      "'managed_gradient_accumulation' is false, which does not go with zero_optimization.overlap_comm at stages 0 and "
      "1; set overlap_comm to false");
  wrong(zero.offload_optimizer.ratio < 1 && zero.stage < 3,
        fmt::format("'zero_optimization.offload_optimizer.ratio' is {}, but at stage {} all states are stepped in one "
                    "place, expected 1; leave it out, or use stage 3",
                    zero.offload_optimizer.ratio, zero.stage));
  if (const char* other = zero.offload_param.device == "cpu" ? "offload_param, whose parameters come from the masters"
                          : s.has_low_masters() ? "masters of 16 bits, which DeepSpeed's Adam for the host steps"
                                                : nullptr;
      other && zero.offload_optimizer.ratio < 1 && zero.stage == 3 && offloads && options.cuda)
    findings.later.push_back(
        fmt::format("'zero_optimization.offload_optimizer.ratio' is {} beside {}, which is not in this version: leave "
                    "it out",
                    zero.offload_optimizer.ratio, other));
  const auto no_folder = [](const std::string& device, const std::optional<std::string>& path) {
    return device == "nvme" &&
           (path.value_or("").empty() || *path == "none");  // a plugin's field for no folder is none
  };
  wrong(zero.stage > 0 && no_folder(zero.offload_optimizer.device, zero.offload_optimizer.nvme_path),
        "'zero_optimization.offload_optimizer.nvme_path' is missing, expected a folder, since its device is nvme");
  wrong(zero.stage == 3 && no_folder(zero.offload_param.device, zero.offload_param.nvme_path),
        "'zero_optimization.offload_param.nvme_path' is missing, expected a folder, since its device is nvme");
  if (const auto& states = zero.offload_optimizer; zero.stage > 0 && states.device == "nvme") {
    // One group is stepped on.
    const int64_t least = 1 + (states.pipeline_read ? 1 : 0) + (states.pipeline_write ? 1 : 0);
    wrong(states.buffer_count < least,
          fmt::format("'zero_optimization.offload_optimizer.buffer_count' is {}, expected at least {}: so many groups "
                      "are in memory with pipeline_read {} and pipeline_write {}",
                      states.buffer_count, least, states.pipeline_read, states.pipeline_write));
  }
  wrong(zero.zero_quantized_gradients && zero.stage == 3 && !zero.reduce_scatter,
        "'zero_optimization.zero_quantized_gradients' is true and 'zero_optimization.reduce_scatter' false, which "
        "DeepSpeed refuses: pieces of gradients go to those who own them. Set reduce_scatter to true, or leave it out");
  if (const int64_t part = zero.zero_hpz_partition_size; zero.stage == 3 && part > 1)
    wrong(options.ranks % part != 0,
          fmt::format("'zero_optimization.zero_hpz_partition_size' is {}, expected a divisor of the {} ranks", part,
                      options.ranks));

  // ---- the rest
  if (s.optimizer) {
    const auto& types = optimizer_types();
    const auto type =
        std::find_if(types.begin(), types.end(), [&](const Type& t) { return t.name == s.optimizer->type; });
    wrong(zero.stage > 0 && !s.zero_allow_untested_optimizer && type != types.end() && !type->tested,
          fmt::format(
              "'zero_allow_untested_optimizer' is false, but 'optimizer.type' {} is none that ZeRO was tested with "
              "(Adam, AdamW, Adagrad, Lion, Muon); set it to true, or use one of these",
              s.optimizer->type));
    wrong(s.optimizer->params.amsgrad && !s.optimizer->params.torch_adam,
          "'optimizer.params.amsgrad' is true, which DeepSpeed's own optimizers do not have; leave it out, or set "
          "torch_adam with Adam or AdamW");
    wrong(
        s.optimizer->params.amsgrad && !s.optimizer->params.bias_correction,
        "'optimizer.params.amsgrad' is true and 'optimizer.params.bias_correction' false, which torch's Adam does not "
        "have; leave one of them out");
  }
  if (s.data_parallel_size)
    wrong(*s.data_parallel_size != options.ranks,
          fmt::format("'data_parallel_size' is {}, but there are {} ranks; leave it out", *s.data_parallel_size,
                      options.ranks));
  if (s.comms_logger.enabled && !s.comms_logger.prof_all)
    for (const auto& name : s.comms_logger.prof_ops) {
      const auto* known = logged_operation(name);
      wrong(!known,
            fmt::format("'comms_logger.prof_ops' has '{}', which DeepSpeed logs nothing as, expected all_reduce, "
                        "all_gather, reduce_scatter, broadcast, barrier, send or recv, or DeepSpeed's other "
                        "names of these; correct it",
                        name.substr(0, 40)));
      if (known && !known->here)
        findings.warnings.push_back(
            fmt::format("comms_logger.prof_ops has {}, which nothing here does: it counts none", name));
    }
  const auto& activation = s.activation_checkpointing;
  wrong(
      activation.contiguous_memory_optimization && !(activation.partition_activations && activation.number_checkpoints),
      "'activation_checkpointing.contiguous_memory_optimization' needs partition_activations and number_checkpoints; "
      "leave it out");
}

}  // namespace accelerate::zero
