#include "parallel/zero/auto_values.hpp"

#include <algorithm>

#include "input/json.hpp"
#include "parallel/zero/document.hpp"
#include "parallel/zero/setting_values.hpp"
#include "parallel/zero/settings_table.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

template <class... Args> [[noreturn]] void refuse_fill(fmt::format_string<Args...> text, Args&&... args) {
  raise<ConfigError>("prepare: DeepSpeed configuration: {}", fmt::format(text, std::forward<Args>(args)...));
}

constexpr const char* kMicro = "train_micro_batch_size_per_gpu";

/// Samples of a rank in one forward; nothing where the configuration does not say.
std::optional<int64_t> micro_batch_size(const DeepSpeedPlugin& plugin, const AutoFacts& facts) {
  if (!plugin.is_auto(kMicro)) {
    const auto value = plugin.get_value(kMicro);
    const auto* number = value ? std::get_if<int64_t>(&*value) : nullptr;
    return number ? std::optional(*number) : std::nullopt;  // others are refused when they are read
  }
  if (facts.loader_batch_sizes.empty())
    refuse_fill("'{}' is \"auto\", but no loader is prepared; prepare one, or write a number", kMicro);
  std::vector<int64_t> sizes;
  for (const auto& size : facts.loader_batch_sizes) {
    if (!size) refuse_fill("'{}' is \"auto\", but a loader has no batch size; give it one, or write a number", kMicro);
    sizes.push_back(facts.split_batches ? *size / facts.ranks : *size);
  }
  return facts.is_train_batch_min ? *std::min_element(sizes.begin(), sizes.end())
                                  : *std::max_element(sizes.begin(), sizes.end());
}

void check_objects(const DeepSpeedPlugin& plugin, const AutoFacts& facts) {
  const auto& config = plugin.deepspeed_config();
  const bool has_optimizer = config.contains("optimizer"), has_scheduler = config.contains("scheduler");
  const auto* dummy = std::get_if<DummySchedulerFacts>(&facts.scheduler);
  const bool program_schedules = std::holds_alternative<ProgramSchedulerFacts>(facts.scheduler);
  if (has_optimizer && std::holds_alternative<ProgramOptimizerFacts>(facts.optimizer))
    refuse_fill("it has 'optimizer', and the program prepares one, too; remove the section, or prepare a DummyOptim");
  if (!has_optimizer && std::holds_alternative<DummyOptimizerFacts>(facts.optimizer))
    refuse_fill(
        "it has no 'optimizer' of which a DummyOptim could be made; write the section, or prepare an optimizer");
  if (has_scheduler && program_schedules)
    refuse_fill(
        "it has 'scheduler', and the program prepares one, too; remove the section, or prepare a DummyScheduler");
  if (!has_scheduler && dummy && !dummy->has_callable)
    refuse_fill(
        "it has no 'scheduler' of which a DummyScheduler could be made; write the section, or give DummyScheduler "
        "a function that makes one (lr_scheduler_callable)");
  if (program_schedules && std::holds_alternative<DummyOptimizerFacts>(facts.optimizer))
    refuse_fill(
        "a schedule of the program is prepared with a DummyOptim, which has no groups to schedule; prepare a "
        "DummyScheduler, or an optimizer of the program");
}

void add_sizes_of_model(const DeepSpeedPlugin& plugin, const AutoFacts& facts, DeepSpeedValues& values) {
  static const char* const kKeys[] = {"zero_optimization.reduce_bucket_size",
                                      "zero_optimization.stage3_prefetch_bucket_size",
                                      "zero_optimization.stage3_param_persistence_threshold"};
  std::vector<std::string> unfilled;
  for (const char* key : kKeys)
    if (plugin.is_auto(key)) unfilled.emplace_back(key);
  if (unfilled.empty()) return;
  constexpr int64_t kMost = 1'000'000'000;  // squared it still fits
  if (!facts.hidden_size)
    refuse_fill(
        "{} {} \"auto\", which takes the model's hidden_size, but {}; write whole numbers, or let the model declare "
        "its hidden_size",
        fmt::join(unfilled, ", "), unfilled.size() == 1 ? "is" : "are",
        facts.has_model_config ? "its configuration has neither hidden_size nor hidden_sizes"
                               : "it has no configuration");
  const int64_t h = *facts.hidden_size;
  if (h < 1 || h > kMost) refuse_fill("the model's hidden_size is {}, expected 1 to {}", h, kMost);
  values[kKeys[0]] = h * h;
  values[kKeys[1]] = static_cast<int64_t>(0.9 * static_cast<double>(h) * static_cast<double>(h));
  values[kKeys[2]] = 10 * h;
}

void add_optimizer(const AutoFacts& facts, DeepSpeedValues& values) {
  const auto* dummy = std::get_if<DummyOptimizerFacts>(&facts.optimizer);
  if (!dummy) return;
  values["optimizer.params.lr"] = dummy->lr;
  values["optimizer.params.weight_decay"] = dummy->weight_decay;
}

void add_scheduler(const AutoFacts& facts, DeepSpeedValues& values) {
  const auto* dummy = std::get_if<DummySchedulerFacts>(&facts.scheduler);
  if (!dummy || dummy->has_callable) return;
  values["scheduler.params.warmup_min_lr"] = int64_t{0};
  if (const auto* optimizer = std::get_if<DummyOptimizerFacts>(&facts.optimizer))
    values["scheduler.params.warmup_max_lr"] = optimizer->lr;
  else if (const auto* program = std::get_if<ProgramOptimizerFacts>(&facts.optimizer))
    values["scheduler.params.warmup_max_lr"] = program->lr;
  values["scheduler.params.warmup_num_steps"] = std::max<int64_t>(1, dummy->warmup_num_steps);
  if (!dummy->total_num_steps) return;
  // Each rank steps its schedule with its own share of the batches.
  const int64_t total = *dummy->total_num_steps, ranks = facts.ranks;
  values["scheduler.params.total_num_steps"] =
      facts.split_batches ? total : total / ranks + (total % ranks > 0 ? 1 : 0);
}

/// Fills what has a value, removes what DeepSpeed has a default for, and tells of the rest.
void fill_section(nlohmann::ordered_json& node, const std::string& section, const DeepSpeedValues& values) {
  const Section* known = section_called(section);
  std::vector<std::string> defaults;
  for (auto& [name, child] : node.items()) {
    const std::string key = section.empty() ? name : section + "." + name;
    if (child.is_object()) {
      fill_section(child, key, values);
    } else if (child == "auto") {
      const Row* row = known ? row_called(section, name) : nullptr;
      if (const auto value = values.find(key); value != values.end())
        child = std::visit([](const auto& content) { return nlohmann::ordered_json(content); }, value->second);
      else if (known && known->classed) defaults.push_back(name);
      else if (row && takes_auto(*row)) continue;
      else
        refuse_fill("'{}' is \"auto\", and nothing is known to fill it with; write a value{}", key,
                    section.starts_with("scheduler")   ? ", or prepare a DummyScheduler that has it"
                    : section.starts_with("optimizer") ? ", or leave it out for its default"
                                                       : "");
    }
  }
  for (const auto& name : defaults) node.erase(name);
}

/// How a program's optimizer steps when its states are in host memory.
std::string host_kernel_of(const DeepSpeedPlugin& plugin, const ProgramOptimizerFacts& optimizer) {
  const auto device = plugin.get_value("zero_optimization.offload_optimizer.device");
  if (!device || *device == DeepSpeedValue("none")) return "";
  const auto& config = plugin.deepspeed_config();
  if (config.is_false("zero_force_ds_cpu_optimizer")) return "";
  for (const char* name : {"Adam", "AdamW", "Adagrad", "Lion", "DeepSpeedAdam"})
    if (optimizer.class_name == name) return name;
  refuse_fill(
      "'zero_optimization.offload_optimizer.device' is not none, and the program's optimizer is {}, expected Adam, "
      "AdamW, Adagrad, Lion or DeepSpeedAdam, which have kernels for host memory; use one of these, or set "
      "zero_force_ds_cpu_optimizer to false",
      optimizer.class_name);
}

}  // namespace

Filled fill_auto(DeepSpeedPlugin& plugin, const AutoFacts& facts) {
  if (facts.ranks < 1 || facts.sp_size < 1)
    raise<ConfigError>("prepare: {} ranks and sp_size {}, expected at least 1", facts.ranks, facts.sp_size);
  plugin.set_mixed_precision(facts.mixed_precision);
  auto& config = plugin.deepspeed_config();
  plugin.fill_match("gradient_accumulation_steps",
                    {{"gradient_accumulation_steps", facts.gradient_accumulation_steps}});
  const auto micro = micro_batch_size(plugin, facts);
  check_objects(plugin, facts);

  DeepSpeedValues values{{"gradient_clipping", 1.0},
                         {"zero_optimization.stage3_gather_16bit_weights_on_model_save", false}};
  if (micro) {
    values[kMicro] = *micro;
    const auto steps = config.get_value("gradient_accumulation_steps");
    constexpr int64_t kMost = int64_t{1} << 31;  // a larger one is refused when it is read
    const auto* number = steps ? std::get_if<int64_t>(&*steps) : nullptr;
    if (number && *number <= kMost && *number > 0 && *micro > 0 && *micro <= kMost / facts.ranks)
      values["train_batch_size"] = *micro * *number * facts.ranks / facts.sp_size;
  }
  add_sizes_of_model(plugin, facts, values);
  add_optimizer(facts, values);
  add_scheduler(facts, values);
  fill_section(config.document().json, "", values);

  Filled filled;
  if (const auto steps = config.get_value("gradient_accumulation_steps");
      steps && *steps != DeepSpeedValue(facts.gradient_accumulation_steps))
    filled.warnings.push_back(
        fmt::format("gradient_accumulation_steps is {} in the DeepSpeed configuration and {} in the program: the "
                    "configuration's holds",
                    config.to_json("gradient_accumulation_steps"), facts.gradient_accumulation_steps));
  filled.optimizer_of_configuration = std::holds_alternative<DummyOptimizerFacts>(facts.optimizer);
  if (const auto* dummy = std::get_if<DummySchedulerFacts>(&facts.scheduler)) {
    filled.scheduler_by_callable = dummy->has_callable;
    filled.scheduler_of_configuration = !dummy->has_callable;
  }
  if (const auto* program = std::get_if<ProgramOptimizerFacts>(&facts.optimizer)) {
    // A program that brings an optimizer has chosen it.
    config.set_value("zero_allow_untested_optimizer", true);
    filled.host_kernel = host_kernel_of(plugin, *program);
  }
  return filled;
}

}  // namespace accelerate::zero
