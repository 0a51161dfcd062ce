#pragma once

#include "accelerate/trackers/tracker.hpp"

/// The library's own trackers, for the registry: a function for each, in its file.
namespace accelerate {

TrackerClass tensorboard_class();
TrackerClass json_lines_class();
TrackerClass memory_class();

/// Refuses init_kwargs that `tracker` does not know.
void check_init_kwargs(const char* tracker, const TrackerSetup& setup, const std::vector<std::string>& known);

}  // namespace accelerate
