#include <algorithm>

#include "accelerate/trackers/memory_tracker.hpp"
#include "trackers/built_in.hpp"
#include "trackers/keyword_arguments.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {

struct TrackerRegistry {
  Mutex mutex;
  std::map<std::string, TrackerClass> classes ACCELERATE_GUARDED_BY(mutex) = {{"aim", python_class("aim")},
                                                                              {"clearml", python_class("clearml")},
                                                                              {"comet_ml", python_class("comet_ml")},
                                                                              {"dvclive", dvclive_class()},
                                                                              {"jsonl", json_lines_class()},
                                                                              {"memory", memory_class()},
                                                                              {"mlflow", mlflow_class()},
                                                                              {"swanlab", python_class("swanlab")},
                                                                              {"tensorboard", tensorboard_class()},
                                                                              {"trackio", python_class("trackio")},
                                                                              {"wandb", python_class("wandb")}};
};

TrackerRegistry& tracker_registry() {
  static TrackerRegistry registry;
  return registry;
}

}  // namespace

void register_tracker_class(const std::string& name, TrackerClass tracker) {
  if (name.empty() || name == "all")
    raise<ConfigError>("register_tracker_class: found the name '{}', expected one that log_with can tell from others",
                       name);
  if (!tracker.make || !tracker.available)
    raise<ConfigError>("register_tracker_class: '{}' lacks {}, expected a function", name,
                       tracker.make ? "available" : "make");
  auto& registry = tracker_registry();
  bool is_new = true;
  {
    const MutexLock lock(registry.mutex);
    is_new = registry.classes.insert_or_assign(name, std::move(tracker)).second;
  }
  if (!is_new)
    logs::warn("accelerate.trackers",
               "register_tracker_class: '{}' was registered already, and is another tracker from now on", name);
}

std::vector<std::string> tracker_names() {
  auto& registry = tracker_registry();
  const MutexLock lock(registry.mutex);
  std::vector<std::string> names;
  for (const auto& [name, tracker] : registry.classes) names.push_back(name);
  return names;
}

std::vector<std::string> available_trackers() {
  auto names = tracker_names();
  std::erase_if(names, [](const auto& name) { return !tracker_class(name).available(); });
  return names;
}

TrackerClass tracker_class(const std::string& name) {
  auto& registry = tracker_registry();
  {
    const MutexLock lock(registry.mutex);
    if (const auto found = registry.classes.find(name); found != registry.classes.end()) return found->second;
  }
  raise<ConfigError>("log_with: found '{}', expected one of {}, all, or a tracker of your own", name,
                     fmt::join(tracker_names(), ", "));
}

TrackerClass memory_class() {
  return {.make = [](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
    const KeywordArguments none("memory: init_kwargs", setup.init_kwargs, {});
    return std::make_shared<MemoryTracker>();
  }};
}

}  // namespace accelerate
