#include "accelerate/trackers/python_tracker.hpp"

#include <algorithm>

#include "input/json.hpp"
#include "trackers/built_in.hpp"
#include "trackers/images.hpp"
#include "trackers/json_lines.hpp"
#include "trackers/python_child.hpp"
#include "trackers/said_once.hpp"
#include "trackers/tracker_timeout.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {

using Value = nlohmann::ordered_json;

Value step_of(std::optional<int64_t> step) { return step ? Value(*step) : Value(); }

}  // namespace

struct PythonTracker::Impl {
  std::string name;
  TrackerSetup setup;
  std::optional<PythonChild> python = std::nullopt;
  std::map<std::string, std::string> details = {};
  SaidOnce said = {};  ///< what the service has no place for

  /// @throws TrackerGone when there is no SDK to ask any more; ResourceError with what the SDK threw.
  void ask(const char* what, Value request) {
    const auto limit = tracker_timeout();
    if (!python) throw TrackerGone(fmt::format("{}: there is no run", name));
    request["do"] = what;
    request["limit"] = std::chrono::duration<double>(limit).count();
    std::string text;
    try {
      text = python->ask(request.dump(-1, ' ', false, Value::error_handler_t::replace), limit);
    } catch (const ResourceError& error) {
      throw TrackerGone(fmt::format("{}: its Python process failed in '{}': {}", name, what, error.what()));
    }
    const auto answer = parse_json<Value>(text);
    if (!answer.is_object())
      throw TrackerGone(fmt::format("{}: its Python process answered {}", name, show_json(answer)));
    if (const auto found = answer.find("error"); found != answer.end() && found->is_string())
      raise<ResourceError>("{}: its SDK failed in '{}': {}", name, what, found->get<std::string>());
    if (const auto found = answer.find("refused"); found != answer.end() && found->is_string())
      if (said.is_first(found->get<std::string>()))
        logs::warn("accelerate.trackers", "{} {}. Left out; this is said once.", name, found->get<std::string>());
    if (const auto found = answer.find("details"); found != answer.end() && found->is_object())
      for (const auto& [key, value] : found->items())
        if (value.is_string()) details[key] = value.get<std::string>();
  }
};

const std::map<std::string, std::string>& python_tracker_packages() {
  static const std::map<std::string, std::string> packages{{"aim", "aim"},           {"clearml", "clearml"},
                                                           {"comet_ml", "comet_ml"}, {"swanlab", "swanlab"},
                                                           {"trackio", "trackio"},   {"wandb", "wandb"}};
  return packages;
}

PythonTracker::PythonTracker(const std::string& name, const TrackerSetup& setup)
    : impl_(new Impl{.name = name, .setup = setup}) {
  if (!python_tracker_packages().count(name))
    raise<ConfigError>("PythonTracker: found '{}', expected aim, clearml, comet_ml, swanlab, trackio or wandb", name);
}

PythonTracker::~PythonTracker() = default;

std::string PythonTracker::name() const { return impl_->name; }
bool PythonTracker::requires_logging_directory() const { return impl_->name == "aim"; }

bool PythonTracker::takes(TrackerData kind) const {
  if (kind == TrackerData::tables) return impl_->name != "aim";
  if (kind == TrackerData::histograms) return impl_->name != "swanlab";
  return true;
}

void PythonTracker::connect() {
  const std::string interpreter = tracker_python();
  try {
    impl_->python.emplace(interpreter);
    impl_->ask("start", {{"tracker", impl_->name},
                         {"project", impl_->setup.project_name},
                         {"folder", impl_->setup.logging_dir.string()},
                         {"options", to_json(impl_->setup.init_kwargs)}});
  } catch (const TrackerGone&) {
    throw;
  } catch (const Error& error) {
    impl_->python.reset();
    const std::string why = error.what();
    const bool missing = why.find("ModuleNotFoundError") != std::string::npos;
    throw TrackerGone(missing ? fmt::format("{} Install it (pip install {}) for '{}', or set ACCELERATE_PYTHON to the "
                                            "interpreter that has it.",
                                            why, impl_->name, interpreter)
                              : why);
  }
}

void PythonTracker::store_init_configuration(const TrackerValues& config) {
  impl_->ask("config", {{"values", to_json(config)}});
}

void PythonTracker::log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  impl_->ask("log", {{"values", to_json(values)}, {"step", step_of(step)}, {"options", to_json(log_kwargs)}});
}

void PythonTracker::log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                               const TrackerValues& log_kwargs) {
  Value values = Value::object();
  TrackerValues others = log_kwargs;
  others.erase("dataformats");
  for (const auto& [name, image] : images) values[name] = tensor_to_json(images_as_nhwc(name, image, log_kwargs));
  impl_->ask("images", {{"values", std::move(values)}, {"step", step_of(step)}, {"options", to_json(others)}});
}

void PythonTracker::log_table(const std::string& table_name, const std::vector<std::string>& columns,
                              const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                              const TrackerValues& log_kwargs) {
  Value table = Value::array();
  for (const auto& row : rows) table.push_back(to_json(row));
  impl_->ask("table", {{"name", table_name},
                       {"columns", columns},
                       {"rows", std::move(table)},
                       {"step", step_of(step)},
                       {"options", to_json(log_kwargs)}});
}

void PythonTracker::log_histogram(const std::string& histogram_name, const at::Tensor& values,
                                  std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  impl_->ask("histogram", {{"name", histogram_name},
                           {"values", tensor_to_json(values.to(at::kDouble).flatten())},
                           {"step", step_of(step)},
                           {"options", to_json(log_kwargs)}});
}

void PythonTracker::finish() {
  if (!impl_->python) return;
  impl_->ask("finish", Value::object());
  impl_->python->end(tracker_timeout());
  impl_->python.reset();
}

TrackerClass python_class(const std::string& name) {
  return {.make = [name](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
            return std::make_shared<PythonTracker>(name, setup);
          },
          .available =
              [package = python_tracker_packages().at(name)] {
                // All of them with one start of the interpreter, once for each that the program sets.
                static Mutex mutex;
                static std::map<std::string, std::vector<std::string>> found;
                const MutexLock lock(mutex);
                const auto [here, is_new] = found.try_emplace(tracker_python());
                if (is_new) {
                  std::vector<std::string> packages;
                  for (const auto& [ignored, one] : python_tracker_packages()) packages.push_back(one);
                  here->second = installed_packages(packages);
                }
                return std::find(here->second.begin(), here->second.end(), package) != here->second.end();
              },
          .requires_logging_directory = name == "aim"};
}

const std::map<std::string, std::string>& PythonTracker::details() const { return impl_->details; }

}  // namespace accelerate
