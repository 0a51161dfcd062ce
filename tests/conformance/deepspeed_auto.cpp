// The configuration that prepare() hands to DeepSpeed, with every "auto" filled, and whose optimizer trains. The texts
// of errors are Python's: informative.
#include <algorithm>

#include "parallel/zero/auto_values.hpp"
#include "runner.hpp"

namespace conformance::deepspeed_auto_cases {
namespace {

using accelerate::DeepSpeedPlugin;
using accelerate::zero::AutoFacts;
using accelerate::zero::Filled;

constexpr const char* kDefault =
    "\"auto\" that nothing fills counts as DeepSpeed's default in the sections that it reads with a class; the "
    "reference raises";

AutoFacts facts_of(const json& program) {
  AutoFacts facts{.ranks = program.at("ranks"),
                  .split_batches = program.at("split_batches"),
                  .is_train_batch_min = program.at("is_train_batch_min"),
                  .gradient_accumulation_steps = program.at("gradient_accumulation_steps"),
                  .mixed_precision = program.at("mixed_precision")};
  const json& model = program.at("model_config");
  facts.has_model_config = !model.is_null();
  if (facts.has_model_config && model.contains("hidden_size")) facts.hidden_size = model["hidden_size"].get<int64_t>();
  else if (facts.has_model_config && model.contains("hidden_sizes"))
    facts.hidden_size = *std::max_element(model["hidden_sizes"].begin(), model["hidden_sizes"].end());
  for (const json& size : program.at("loader_batch_sizes"))
    facts.loader_batch_sizes.push_back(size.is_null() ? std::optional<int64_t>() : size.get<int64_t>());
  if (const json& optimizer = program.at("optimizer"); optimizer.is_array()) {
    if (optimizer[0] == "dummy")
      facts.optimizer = accelerate::zero::DummyOptimizerFacts{.lr = optimizer[1], .weight_decay = optimizer[2]};
    else facts.optimizer = accelerate::zero::ProgramOptimizerFacts{.class_name = "AdamW", .lr = optimizer[1]};
  }
  if (const json& scheduler = program.at("scheduler"); scheduler.is_array()) {
    if (scheduler[0] == "dummy")
      facts.scheduler =
          accelerate::zero::DummySchedulerFacts{.total_num_steps = scheduler[1], .warmup_num_steps = scheduler[2]};
    else facts.scheduler = accelerate::zero::ProgramSchedulerFacts{};
  }
  return facts;
}

/// As the file names it: the class that trains, where the program has one.
json optimizer_of(const AutoFacts& facts, const Filled& filled) {
  if (!filled.host_kernel.empty())
    return "DeepSpeedCPU" + std::string(filled.host_kernel.starts_with("Adam") ? "Adam" : filled.host_kernel);
  const auto* program = std::get_if<accelerate::zero::ProgramOptimizerFacts>(&facts.optimizer);
  return program ? json(program->class_name) : json();
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases"))
    report.guarded(row, [&] {
      const json& expected = row[2];
      json found;
      std::string error;
      const bool refused = throws_error(
          [&] {
            auto plugin = accelerate::parallel::resolve({.hf_ds_config = row[0].dump()});
            const AutoFacts facts = facts_of(row[1]);
            const Filled filled = fill_auto(plugin, facts);
            plugin.deepspeed_config().set_value("steps_per_print", "inf");
            found = {{"config", json::parse(plugin.deepspeed_config().to_json())},
                     {"optimizer", optimizer_of(facts, filled)},
                     {"client_scheduler", filled.scheduler_by_callable}};
          },
          &error);
      const auto detail = [&] { return row.dump() + "\n    found " + (refused ? error : found.dump()); };
      if (!expected.contains("error")) return report.check(row, found == expected, detail);
      // Where the reference knows no value for a key of a section with a class.
      const bool has_default = expected["error"].get<std::string>().find(
                                   "`zero_optimization.stage3_max_live_parameters` not found") != std::string::npos;
      if (!has_default || refused) return report.check(row, refused, detail);
      if (found["config"]["zero_optimization"].contains("stage3_max_live_parameters"))
        return report.check(row, false, detail);
      report.differs(row, kDefault);
    });
}

const Registration registration("deepspeed_auto", {run});

}  // namespace
}  // namespace conformance::deepspeed_auto_cases
