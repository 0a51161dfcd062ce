#include "parallel/zero/objects.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/optim/deepspeed_adam.hpp"
#include "accelerate/optim/deepspeed_schedules.hpp"
#include "accelerate/optim/grad_scaler.hpp"
#include "accelerate/optim/lamb.hpp"
#include "accelerate/optim/lion.hpp"
#include "accelerate/optim/muon.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "parallel/deepspeed_files.hpp"
#include "parallel/engines.hpp"
#include "parallel/zero/document.hpp"
#include "parallel/zero/logged_operations.hpp"
#include "parallel/zero/translate.hpp"
#include "residency/activations/checkpoint_rules.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {

namespace {

/// Which parameters are matrices for Muon is told by their names. Rates that the file does not have are Muon's own.
std::shared_ptr<torch::optim::Optimizer> make_muon(const ZeroSettings& settings, const DummyOptim& dummy,
                                                   const ParameterNames& names) {
  const auto& p = settings.optimizer->params;
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& group : dummy.param_groups)
    for (const auto& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      named.emplace_back(found == names.end() ? "" : found->second, parameter);
    }
  const bool has_lr = std::any_of(settings.effective.begin(), settings.effective.end(),
                                  [](const auto& entry) { return entry.key == "optimizer.params.lr" && entry.given; });
  optim::MuonOptions matrices(true), rest(false);
  if (has_lr || p.muon_lr) matrices.lr(p.muon_lr.value_or(p.lr));
  if (has_lr || p.adam_lr) rest.lr(p.adam_lr.value_or(p.lr));
  matrices.weight_decay(p.weight_decay).momentum(p.momentum).ns_method(p.ns_method);
  rest.weight_decay(p.weight_decay).betas({p.betas[0], p.betas[1]}).eps(p.eps).adam_w_mode(p.adam_w_mode);
  return std::make_shared<optim::Muon>(optim::muon_groups(named, matrices, rest), matrices);
}

}  // namespace

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const ZeroSettings& settings, const DummyOptim& dummy,
                                                        const ParameterNames& names) {
  if (!settings.optimizer)
    throw ConfigError(
        "prepare: found a DummyOptim, but the DeepSpeed configuration has no section optimizer that it could stand "
        "for, expected an optimizer of the program's own; or write the section");
  namespace to = torch::optim;
  const auto& [type, p] = *settings.optimizer;
  const std::tuple<double, double> betas(p.betas[0], p.betas[1]);
  const bool on_host = settings.has_low_masters() && settings.offloads_states();
  if ((type == "AdamW" || type == "Adam") && (!p.bias_correction || on_host))
    return std::make_shared<optim::DeepSpeedAdam>(
        dummy.param_groups,
        optim::DeepSpeedAdamOptions(p.lr)
            .betas(betas)
            .eps(p.eps)
            .weight_decay(p.weight_decay)
            .adam_w_mode(type == "AdamW" || p.adam_w_mode)
            .bias_correction(p.bias_correction)
            .fp32_optimizer_states(p.fp32_optimizer_states && !settings.bf16.bf16_optimizer_states));
  if (type == "AdamW" || (type == "Adam" && p.adam_w_mode))
    return std::make_shared<to::AdamW>(
        dummy.param_groups,
        to::AdamWOptions(p.lr).betas(betas).eps(p.eps).weight_decay(p.weight_decay).amsgrad(p.amsgrad));
  if (type == "Adam")
    return std::make_shared<to::Adam>(
        dummy.param_groups,
        to::AdamOptions(p.lr).betas(betas).eps(p.eps).weight_decay(p.weight_decay).amsgrad(p.amsgrad));
  if (type == "Adagrad")
    return std::make_shared<to::Adagrad>(dummy.param_groups,
                                         to::AdagradOptions(p.lr)
                                             .lr_decay(p.lr_decay)
                                             .eps(p.eps)
                                             .weight_decay(p.weight_decay)
                                             .initial_accumulator_value(p.initial_accumulator_value));
  if (type == "Lion")
    return std::make_shared<optim::Lion>(dummy.param_groups,
                                         optim::LionOptions(p.lr).betas(betas).weight_decay(p.weight_decay));
  if (type == "Muon") return make_muon(settings, dummy, names);
  if (type == "Lamb")
    return std::make_shared<optim::Lamb>(dummy.param_groups, optim::LambOptions(p.lr)
                                                                 .betas(betas)
                                                                 .eps(p.eps)
                                                                 .eps_inside_sqrt(p.eps_inside_sqrt)
                                                                 .weight_decay(p.weight_decay)
                                                                 .bias_correction(p.bias_correction)
                                                                 .max_coeff(p.max_coeff)
                                                                 .min_coeff(p.min_coeff));
  if (type == "SGD")
    return std::make_shared<to::SGD>(dummy.param_groups, to::SGDOptions(p.lr)
                                                             .momentum(p.momentum)
                                                             .dampening(p.dampening)
                                                             .weight_decay(p.weight_decay)
                                                             .nesterov(p.nesterov));
  if (type == "RMSprop")
    return std::make_shared<to::RMSprop>(dummy.param_groups, to::RMSpropOptions(p.lr)
                                                                 .alpha(p.alpha)
                                                                 .eps(p.eps)
                                                                 .weight_decay(p.weight_decay)
                                                                 .momentum(p.momentum)
                                                                 .centered(p.centered));
  throw InternalError("DeepSpeed configuration: no optimizer is made of type '" + type +
                      "', expected one for each that is read");
}

namespace {

/// A list of one rate is that of all groups.
optim::PerGroup rates(const std::vector<double>& values) {
  return values.size() == 1 ? optim::PerGroup(values.front()) : optim::PerGroup(values);
}

optim::Scheduler scheduler_of_file(const SchedulerSettings& scheduler, const std::string& as_of_version,
                                   torch::optim::Optimizer& optimizer) {
  const auto& [type, p] = std::tie(scheduler.type, scheduler.params);
  if (type == "WarmupLR")
    return optim::warmup_lr(
        optimizer, {.warmup_min_lr = rates(p.warmup_min_lr),
                    .warmup_max_lr = p.warmup_max_lr.empty() ? std::nullopt : std::optional(rates(p.warmup_max_lr)),
                    .warmup_num_steps = p.warmup_num_steps,
                    .warmup_type = p.warmup_type,
                    .last_batch_iteration = p.last_batch_iteration,
                    .as_of_version = as_of_version});
  if (type == "WarmupDecayLR")
    return optim::warmup_decay_lr(
        optimizer, {.total_num_steps = p.total_num_steps,
                    .warmup_min_lr = rates(p.warmup_min_lr),
                    .warmup_max_lr = p.warmup_max_lr.empty() ? optim::PerGroup(0.001) : rates(p.warmup_max_lr),
                    .warmup_num_steps = p.warmup_num_steps,
                    .warmup_type = p.warmup_type,
                    .last_batch_iteration = p.last_batch_iteration,
                    .as_of_version = as_of_version});
  if (type == "WarmupCosineLR")
    return optim::warmup_cosine_lr(optimizer, {.total_num_steps = p.total_num_steps,
                                               .warmup_min_ratio = p.warmup_min_ratio,
                                               .warmup_num_steps = p.warmup_num_steps,
                                               .cos_min_ratio = p.cos_min_ratio,
                                               .warmup_type = p.warmup_type,
                                               .last_batch_iteration = p.last_batch_iteration,
                                               .as_of_version = as_of_version});
  if (type == "OneCycle") {
    optim::DeepSpeedOneCycleOptions options{.cycle_min_lr = rates(p.cycle_min_lr),
                                            .cycle_max_lr = rates(p.cycle_max_lr),
                                            .decay_lr_rate = p.decay_lr_rate,
                                            .cycle_first_step_size = static_cast<double>(p.cycle_first_step_size),
                                            .cycle_first_stair_count = p.cycle_first_stair_count,
                                            .cycle_second_stair_count = p.cycle_second_stair_count,
                                            .decay_step_size = static_cast<double>(p.decay_step_size),
                                            .cycle_momentum = p.cycle_momentum,
                                            .cycle_min_mom = p.cycle_min_mom,
                                            .cycle_max_mom = p.cycle_max_mom,
                                            .decay_mom_rate = p.decay_mom_rate,
                                            .last_batch_iteration = p.last_batch_iteration,
                                            .as_of_version = as_of_version};
    if (p.cycle_second_step_size) options.cycle_second_step_size = static_cast<double>(*p.cycle_second_step_size);
    return optim::deepspeed_one_cycle(optimizer, options);
  }
  if (type == "LRRangeTest")
    return optim::lr_range_test(optimizer, {.lr_range_test_min_lr = rates(p.lr_range_test_min_lr),
                                            .lr_range_test_step_size = p.lr_range_test_step_size,
                                            .lr_range_test_step_rate = p.lr_range_test_step_rate,
                                            .lr_range_test_staircase = p.lr_range_test_staircase,
                                            .last_batch_iteration = p.last_batch_iteration});
  throw InternalError("DeepSpeed configuration: no schedule is made of type '" + type +
                      "', expected one for each that is read");
}

}  // namespace

optim::Scheduler make_scheduler(const ZeroSettings& settings, const DummyScheduler& dummy,
                                torch::optim::Optimizer& optimizer) {
  if (settings.scheduler) return scheduler_of_file(*settings.scheduler, settings.as_of_version, optimizer);
  if (dummy.lr_scheduler_callable) return dummy.lr_scheduler_callable(optimizer);
  throw ConfigError(
      "prepare: found a DummyScheduler, but the DeepSpeed configuration has no section scheduler that it could stand "
      "for, expected one, DummyScheduler::lr_scheduler_callable, or a schedule of the program's own");
}

std::vector<parallel::FileMonitor> monitors_of(const ZeroSettings& settings) {
  std::vector<parallel::FileMonitor> all;
  for (const auto& [name, given] :
       {std::pair("tensorboard", &settings.tensorboard), std::pair("csv_monitor", &settings.csv_monitor)})
    if (given->enabled) all.push_back({.tracker = name, .project_name = given->job_name, .folder = given->output_path});
  const auto add = [](parallel::FileMonitor& to, const char* name, const std::optional<std::string>& value) {
    if (value) to.arguments.emplace(name, *value);
  };
  if (const auto& wandb = settings.wandb; wandb.enabled) {
    auto& one =
        all.emplace_back(parallel::FileMonitor{.tracker = "wandb", .project_name = wandb.project, .folder = {}});
    add(one, "group", wandb.group), add(one, "entity", wandb.team);
  }
  if (const auto& comet = settings.comet; comet.enabled) {
    auto& one = all.emplace_back(parallel::FileMonitor{.tracker = "comet_ml",
                                                       .project_name = comet.project.value_or("deepspeed"),
                                                       .folder = {},
                                                       .every = comet.samples_log_interval});
    add(one, "workspace", comet.workspace), add(one, "api_key", comet.api_key), add(one, "mode", comet.mode);
    add(one, "experiment_key", comet.experiment_key);
  }
  return all;
}

bool is_of_recomputation(std::string_view key) { return key.starts_with("activation_checkpointing."); }

std::unique_ptr<residency::CheckpointRulesScope> checkpoint_rules_of(const ZeroSettings& settings) {
  const auto& given = settings.activation_checkpointing;
  if (!given.cpu_checkpointing && !given.synchronize_checkpoint_boundary && !given.profile) return nullptr;
  residency::CheckpointRules rules{.inputs_on_host = given.cpu_checkpointing,
                                   .synchronize = given.synchronize_checkpoint_boundary};
  if (given.profile && PartialState().is_main_process())
    rules.timed = [](bool again, double ms) {
      PartialState().print(fmt::format("[Rank 0] time (ms) | {}: {:.2f}", again ? "backward" : "fwd", ms));
    };
  return std::make_unique<residency::CheckpointRulesScope>(std::move(rules));
}

parallel::Observed observed_of(const ZeroSettings& settings) {
  parallel::Observed observed{.times = settings.wall_clock_breakdown, .memory = settings.memory_breakdown};
  if (const auto& flops = settings.flops_profiler; flops.enabled)
    observed.flops = parallel::Observed::Flops{.step = flops.profile_step,
                                               .module_depth = flops.module_depth,
                                               .top_modules = flops.top_modules,
                                               .detailed = flops.detailed,
                                               .file = flops.output_file.value_or(""),
                                               .recompute_fwd_factor = flops.recompute_fwd_factor};
  for (const auto& entry : settings.effective)
    if (entry.given && entry.verdict == Verdict::acts && is_of_recomputation(entry.key))
      observed.of_recomputation.push_back(entry.key);
  const auto logs_comms = std::find_if(settings.effective.begin(), settings.effective.end(),
                                       [](const auto& entry) { return entry.key == "comms_logger.enabled"; });
  const auto& comms = settings.comms_logger;
  if (!comms.enabled || logs_comms->verdict != Verdict::acts) return observed;
  observed.comms.emplace().verbose = comms.verbose;
  if (comms.prof_all) return observed;
  for (const auto& name : comms.prof_ops)
    if (const auto* known = logged_operation(name); known && known->here) observed.comms->only.insert(*known->here);
  if (observed.comms->only.empty()) observed.comms.reset();  // nothing here does what is named
  return observed;
}

namespace {

c10::IValue to_ivalue(const nlohmann::ordered_json& value) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    return value.get<double>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& child : value) list.push_back(to_ivalue(child));
    return list;
  }
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, child] : value.items()) dict.insert(key, to_ivalue(child));
  return dict;
}

}  // namespace

std::shared_ptr<const parallel::DeepSpeedFiles> make_files(const ZeroSettings& settings,
                                                           const DeepSpeedConfig& config) {
  const auto& zero = settings.zero_optimization;
  return std::make_shared<parallel::DeepSpeedFiles>(
      parallel::DeepSpeedFiles{.stage = zero.stage,
                               .sub_group_size = zero.sub_group_size,
                               .round_robin = zero.round_robin_gradients,
                               .param_dtype = parallel::compute_dtype(settings),
                               .clip_grad = std::max(0.0, settings.gradient_clipping),
                               .dynamic_loss_scale = settings.fp16.enabled && settings.fp16.loss_scale == 0,
                               .train_batch_size = settings.train_batch_size,
                               .tags_must_agree = settings.checkpoint.tag_validation == "Fail",
                               .checks_tags = settings.checkpoint.tag_validation != "Ignore",
                               .each_node_writes = settings.checkpoint.use_node_local_storage,
                               .load_from_fp32_weights = zero.load_from_fp32_weights,
                               .load_universal = settings.checkpoint.load_universal,
                               .ds_config = to_ivalue(config.document().json),
                               .ds_version = settings.as_of_version});
}

namespace {

std::shared_ptr<optim::GradScaler> scaler_of(const ZeroSettings& settings) {
  const auto& fp16 = settings.fp16;
  if (fp16.enabled && fp16.loss_scale == 0)
    return std::make_shared<optim::GradScaler>(
        optim::DynamicLossScale{.initial_scale = std::ldexp(1.0, static_cast<int>(fp16.initial_scale_power)),
                                .window = fp16.loss_scale_window,
                                .hysteresis = fp16.hysteresis,
                                .consecutive_hysteresis = fp16.consecutive_hysteresis,
                                .min_scale = static_cast<double>(fp16.min_loss_scale)});
  if (fp16.enabled) return std::make_shared<optim::GradScaler>(optim::FixedLossScale{fp16.loss_scale});
  if (parallel::autocast_dtype(settings) == at::kHalf && !settings.bf16.enabled)
    return std::make_shared<optim::GradScaler>();  // torch's
  if (settings.bf16.enabled && settings.bf16.check_grad_overflow)
    return std::make_shared<optim::GradScaler>(optim::FixedLossScale{1});
  return nullptr;
}

}  // namespace

std::shared_ptr<optim::GradScaler> make_scaler(const ZeroSettings& settings) {
  auto scaler = scaler_of(settings);
  if (scaler) scaler->set_widening(true), scaler->set_fp16_gradients(settings.has_low_masters());
  return scaler;
}

}  // namespace accelerate::zero
