#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trackers/queued_tracker.hpp"

namespace accelerate {

/// The trackers of an Accelerator: those that were chosen, and the open ones of this process.
class TrackerSet {
 public:
  /// "all" becomes the trackers that are available; the same one twice is one.
  /// @throws ConfigError for names that there are not, and trackers that need a folder where there is none
  void choose(const std::vector<TrackerChoice>& log_with, std::filesystem::path logging_dir);

  struct Run {
    std::string project_name;
    const TrackerValues& config;
    const TrackerKwargs& init_kwargs;
    int64_t process_index;
  };
  /// See Accelerator::init_trackers.
  void open(const Run& run);

  /// What goes with each record.
  struct Mark {
    std::optional<int64_t> step;
    const TrackerKwargs& log_kwargs;
  };
  void log(TrackerValues values, const Mark& mark);
  void log_images(const std::map<std::string, at::Tensor>& images, const Mark& mark);
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, const Mark& mark);
  void log_histogram(const std::string& histogram_name, const at::Tensor& values, const Mark& mark);
  /// See Accelerator::get_tracker.
  std::shared_ptr<GeneralTracker> get(const std::string& name, bool unwrap) const;
  void finish();

 private:
  bool is_chosen(const std::string& name) const;
  void check_names(const TrackerKwargs& kwargs, const char* argument) const;
  bool anyone_takes(TrackerData data, const char* operation) const;
  void send(const Record& record, const TrackerKwargs& log_kwargs) const;

  std::vector<TrackerChoice> chosen_;
  std::filesystem::path logging_dir_;
  bool initialised_ = false;
  std::vector<std::shared_ptr<QueuedTracker>> open_;
};

}  // namespace accelerate
