#include "accelerate/trackers/memory_tracker.hpp"

namespace accelerate {

void MemoryTracker::log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  rows.push_back({values, step, log_kwargs, time()});
}

void MemoryTracker::log_images(const std::map<std::string, at::Tensor>& given, std::optional<int64_t> step,
                               const TrackerValues& log_kwargs) {
  for (const auto& [image_name, image] : given) images.push_back({image_name, image, step, log_kwargs});
}

void MemoryTracker::log_table(const std::string& table_name, const std::vector<std::string>& columns,
                              const std::vector<TrackerList>& cells, std::optional<int64_t> step,
                              const TrackerValues& log_kwargs) {
  tables.push_back({table_name, columns, cells, step, log_kwargs});
}

void MemoryTracker::log_histogram(const std::string& histogram_name, const at::Tensor& values,
                                  std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  histograms.push_back({histogram_name, values, step, log_kwargs});
}

}  // namespace accelerate
