#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/trackers/tracker.hpp"

namespace accelerate {

/// Keeps in memory what is logged, for tests and for programs that look at their own numbers. In log_with by its name,
/// "memory" (then get_tracker("memory", true) gives it), or as an object of yours. Read it after a flush, which
/// get_tracker with unwrap = true is, or after end_training.
class ACCELERATE_API MemoryTracker : public GeneralTracker {
 public:
  struct Row {
    TrackerValues values;
    std::optional<int64_t> step;
    TrackerValues log_kwargs;
    double time = 0;  ///< seconds since 1970
  };
  struct Image {
    std::string name;
    at::Tensor image;  ///< as it was given, on the host
    std::optional<int64_t> step;
    TrackerValues log_kwargs;
  };
  struct Table {
    std::string name;
    std::vector<std::string> columns;
    std::vector<TrackerList> rows;
    std::optional<int64_t> step;
    TrackerValues log_kwargs;
  };
  struct Histogram {
    std::string name;
    at::Tensor values;
    std::optional<int64_t> step;
    TrackerValues log_kwargs;
  };

  std::string name() const override { return "memory"; }
  bool takes(TrackerData) const override { return true; }
  void store_init_configuration(const TrackerValues& config) override { configuration = config; }
  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs = {}) override;
  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs = {}) override;
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                 const TrackerValues& log_kwargs = {}) override;
  void log_histogram(const std::string& histogram_name, const at::Tensor& values, std::optional<int64_t> step,
                     const TrackerValues& log_kwargs = {}) override;
  void finish() override { finished = true; }

  TrackerValues configuration;
  std::vector<Row> rows;
  std::vector<Image> images;
  std::vector<Table> tables;
  std::vector<Histogram> histograms;
  bool finished = false;
};

}  // namespace accelerate
