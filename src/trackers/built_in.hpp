#pragma once

#include "accelerate/trackers/tracker.hpp"

/// The library's own trackers, for the registry: a function for each, in its file.
namespace accelerate {

TrackerClass tensorboard_class();
TrackerClass json_lines_class();
TrackerClass memory_class();
TrackerClass mlflow_class();
TrackerClass dvclive_class();
/// The class of those that are a PythonTracker.
TrackerClass python_class(const std::string& name);

}  // namespace accelerate
