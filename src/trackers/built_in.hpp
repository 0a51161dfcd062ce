#pragma once

#include "accelerate/trackers/tracker.hpp"

/// The library's own trackers, for the registry: a function for each, in its file.
namespace accelerate {

TrackerClass tensorboard_class();
TrackerClass json_lines_class();
TrackerClass memory_class();

}  // namespace accelerate
