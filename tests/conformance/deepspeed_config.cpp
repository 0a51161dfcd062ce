// A DeepSpeed configuration, read: what differs from the defaults, or that it is refused; the numbers of a batch; the
// sections fp16 and bf16. The texts of errors are Python's: informative.
#include <filesystem>
#include <fstream>

#include "parallel/zero/zero_settings.hpp"
#include "ranks.hpp"
#include "runner.hpp"

namespace conformance::deepspeed_config_cases {
namespace {

using accelerate::DeepSpeedConfig;
using accelerate::zero::ZeroSettings;

constexpr const char* kUnknown =
    "unknown keys of a DeepSpeed configuration are errors with the nearest name; DeepSpeed passes over them outside of "
    "the sections that it reads with a class";
constexpr const char* kEarlier =
    "what fails when DeepSpeed builds its engine or takes a step is refused when the configuration is read";
constexpr const char* kNotHere = "sections of DeepSpeed's other engines are refused where they are on";
constexpr const char* kThreads =
    "aio.thread_count is read as intra_op_parallelism, its name now; DeepSpeed passes over it";

const accelerate::zero::ReadOptions kOptions{.ranks = 2, .later_is_error = false};

/// Our settings in the form of the file's defaults.
json found_in_their_form(const ZeroSettings& settings, const json& defaults) {
  const json all = json::parse(to_json(settings));
  json result;
  for (const auto& [key, value] : defaults.items()) {
    if (!value.is_object()) {
      if (all.contains(key)) result[key] = all[key];
      continue;
    }
    for (const auto& [name, unused] : value.items())
      if (all.at(key).contains(name)) result[key][name] = all[key][name];
  }
  const std::string tag = settings.checkpoint.tag_validation;
  result["checkpoint"]["tag_validation_enabled"] = tag != "Ignore";
  result["checkpoint"]["tag_validation_fail"] = tag == "Fail";
  if (settings.torch_autocast.dtype) result["torch_autocast"]["dtype"] = "torch." + *settings.torch_autocast.dtype;
  return result;
}

/// The defaults with the differences in their places, without what only DeepSpeed has.
json expected_in_full(const json& differences, const json& defaults) {
  json result = defaults;
  result.merge_patch(differences);
  // merge_patch() takes null for removal.
  for (const auto& [key, value] : defaults.items())
    if (!result.contains(key)) result[key] = nullptr;
    else if (value.is_object())
      for (const auto& [name, unused] : value.items())
        if (!result[key].contains(name)) result[key][name] = nullptr;
  auto& zero = result["zero_optimization"];
  for (const char* name : {"zenflow", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory",
                           "stage3_gather_fp16_weights_on_model_save"})
    zero.erase(name);
  const json ours = json::parse(to_json(ZeroSettings{}));
  for (const char* name : {"offload_param", "offload_optimizer", "leaf_module"})
    if (zero[name].is_null()) zero[name] = ours["zero_optimization"][name];  // a section that is off
  for (const char* name : {"offload_param", "offload_optimizer"})
    if (!zero[name].contains("nvme_path")) zero[name]["nvme_path"] = nullptr;
  for (const char* name : {"optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params"})
    result.erase(name);
  return result;
}

/// The type as DeepSpeed keeps it: its own optimizers in small letters.
bool same_types(const ZeroSettings& settings, const json& differences) {
  const auto same = [](const json& name, const std::string& type) {
    std::string small = type;
    for (char& c : small) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return name == type || name == small;
  };
  const json all = json::parse(to_json(settings));
  for (const char* section : {"optimizer", "scheduler"}) {
    const std::string name = std::string(section) + "_name", params = std::string(section) + "_params";
    if (differences.contains(name) != all.contains(section)) return false;
    if (!differences.contains(name)) continue;
    if (!same(differences[name], all[section]["type"])) return false;
    if (differences.contains(params))
      for (const auto& [key, value] : differences[params].items())
        if (all[section]["params"].value(key, json()) != value) return false;
  }
  return true;
}

/// Where DeepSpeed reads what we refuse, or reads it as something else, why.
const char* reason_of(const std::string& error, const json& found, const json& expected) {
  if (!error.empty())
    return error.find("is no setting of") != error.npos                                               ? kUnknown
           : error.find("which is not here") == error.npos || error.find("'optimizer.") != error.npos ? kEarlier
                                                                                                      : kNotHere;
  json other = found;
  other["aio"]["intra_op_parallelism"] = expected["aio"]["intra_op_parallelism"];
  return other == expected ? kThreads : nullptr;
}

void check_row(const json& row, const json& expected, const json& defaults, Report& report,
               const std::function<ZeroSettings()>& read) {
  std::string error;
  ZeroSettings settings;
  const bool refused = throws_error([&] { settings = read(); }, &error);
  const auto detail = [&] { return row.dump() + "\n    found " + (refused ? error : to_json(settings)); };
  if (expected.contains("error")) return report.check(row, refused, detail);
  const json wanted = expected_in_full(expected, defaults);
  const json found = refused ? json() : found_in_their_form(settings, defaults);
  if (!refused && found == wanted && same_types(settings, expected)) return report.check(row, true, detail);
  if (const char* reason = reason_of(error, found, wanted)) return report.differs(row, reason);
  report.check(row, false, [&] { return detail() + "\n    differs by " + json::diff(wanted, found).dump(); });
}

void run(const json& file, Report& report) {
  const json& defaults = file.at("defaults");
  for (const json& row : file.at("cases"))
    report.guarded(row, [&] {
      json config = row[0];
      config["train_micro_batch_size_per_gpu"] = 1;
      check_row(row, row[1], defaults, report,
                [&] { return accelerate::zero::read_settings(DeepSpeedConfig(config.dump()), kOptions); });
    });
  for (const json& row : file.at("texts"))
    report.guarded(row, [&] {
      const std::string text = row[1];
      check_row(row, row[2], defaults, report,
                [&] { return accelerate::zero::read_settings(DeepSpeedConfig(text), kOptions); });
      if (text.find('{') == text.npos) return;
      const auto path = std::filesystem::path(support::scratch_dir()) / "deepspeed_config.hjson";
      std::ofstream(path) << text;
      check_row(row, row[2], defaults, report,
                [&] { return accelerate::zero::read_settings(DeepSpeedConfig(path), kOptions); });
    });
}

void run_batches(const json& file, Report& report) {
  static const char* const kNumbers[] = {"train_batch_size", "train_micro_batch_size_per_gpu",
                                         "gradient_accumulation_steps"};
  for (const json& row : file.at("cases")) {
    json config = json::object();
    for (size_t i = 0; i < 3; ++i)
      if (!row[i].is_null()) config[kNumbers[i]] = row[i];
    std::string error;
    ZeroSettings settings;
    const bool refused = throws_error(
        [&] {
          settings = accelerate::zero::read_settings(DeepSpeedConfig(config.dump()), {.ranks = row[3].get<int64_t>()});
        },
        &error);
    bool passed = false;
    if (row[4].is_array())
      passed = !refused && settings.train_batch_size == row[4][0] &&
               settings.train_micro_batch_size_per_gpu == row[4][1] &&
               settings.gradient_accumulation_steps == row[4][2];
    else
      for (const char* key : kNumbers)
        passed = passed || (refused && error.find(std::string("'") + key + "'") != error.npos);
    report.check(passed, [&] { return row.dump() + "\n    found " + error; });
  }
}

void run_sections(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    const std::string section = row[0];
    const json config{{section, row[1]}, {"train_micro_batch_size_per_gpu", 1}};
    json found;
    const bool refused = throws_error([&] {
      found =
          json::parse(to_json(accelerate::zero::read_settings(DeepSpeedConfig(config.dump()), kOptions))).at(section);
    });
    report.check(row[2].contains("error") ? refused : found == row[2],
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  }
}

const Registration configurations("deepspeed_config", {run}), batches("deepspeed_batch", {run_batches}),
    sections("deepspeed_precision_sections", {run_sections});

}  // namespace
}  // namespace conformance::deepspeed_config_cases
