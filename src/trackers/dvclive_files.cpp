#include "trackers/dvclive_files.hpp"

#include <cmath>
#include <fstream>

#include "config/yaml.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/atomic_file.hpp"

namespace accelerate {
namespace {

using config::Value;
namespace fs = std::filesystem;

constexpr const char* kWhat = "dvclive";

void write_small_file(const fs::path& path, const std::string& text) {
  AtomicFile file(kWhat, path);
  file.write(text);
  file.finish(false);
}

/// As Python's csv module writes a field of a table with tabs.
std::string tsv_field(const std::string& text) {
  if (text.find_first_of("\t\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char byte : text) quoted += byte == '"' ? std::string("\"\"") : std::string(1, byte);
  return quoted + "\"";
}

bool could_log(const Value& value) { return value.is_number() || value.is_boolean() || value.is_string(); }

/// JSON has no words for numbers that are none: they are texts there.
Value for_summary(const Value& value) {
  return value.is_number_float() && !std::isfinite(value.get<double>()) ? Value(config::python_text(value)) : value;
}

Value dvclive_option(const Value& options, const char* name, const Value& fallback) {
  return options.contains(name) ? options[name] : fallback;
}

}  // namespace

DvcliveFiles::DvcliveFiles(const Value& options) {
  for (const auto& [name, value] : options.items()) {
    if (name == "dir" || name == "resume" || name == "dvcyaml") continue;
    const bool is_default = value.is_null() || value == Value(false);
    const bool known = name == "report" || name == "save_dvc_exp" || name == "cache_images" || name == "exp_name" ||
                       name == "exp_message" || name == "monitor_system";
    if (known && is_default) continue;
    if (known)
      raise<ConfigError>(
          "dvclive: found {} = {}, which needs the program dvc; expected dir, resume or dvcyaml. Leave it out, and "
          "call `dvc exp save` or `dvc add` when the run is over",
          name, config::python_text(value));
    raise<ConfigError>("dvclive: found the option '{}', expected dir, resume or dvcyaml", name);
  }
  const Value folder = dvclive_option(options, "dir", "dvclive");
  if (!folder.is_string())
    raise<ConfigError>("dvclive: found dir = {}, expected the path of a folder", config::python_text(folder));
  folder_ = folder.get<std::string>();
  const Value yaml = dvclive_option(options, "dvcyaml", "dvc.yaml");
  if (yaml.is_string()) dvcyaml_ = yaml.get<std::string>();
  else if (yaml == Value(true)) dvcyaml_ = "dvc.yaml";
  if (!dvcyaml_.empty() && dvcyaml_.filename() != "dvc.yaml")
    raise<ConfigError>("dvclive: found dvcyaml = {}, expected a path that ends in dvc.yaml: DVC looks for that name",
                       dvcyaml_.string());

  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) raise<CheckpointError>("dvclive: the folder {} can't be made: {}", folder_.string(), error.message());
  if (dvclive_option(options, "resume", false) == Value(true)) {
    std::string text;
    if (read_file(folder_ / "metrics.json", kMostListBytes, text).empty()) {
      summary_ = parse_json<Value>(text);
      if (!summary_.is_object())
        raise<CheckpointError>(
            "dvclive: {} is not what dvclive writes, expected an object of JSON; so the run can't be resumed. Leave "
            "resume out to begin anew",
            (folder_ / "metrics.json").string());
      if (const auto last = summary_.contains("step") ? whole_number(summary_["step"]) : std::nullopt)
        step_ = *last == 0 ? 0 : *last + 1;
    }
    if (read_file(folder_ / "params.yaml", kMostSettingsBytes, text).empty())
      params_ = config::read_yaml(text, (folder_ / "params.yaml").string());
    if (!params_.is_object()) params_ = Value::object();
    has_plots_ = fs::exists(folder_ / "plots" / "metrics", error);
    has_images_ = fs::exists(folder_ / "plots" / "images", error);
  } else {
    for (const char* name : {"plots/metrics", "plots/images", "plots/sklearn", "plots/custom", "metrics.json",
                             "params.yaml", "report.html", "report.md", "dvc.yaml"})
      fs::remove_all(folder_ / name, error);
  }
  // Somebody's own pipelines and comments are not ours to rewrite: DVC finds the file in our folder as well.
  std::string text;
  if (!dvcyaml_.empty() && read_file(dvcyaml_, kMostSettingsBytes, text).empty() &&
      text.find((fs::relative(folder_, fs::absolute(dvcyaml_).parent_path(), error) / "").generic_string()) ==
          std::string::npos)
    dvcyaml_ = folder_ / "dvc.yaml";
}

fs::path DvcliveFiles::place(const char* kind, const std::string& name) const {
  const fs::path below = fs::path(name).lexically_normal();
  if (below.empty() || below.is_absolute() || *below.begin() == ".." || below == "." || !below.has_filename())
    raise<ConfigError>("dvclive: found the name '{}', expected one that is also a file's below {}", name,
                       (folder_ / "plots" / kind).string());
  return folder_ / "plots" / kind / below;
}

void DvcliveFiles::params(const Value& values) {
  params_.update(values);
  write_small_file(folder_ / "params.yaml", config::write_yaml(params_));
  write_dvcyaml();
}

std::vector<std::string> DvcliveFiles::log(const Value& values, const Mark& mark, const Value& options) {
  bool timestamp = false, plot = true;
  for (const auto& [name, value] : options.items()) {
    if (name != "timestamp" && name != "plot")
      raise<ConfigError>("dvclive: found the option '{}' of log, expected timestamp or plot", name);
    (name == "plot" ? plot : timestamp) = config::truthy(value);
  }
  if (mark.step) step_ = mark.step;
  else if (!step_) step_ = 0;
  std::vector<std::string> left_out;
  for (const auto& [name, value] : values.items()) {
    if (!could_log(value)) {
      left_out.push_back(name);
      continue;
    }
    const fs::path path = place("metrics", name);
    if (plot) {
      fs::path file = path;
      file += ".tsv";
      std::error_code ignored;
      fs::create_directories(file.parent_path(), ignored);
      const bool is_new = !fs::exists(file, ignored);
      std::ofstream out(file, std::ios::app | std::ios::binary);
      std::string row;
      if (is_new) row = (timestamp ? "timestamp\tstep\t" : "step\t") + tsv_field(path.filename().string()) + "\n";
      if (timestamp) row += std::to_string(std::llround(mark.time * 1000)) + "\t";
      row += std::to_string(*step_) + "\t" + tsv_field(config::python_text(value)) + "\n";
      if (!out.write(row.data(), static_cast<std::streamsize>(row.size())).flush())
        raise<CheckpointError>("dvclive: {} can't be written to. Is the disk full?", file.string());
      has_plots_ = true;
    }
    // plots/metrics/train/loss.tsv is {"train": {"loss": ...}}.
    Value* level = &summary_;
    for (const auto& part : fs::path(name).lexically_normal().parent_path()) {
      Value& next = (*level)[part.string()];
      if (!next.is_object()) next = Value::object();
      level = &next;
    }
    (*level)[path.filename().string()] = for_summary(value);
  }
  write_summary();
  step_ = *step_ + 1;
  return left_out;
}

fs::path DvcliveFiles::image(const std::string& name) {
  fs::path path = place("images", name);
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error)
    raise<CheckpointError>("dvclive: the folder {} can't be made: {}", path.parent_path().string(), error.message());
  has_images_ = true;
  write_dvcyaml();
  return path;
}

void DvcliveFiles::write_summary() {
  summary_["step"] = *step_;
  write_small_file(folder_ / "metrics.json", summary_.dump(4) + "\n");
  write_dvcyaml();
}

void DvcliveFiles::write_dvcyaml() {
  if (dvcyaml_.empty()) return;
  std::error_code error;
  const fs::path below = fs::relative(folder_, fs::absolute(dvcyaml_).parent_path(), error);
  const auto name = [&](const char* file) { return (below / file).lexically_normal().generic_string(); };
  Value content = Value::object(), plots = Value::array();
  if (!params_.empty()) content["params"] = {name("params.yaml")};
  if (!summary_.empty()) content["metrics"] = {name("metrics.json")};
  if (has_plots_) plots.push_back({{name("plots/metrics"), {{"x", "step"}}}});
  if (has_images_) plots.push_back(name("plots/images"));
  if (!plots.empty()) content["plots"] = plots;
  const std::string text = config::write_yaml(content);
  if (text == written_dvcyaml_) return;
  write_small_file(dvcyaml_, text);
  written_dvcyaml_ = text;
}

}  // namespace accelerate
