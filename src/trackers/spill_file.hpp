#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "trackers/tracker_queue.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {

/// The destination of records that one tracker does not take: a file of JSON lines (docs/formats/json_lines.md), which
/// is there as soon as the first one comes, and a warning that says so. It has a queue and a thread of its own, because
/// the training itself may hand a record over.
class RecordSpillFile {
 public:
  struct Options {
    std::string tracker;
    std::string project_name;
    std::filesystem::path path;
  };
  explicit RecordSpillFile(Options options) : options_(std::move(options)) {}

  /// Warns the first time that it hears of trouble. Any thread.
  void take(const TrackerQueue::Entry* entry, const std::string& reason);
  /// Has all written.
  void finish(std::chrono::milliseconds time);

 private:
  const Options options_;
  Mutex mutex_;
  std::unique_ptr<TrackerQueue> queue_ ACCELERATE_GUARDED_BY(mutex_);
  bool warned_ ACCELERATE_GUARDED_BY(mutex_) = false;  ///< of trouble without a record
  bool warned_of_file_ ACCELERATE_GUARDED_BY(mutex_) = false;
  bool lost_ ACCELERATE_GUARDED_BY(mutex_) = false;
};

}  // namespace accelerate
