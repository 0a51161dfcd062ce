#include "accelerate/trackers/tracker.hpp"
#include "utils/raise.hpp"

namespace accelerate {

bool is_tracker(const std::string& name) { return name == "tensorboard"; }

std::unique_ptr<GeneralTracker> make_tracker(const std::string& name, const std::string& run_name,
                                             const std::filesystem::path& logging_dir) {
  if (name == "tensorboard") return make_tensorboard_tracker(run_name, logging_dir);
  raise<ConfigError>("log_with: found '{}', expected tensorboard, the tracker that this version has", name);
}

}  // namespace accelerate
