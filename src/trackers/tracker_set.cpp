#include "trackers/tracker_set.hpp"

#include <unistd.h>

#include <algorithm>

#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Stands where another process has the tracker.
class BlankTracker : public GeneralTracker {
 public:
  explicit BlankTracker(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  bool takes(TrackerData) const override { return true; }
  void store_init_configuration(const TrackerValues&) override {}
  void log(const TrackerValues&, std::optional<int64_t>, const TrackerValues&) override {}
  void log_images(const std::map<std::string, at::Tensor>&, std::optional<int64_t>, const TrackerValues&) override {}
  void log_table(const std::string&, const std::vector<std::string>&, const std::vector<TrackerList>&,
                 std::optional<int64_t>, const TrackerValues&) override {}
  void log_histogram(const std::string&, const at::Tensor&, std::optional<int64_t>, const TrackerValues&) override {}

 private:
  std::string name_;
};

std::string names_of(const std::vector<TrackerChoice>& choices) {
  std::vector<std::string> names;
  for (const auto& choice : choices) names.push_back(choice.name());
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

/// A project's name as part of a file's.
std::string file_part(std::string name) {
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
}

}  // namespace

void TrackerSet::choose(const std::vector<TrackerChoice>& log_with, std::filesystem::path logging_dir) {
  std::vector<TrackerChoice> wanted;
  for (const auto& choice : log_with)
    if (choice.name() != "all" || choice.object()) wanted.push_back(choice);
    else
      for (const auto& name : available_trackers()) wanted.emplace_back(name);
  for (const auto& choice : wanted) {
    if (std::find(chosen_.begin(), chosen_.end(), choice) != chosen_.end()) continue;
    const bool needs_folder = choice.object() ? choice.object()->requires_logging_directory()
                                              : tracker_class(choice.name()).requires_logging_directory;
    if (needs_folder && logging_dir.empty())
      raise<ConfigError>(
          "Accelerator: log_with has '{}' without a folder to write to, expected project_dir (or "
          "project_config.logging_dir)",
          choice.name());
    chosen_.push_back(choice);
  }
  logging_dir_ = std::move(logging_dir);
}

bool TrackerSet::is_chosen(const std::string& name) const {
  return std::any_of(chosen_.begin(), chosen_.end(), [&](const auto& choice) { return choice.name() == name; });
}

void TrackerSet::check_names(const TrackerKwargs& kwargs, const std::string& argument) const {
  for (const auto& [name, values] : kwargs)
    if (!is_chosen(name))
      raise<ConfigError>("{}: found '{}', expected a tracker of log_with ({})", argument, name, names_of(chosen_));
}

void TrackerSet::open(const Run& run) {
  if (chosen_.empty())
    throw ConfigError(
        "init_trackers: no tracker was asked for, expected some in AcceleratorOptions::log_with, e.g. "
        "{\"tensorboard\"}");
  check_names(run.init_kwargs, "init_trackers: init_kwargs");
  finish();
  initialised_ = false;
  decltype(open_) opened;  // closed again where one that comes later can't be
  for (const auto& choice : chosen_) {
    const auto given = run.init_kwargs.find(choice.name());
    auto tracker = choice.object();
    if (tracker && given != run.init_kwargs.end())
      raise<ConfigError>(
          "init_trackers: init_kwargs has arguments for '{}', which is an object of yours, expected none: it has its "
          "arguments",
          choice.name());
    if (!tracker)
      tracker = tracker_class(choice.name())
                    .make({.project_name = run.project_name,
                           .logging_dir = logging_dir_,
                           .init_kwargs = given == run.init_kwargs.end() ? TrackerValues{} : given->second});
    if (tracker->main_process_only() && run.process_index != 0) continue;
    tracker->start();
    const auto unsent = (std::filesystem::absolute(logging_dir_.empty() ? "." : logging_dir_) / "unsent" /
                         fmt::format("{}-{}-rank{}-{}.jsonl", file_part(run.project_name), file_part(choice.name()),
                                     run.process_index, ::getpid()))
                            .lexically_normal();
    opened.push_back(std::make_shared<QueuedTracker>(
        std::move(tracker),
        RecordSpillFile::Options{.tracker = choice.name(), .project_name = run.project_name, .path = unsent},
        TrackerQueue::Limits{}));
  }
  counts::add(TrackerCount::trackers, static_cast<int64_t>(opened.size()));
  open_ = std::move(opened);
  initialised_ = true;
  if (!run.config.empty()) send(record_of_configuration(run.config), {});
}

void TrackerSet::send(const Record& record, const TrackerKwargs& log_kwargs) const {
  for (const auto& tracker : open_) {
    if (record->kind && !tracker->takes(*record->kind)) continue;
    const auto kwargs = log_kwargs.find(tracker->name());
    tracker->push(record, kwargs == log_kwargs.end() ? TrackerValues{} : kwargs->second);
  }
}

void TrackerSet::log(const Logging& logging, const std::function<Record()>& make,
                     std::optional<TrackerData> kind) const {
  check_names(logging.log_kwargs, fmt::format("{}: log_kwargs", logging.operation));
  if (open_.empty()) return;
  if (kind && std::none_of(open_.begin(), open_.end(), [&](const auto& tracker) { return tracker->takes(*kind); }))
    raise<ConfigError>("{}: none of the trackers ({}) takes them; add one that does to log_with, e.g. tensorboard",
                       logging.operation, names_of(chosen_));
  send(make(), logging.log_kwargs);
}

std::shared_ptr<GeneralTracker> TrackerSet::get(const std::string& name, bool unwrap) const {
  if (!is_chosen(name))
    raise<ConfigError>("get_tracker: found '{}', expected a tracker of log_with ({})", name, names_of(chosen_));
  if (!initialised_) raise<ConfigError>("get_tracker: '{}' is not open yet, expected init_trackers() before", name);
  for (const auto& tracker : open_)
    if (tracker->name() == name) {
      if (!unwrap) return tracker;
      tracker->flush();
      return tracker->unwrap();
    }
  return std::make_shared<BlankTracker>(name);
}

void TrackerSet::finish() {
  for (const auto& tracker : open_) tracker->finish();
  open_.clear();
}

}  // namespace accelerate
