#include "accelerate/trackers/tracker.hpp"

#include "trackers/record.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

[[noreturn]] void does_not_take(const GeneralTracker& tracker, const char* what) {
  raise<ConfigError>("tracker '{}': found {}, which it does not take; log them to another one", tracker.name(), what);
}

}  // namespace

void TrackerChoice::take_name() {
  if (!object_) throw ConfigError("log_with: found a null pointer, expected a tracker or the name of one");
  name_ = object_->name();
}

void GeneralTracker::log_images(const std::map<std::string, at::Tensor>&, std::optional<int64_t>,
                                const TrackerValues&) {
  does_not_take(*this, "images");
}

void GeneralTracker::log_table(const std::string&, const std::vector<std::string>&, const std::vector<TrackerList>&,
                               std::optional<int64_t>, const TrackerValues&) {
  does_not_take(*this, "tables");
}

void GeneralTracker::log_histogram(const std::string&, const at::Tensor&, std::optional<int64_t>,
                                   const TrackerValues&) {
  does_not_take(*this, "histograms");
}

double GeneralTracker::time() const { return time_.value_or(wall_time()); }

}  // namespace accelerate
