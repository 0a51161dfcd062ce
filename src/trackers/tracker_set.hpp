#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trackers/queued_tracker.hpp"
#include "utils/counts.hpp"

namespace accelerate {

/// See utils/counts.hpp.
enum class TrackerCount {
  trackers,  ///< opened
  number_of_counts
};

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

  /// The Accelerator's: its operation, for messages, and what goes to which tracker with the record.
  struct Logging {
    const char* operation;
    const TrackerKwargs& log_kwargs;
  };
  /// @param make  the record, if there are trackers  @param kind  nothing: values
  /// @throws ConfigError where there are, and none of them takes this kind
  void log(const Logging& logging, const std::function<Record()>& make, std::optional<TrackerData> kind = {}) const;
  /// See Accelerator::get_tracker.
  std::shared_ptr<GeneralTracker> get(const std::string& name, bool unwrap) const;
  void finish();

 private:
  bool is_chosen(const std::string& name) const;
  void check_names(const TrackerKwargs& kwargs, const std::string& argument) const;
  void send(const Record& record, const TrackerKwargs& log_kwargs) const;

  std::vector<TrackerChoice> chosen_;
  std::filesystem::path logging_dir_;
  bool initialised_ = false;
  std::vector<std::shared_ptr<QueuedTracker>> open_;
};

}  // namespace accelerate
