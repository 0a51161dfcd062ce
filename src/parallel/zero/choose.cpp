#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <typeinfo>
#include <utility>

#include "accelerate/model/hidden_size.hpp"
#include "accelerate/model/submodule.hpp"
#include "accelerate/optim/deepspeed_adam.hpp"
#include "accelerate/optim/grad_scaler.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/prepare_facts.hpp"
#include "accelerate/residency/deferred.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "optim/fp32_moments.hpp"
#include "optim/receipts.hpp"
#include "parallel/deepspeed_files.hpp"
#include "parallel/engines.hpp"
#include "parallel/sharding/ddp_settings.hpp"
#include "parallel/sharding/sharding.hpp"
#include "parallel/zero/auto_values.hpp"
#include "parallel/zero/document.hpp"
#include "parallel/zero/objects.hpp"
#include "parallel/zero/plugins.hpp"
#include "parallel/zero/translate.hpp"
#include "parallel/zero/units.hpp"
#include "residency/activations/checkpoint_rules.hpp"
#include "state/deepspeed_plugins.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// @throws ConfigError that names the key that keeps optimizers from stepping within backward
void expect_steps_at_once(const zero::ZeroSettings& settings, const ShardingSettings& sharding) {
  if (settings.gradient_clipping > 0)
    raise<ConfigError>(
        "DeepSpeedPlugin::step_at_once: found gradient_clipping {} (which is 1.0 where the configuration leaves it "
        "out), "
        "expected 0: the norm of all gradients is known when all are there. Set gradient_clipping to 0, or "
        "step_in_backward instead, which computes steps within backward and takes them over where nothing is clipped",
        settings.gradient_clipping);
  if (sharding.all_have_gradients)
    throw ConfigError(
        "DeepSpeedPlugin::step_at_once: found zero_optimization.ignore_unused_parameters false, expected true: which "
        "parameters have gradients is known when all steps were taken");
  if (sharding.states_on_disk || sharding.parameters_on_disk)
    throw ConfigError(
        "DeepSpeedPlugin::step_at_once: found states or parameters on nvme, expected them in memory; set "
        "step_in_backward instead, which streams them");
}

bool is_rank0() { return environment::integer({"RANK"}).value_or(0) == 0; }
/// A dry run has none in its environment.
int64_t num_ranks() {
  return PartialState::initialized() ? PartialState().num_processes()
                                     : environment::integer({"WORLD_SIZE"}).value_or(1);
}

/// Whether this process computes elsewhere than on the host, or would if this were no dry run.
bool computes_elsewhere() { return PartialState::initialized() && !PartialState().device().is_cpu(); }

/// The hidden size of the widest module that has one.
std::optional<int64_t> hidden_size_of(const std::vector<ModelRef>& models) {
  std::optional<int64_t> widest;
  for (const auto& model : models)
    for (const auto& module : model.submodules())
      if (const auto* told = dynamic_cast<const HasHiddenSize*>(module.module))
        widest = std::max(widest.value_or(0), told->hidden_size());
  return widest;
}

/// Without its namespaces.
std::string class_name_of(const torch::optim::Optimizer& optimizer) {
  const std::string whole = c10::demangle(typeid(optimizer).name());
  const size_t at = whole.rfind(':');
  return at == std::string::npos ? whole : whole.substr(at + 1);
}

bool has_amsgrad(const torch::optim::OptimizerOptions& options) {
  if (const auto* decoupled = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) return decoupled->amsgrad();
  const auto* plain = dynamic_cast<const torch::optim::AdamOptions*>(&options);
  return plain && plain->amsgrad();
}

/// A setting that is left open, before prepare() is given anything, has its default or any value that is fine.
void leave_open(nlohmann::ordered_json& section) {
  for (auto at = section.begin(); at != section.end();) {
    if (at->is_object()) leave_open(*at);
    if (*at != "auto") ++at;
    else if (at.key() == "total_num_steps") *at++ = 1'000'000;
    else at = section.erase(at);
  }
}
void leave_open(DeepSpeedConfig& config) {
  leave_open(config.document().json);
  constexpr const char* kBatch = "train_micro_batch_size_per_gpu";
  if (!config.contains(kBatch) && !config.contains("train_batch_size")) config.set_value(kBatch, int64_t{1});
}

class ChosenZero final : public ChosenLayer {
 public:
  ChosenZero(std::shared_ptr<zero::Plugins> plugins, int64_t compare_parameters_every)
      : plugins_(std::move(plugins)), compare_parameters_every_(compare_parameters_every) {}

  bool joins_data() const override { return true; }
  std::optional<DistributedType> distributed_type() const override { return DistributedType::DEEPSPEED; }
  JobFacts job(int64_t num_processes) const override { return {.num_processes = num_processes, .is_deepspeed = true}; }
  std::vector<comm::AxisSize> axes(const comm::Group& all) const override {
    return axes_of(settings_, all.world_size());
  }
  bool places_models() const override { return true; }

  std::optional<RunRules> rules(PrecisionType asked) override {
    if (asked == PrecisionType::FP8)
      throw ConfigError(
          "Accelerator: mixed_precision is fp8, which does not go with DeepSpeed's configuration in this version, "
          "expected bf16, fp16 or no; or shard with fsdp_plugin, which takes fp8");
    for (size_t i = 0; i < plugins_->size(); ++i) (*plugins_)[i].set_mixed_precision(to_string(asked));
    mixed_precision_ = asked;
    heard_ = plugins_->active();
    return rules_of_active();
  }

  /// The effective configuration: every key that DeepSpeed has.
  std::vector<Receipt> receipts() const override {
    std::vector<Receipt> all;
    const bool recomputes = residency::checkpointed_calls() > checkpointed_before_;
    for (const auto& entry : settings_.effective) {
      const bool idle = entry.verdict == zero::Verdict::acts && !recomputes && zero::is_of_recomputation(entry.key);
      const bool acts = entry.verdict == zero::Verdict::acts && !idle;
      all.push_back({.setting = "deepspeed_plugin." + entry.key,
                     .value = entry.value,
                     .source = entry.given ? "DeepSpeed configuration" : "default",
                     .expected = "in training",
                     .state = acts ? ReceiptState::acted : ReceiptState::without_effect,
                     .effect = acts   ? "holds"
                               : idle ? "no layer is recomputed: call accelerate::checkpoint() in the model's forward"
                                      : entry.reason});
    }
    const bool at_once = plugin().step_at_once.value_or(false);
    const auto add = [&](const char* setting, const char* variable, bool on) {
      const auto did = !on ? receipts::off("off") : at_once ? receipts::of_steps_at_once() : receipts::of_steps_ahead();
      all.push_back({.setting = std::string("deepspeed_plugin.") + setting,
                     .value = on ? "true" : "false",
                     .source = on ? std::string("DeepSpeedPlugin, or ") + variable : "default",
                     .expected = "in backward()",
                     .state = did.state,
                     .effect = did.text});
    };
    add("step_in_backward", "ACCELERATE_DEEPSPEED_STEP_IN_BACKWARD", plugin().step_in_backward.value_or(false));
    add("step_at_once", "ACCELERATE_DEEPSPEED_STEP_AT_ONCE", at_once);
    return all;
  }

  std::optional<RunRules> hear(const PrepareFacts& facts, int64_t num_steps) override {
    for (const auto& model : facts.models)
      for (const auto& [name, parameter] : model.parameters()) names_[parameter.unsafeGetTensorImpl()] = name;
    if (facts.models.empty() && facts.dummy_optimizers.empty() && facts.dummy_schedulers.empty()) return std::nullopt;
    std::optional<RunRules> others;
    if (plugins_->active() != heard_) {
      const auto before = std::exchange(settings_, read(/*filled=*/false));
      const int64_t one = before.zero_optimization.stage, other = settings_.zero_optimization.stage;
      if ((one == 0) != (other == 0)) {
        settings_ = before;
        raise<ConfigError>(
            "prepare: the DeepSpeedPlugin '{}' has stage {}, another one of deepspeed_plugins stage {}, expected stage "
            "0 in all of them or in none: ranks are laid out once",
            plugins_->name(plugins_->active()), other, one);
      }
      heard_ = plugins_->active();
      others = rules_of_active();
      spoke_ = false;
    }
    const auto filled = zero::fill_auto(plugin(), facts_of(facts, num_steps));
    if (is_rank0())
      for (const auto& warning : filled.warnings)
        logs::warn("accelerate.parallel", "DeepSpeed configuration: {}", warning);
    settings_ = read(/*filled=*/true);
    for (const auto& optimizer : facts.optimizers) check_moments(*optimizer);
    look_for_deferred(facts.models);
    checkpointed_before_ = residency::checkpointed_calls();
    recomputed_ = nullptr;  // before the next one: the last that comes holds
    recomputed_ = zero::checkpoint_rules_of(settings_);
    say_what_has_no_meaning();
    return others;
  }
  std::vector<FileMonitor> monitors() const override { return zero::monitors_of(settings_); }
  int64_t samples_of_step() const override { return settings_.train_batch_size; }
  Observed observed() const override { return zero::observed_of(settings_); }
  std::shared_ptr<const DeepSpeedFiles> deepspeed_files() const override {
    return zero::make_files(settings_, plugins_->get(std::nullopt).deepspeed_config());
  }
  /// DeepSpeed's users have theirs exchanged for DeepSpeed's (accelerate's map_pytorch_optim_to_deepspeed). Here the
  /// program's stays the object that steps, and what it keeps and how it rounds are exchanged.
  void adopt(torch::optim::Optimizer& optimizer) override {
    if (!has_moments_on_host() || !optim::can_have_fp32_moments(optimizer)) return;
    check_moments(optimizer);
    if (optim::give_fp32_moments(optimizer) && !std::exchange(told_of_moments_, true) && is_rank0())
      logs::warn("accelerate.parallel",
                 "DeepSpeed configuration: masters have 16 bits and lie on the host, so that the program's {} keeps "
                 "fp32 moments and rounds once in a step, as DeepSpeed's Adam for the host would in its place",
                 class_name_of(optimizer));
  }
  std::shared_ptr<torch::optim::Optimizer> make_optimizer(const DummyOptim& dummy) const override {
    return zero::make_optimizer(settings_, dummy, names_);
  }
  optim::Scheduler make_scheduler(const DummyScheduler& dummy, torch::optim::Optimizer& optimizer) const override {
    return zero::make_scheduler(settings_, dummy, optimizer);
  }

  std::unique_ptr<Layer> make(const ModelRef& model, const at::Device& device, bool,
                              const std::vector<Held>& given) const override {
    const auto group = comm::mesh().along(comm::kTokens);
    auto settings = settings_of(settings_, group ? group->world_size() : 1);
    settings.compare_parameters_every = compare_parameters_every_;
    settings.step_in_backward = plugin().step_in_backward.value_or(false);
    settings.step_at_once = plugin().step_at_once.value_or(false);
    if (settings.step_at_once) expect_steps_at_once(settings_, settings);
    if (compute_dtype(settings_) && settings_.keeps_buffers())
      settings.fp32_buffers =
          buffers_like(model, settings_.data_types.keep_in_fp32_modules, [](const std::string& pattern) {
            if (is_rank0())
              logs::warn("accelerate.parallel",
                         "DeepSpeed configuration: data_types.keep_in_fp32_modules has '{}', which matches no buffer "
                         "of the model: it has no effect.",
                         pattern);
          });
    if (autocast_dtype(settings_))
      settings.travels_low = [low =
                                  parameters_of_classes(model, settings_.torch_autocast.lower_precision_safe_modules)](
                                 const at::Tensor& parameter) { return low.contains(parameter.unsafeGetTensorImpl()); };
    return std::make_unique<Sharding>(model, device, std::move(settings), given);
  }

 private:
  DeepSpeedPlugin& plugin() const { return (*plugins_)[plugins_->active()]; }

  RunRules rules_of_active() {
    settings_ = read(/*filled=*/false);
    if (settings_.log_level) logs::set_level("accelerate", log_level_from_string(*settings_.log_level));
    RunRules rules{.decided_by = "the DeepSpeed configuration (fp16, bf16)"};
    rules.mixed_precision = settings_.fp16.enabled   ? PrecisionType::FP16
                            : settings_.bf16.enabled ? PrecisionType::BF16
                                                     : PrecisionType::NO;
    rules.autocasts = settings_.torch_autocast.enabled;
    if (const auto dtype = autocast_dtype(settings_); dtype && rules.mixed_precision == PrecisionType::NO)
      rules.mixed_precision = *dtype == at::kHalf ? PrecisionType::FP16 : PrecisionType::BF16;
    rules.scaler = zero::make_scaler(settings_);
    rules.max_norm = std::max(0.0, settings_.gradient_clipping);
    const int64_t minutes = environment::integer({"DEEPSPEED_TIMEOUT"}).value_or(settings_.timeout_minutes);
    constexpr int64_t kMostMinutes = 1'000'000;
    if (minutes < 1 || minutes > kMostMinutes)
      raise<ConfigError>("environment: DEEPSPEED_TIMEOUT is {}, expected minutes from 1 to {}", minutes, kMostMinutes);
    rules.process_group_timeout = std::chrono::minutes(minutes);
    if (!plugin().is_auto("gradient_accumulation_steps"))
      rules.gradient_accumulation_steps = settings_.gradient_accumulation_steps;
    rules.counts_micro_steps = settings_.managed_gradient_accumulation;
    if (settings_.zero_optimization.stage == 3 && !settings_.zero_optimization.gather_16bit_weights_on_model_save)
      rules.no_whole_state =
          "the model is split by ZeRO's stage 3, whose whole 16-bit weights are gathered only if the DeepSpeed "
          "configuration has stage3_gather_16bit_weights_on_model_save (DeepSpeedPlugin::zero3_save_16bit_model, "
          "--zero3_save_16bit_model), expected that to be true";
    return rules;
  }

  /// zero3_init_flag acts on models that from_pretrained() and from_config() make; a program has to make its own so.
  void look_for_deferred(const std::vector<ModelRef>& models) {
    if (!plugin().deepspeed_config().document().asked_for_init || !is_rank0()) return;
    for (const auto& model : models) {
      const auto parameters = model.parameters();
      if (std::any_of(parameters.begin(), parameters.end(), [](const auto& item) { return is_deferred(item.second); }))
        continue;
      if (!std::exchange(told_of_init_, true))
        logs::warn(
            "accelerate.parallel",
            "DeepSpeed configuration: zero3_init_flag is true, and a model was made with memory for all of it on each "
            "rank: make it within accelerate::init_empty_weights(), or by from_pretrained() or from_config() after the "
            "Accelerator, so that a rank never has more than its pieces");
    }
  }

  /// Whether DeepSpeed would have its own Adam for the host keep the moments.
  bool has_moments_on_host() const { return settings_.has_low_masters() && settings_.offloads_states(); }

  /// Checks an optimizer of the program's.
  void check_moments(const torch::optim::Optimizer& optimizer) const {
    if (!has_moments_on_host()) return;
    const bool exact = !settings_.bf16.bf16_optimizer_states;
    if (exact && settings_.zero_force_ds_cpu_optimizer && optim::can_have_fp32_moments(optimizer)) {
      const auto& groups = optimizer.param_groups();
      if (std::none_of(groups.begin(), groups.end(), [](const auto& group) { return has_amsgrad(group.options()); }))
        return;
      raise<ConfigError>(
          "prepare: masters have 16 bits and lie on the host, and the program's {} has amsgrad, which DeepSpeed's Adam "
          "for the host refuses, too, expected it without; or leave out offload_optimizer",
          class_name_of(optimizer));
    }
    const auto* const own = dynamic_cast<const optim::DeepSpeedAdam*>(&optimizer);
    if (own && static_cast<const optim::DeepSpeedAdamOptions&>(own->defaults()).fp32_optimizer_states() == exact)
      return;
    raise<ConfigError>(
        "prepare: masters have 16 bits ({}_master_weights_and_grads) and lie on the host, and the program's optimizer "
        "is {}{}, expected {}optim::DeepSpeedAdam with fp32_optimizer_states({}), or a DummyOptim for the file's Adam "
        "or AdamW: others would keep moments of other precision",
        settings_.fp16.enabled ? "fp16.fp16" : "bf16.bf16", class_name_of(optimizer),
        own ? exact ? " with fp32_optimizer_states(false)" : " with fp32_optimizer_states(true)" : "",
        !exact                                  ? ""
        : settings_.zero_force_ds_cpu_optimizer ? "torch::optim::Adam or AdamW, "
                                                : "zero_force_ds_cpu_optimizer true with torch::optim::Adam or AdamW, ",
        exact);
  }

  zero::AutoFacts facts_of(const PrepareFacts& facts, int64_t num_steps) const {
    const auto widest = hidden_size_of(facts.models);
    zero::AutoFacts result{.ranks = PartialState().num_processes(),
                           .hidden_size = widest,
                           .has_model_config = widest.has_value(),
                           .loader_batch_sizes = facts.batch_sizes,
                           .split_batches = facts.split_batches,
                           .is_train_batch_min = plugin().is_train_batch_min,
                           .gradient_accumulation_steps = num_steps,
                           .mixed_precision = to_string(mixed_precision_)};
    if (!facts.dummy_optimizers.empty() && !facts.optimizers.empty())
      throw ConfigError(
          "prepare: found a DummyOptim and an optimizer of the program's own, expected one kind: the first stands for "
          "that of the DeepSpeed configuration");
    if (!facts.dummy_optimizers.empty()) {
      const auto& dummy = facts.dummy_optimizers.front();
      result.optimizer = zero::DummyOptimizerFacts{.lr = dummy.lr, .weight_decay = dummy.weight_decay};
    } else if (!facts.optimizers.empty()) {
      const auto& optimizer = *facts.optimizers.front();
      const auto& groups = optimizer.param_groups();
      result.optimizer = zero::ProgramOptimizerFacts{.class_name = class_name_of(optimizer),
                                                     .lr = groups.empty() ? 0 : groups.front().options().get_lr()};
    }
    if (!facts.dummy_schedulers.empty()) {
      const auto& dummy = facts.dummy_schedulers.front();
      result.scheduler = zero::DummySchedulerFacts{.total_num_steps = dummy.total_num_steps,
                                                   .warmup_num_steps = dummy.warmup_num_steps,
                                                   .has_callable = static_cast<bool>(dummy.lr_scheduler_callable)};
    } else if (facts.schedulers > 0) {
      result.scheduler = zero::ProgramSchedulerFacts{};
    }
    return result;
  }

  /// @param filled  what prepare() is given has been heard; else what is left open has its default for now
  zero::ZeroSettings read(bool filled) const {
    DeepSpeedConfig config = plugin().deepspeed_config();
    if (!filled) leave_open(config);
    return zero::read_settings(config, {.ranks = num_ranks(),
                                        .as_of_version = *plugin().as_of_version,
                                        .cuda = computes_elsewhere(),
                                        .has_program_optimizer = true});
  }

  /// In one line, once.
  void say_what_has_no_meaning() {
    if (std::exchange(spoke_, true) || !is_rank0()) return;
    std::vector<std::string> lines = settings_.warnings;
    std::vector<std::string> keys;
    for (const auto& entry : settings_.without_meaning()) keys.push_back(entry.key);
    if (!keys.empty())
      lines.push_back(
          fmt::format("these keys have no meaning here: {}; docs/deepspeed.md says why", fmt::join(keys, ", ")));
    for (const auto& line : lines) logs::warn("accelerate.parallel", "DeepSpeed configuration: {}", line);
    if (!settings_.dump_state) return;
    std::string text = "DeepSpeed configuration, as it holds (dump_state):\n";
    for (const auto& entry : settings_.effective)
      text += fmt::format("  {} = {}{}\n", entry.key, entry.value,
                          entry.reason.empty() ? "" : fmt::format("  (without effect: {})", entry.reason));
    std::fputs(text.c_str(), stdout);
  }

  std::shared_ptr<zero::Plugins> plugins_;
  size_t heard_ = 0;  ///< the plugin that settings_ are of
  int64_t compare_parameters_every_;
  zero::ZeroSettings settings_;
  PrecisionType mixed_precision_ = PrecisionType::NO;
  zero::ParameterNames names_;
  std::unique_ptr<residency::CheckpointRulesScope> recomputed_;
  int64_t checkpointed_before_ = 0;  ///< calls of the process
  bool spoke_ = false, told_of_moments_ = false, told_of_init_ = false;
};

}  // namespace

std::unique_ptr<ChosenLayer> choose_zero(const EngineRequest& request) {
  if (!request.deepspeed && request.deepspeed_plugins.empty() && !deepspeed_requested()) {
    if (!detail::shared_engine()) detail::deepspeed_plugins().reset();  // of one that failed
    return nullptr;
  }
  if (request.fsdp || fsdp_requested())
    throw ConfigError(
        "Accelerator: found deepspeed_plugin (ACCELERATE_USE_DEEPSPEED) and fsdp_plugin (ACCELERATE_USE_FSDP), "
        "expected one of them: both say how models are split");
  const auto& axes = request.parallelism;
  if (axes && (axes->dp_replicate_enabled() || axes->dp_shard_enabled()))
    throw ConfigError(
        "Accelerator: found dp_replicate_size or dp_shard_size of a parallelism_config beside deepspeed_plugin, whose "
        "stages split over all ranks; leave one out: fsdp_plugin with HYBRID_SHARD splits within groups of ranks");
  refuse_settings_of_ddp(request.ddp, {.engine = "DeepSpeed",
                                       .sizes = "reduce_bucket_size decides how large they are",
                                       .types = "communication_data_type says how gradients travel"});
  return std::make_unique<ChosenZero>(zero::Plugins::of(request), request.ddp.compare_parameters_every);
}

}  // namespace accelerate::parallel
