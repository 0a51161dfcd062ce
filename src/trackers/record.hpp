#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/trackers/tracker.hpp"

namespace accelerate {

/// Something that was logged, for any number of trackers.
struct TrackerRecord {
  std::function<void(GeneralTracker&, const TrackerValues& log_kwargs)> write;
  std::optional<TrackerData> kind;  ///< nothing: values, which all trackers take
  size_t bytes = 0;                 ///< of memory, about
  double time = 0;                  ///< when it was logged, seconds since 1970
};
using Record = std::shared_ptr<const TrackerRecord>;

/// Seconds since 1970, by the wall clock.
double wall_time();

/// Nothing is formatted here: it is the training that waits. Tensors are copied to the host.
Record record_of_configuration(TrackerValues config);
Record record_of_values(TrackerValues values, std::optional<int64_t> step);
/// @throws ShapeError for what are no images
Record record_of_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step);
/// @throws ShapeError for rows that are not as long as the columns
Record record_of_table(std::string table_name, std::vector<std::string> columns, std::vector<TrackerList> rows,
                       std::optional<int64_t> step);
/// @throws ShapeError for complex numbers and undefined tensors
Record record_of_histogram(std::string histogram_name, const at::Tensor& values, std::optional<int64_t> step);

}  // namespace accelerate
