#include "accelerate/trackers/tracker.hpp"
#include "accelerate/utils/error.hpp"

namespace accelerate {

bool is_tracker(const std::string& name) { return name == "tensorboard"; }

std::unique_ptr<GeneralTracker> make_tracker(const std::string& name, const std::string& run_name,
                                             const std::filesystem::path& logging_dir) {
  if (name == "tensorboard") return make_tensorboard_tracker(run_name, logging_dir);
  throw ConfigError("log_with: found '" + name + "', expected tensorboard, the tracker that this version has");
}

}  // namespace accelerate
