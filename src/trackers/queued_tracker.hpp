#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trackers/spill_file.hpp"

namespace accelerate {

/// The tracker that programs log to: one of a kind, its queue, and the file for records that it does not take.
class QueuedTracker : public GeneralTracker {
 public:
  /// `tracker` has been started.
  QueuedTracker(std::shared_ptr<GeneralTracker> tracker, RecordSpillFile::Options spill,
                const TrackerQueue::Limits& limits);
  /// Closes the run, but waits two seconds at most: an exception may be on its way.
  ~QueuedTracker() override;

  std::string name() const override { return tracker_->name(); }
  bool main_process_only() const override { return tracker_->main_process_only(); }
  bool requires_logging_directory() const override { return tracker_->requires_logging_directory(); }
  bool takes(TrackerData data) const override { return tracker_->takes(data); }
  void store_init_configuration(const TrackerValues& config) override;
  void log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs = {}) override;
  void log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                  const TrackerValues& log_kwargs = {}) override;
  void log_table(const std::string& table_name, const std::vector<std::string>& columns,
                 const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                 const TrackerValues& log_kwargs = {}) override;
  void log_histogram(const std::string& histogram_name, const at::Tensor& values, std::optional<int64_t> step,
                     const TrackerValues& log_kwargs = {}) override;
  /// Waits for all that was logged; no longer than ACCELERATE_TRACKER_TIMEOUT.
  void flush() override;
  /// Closes the run; waits no longer either.
  void finish() override { finish_within(timeout_); }

  /// @throws ConfigError after finish, and where takes() says no
  void push(Record record, const TrackerValues& log_kwargs);
  const std::shared_ptr<GeneralTracker>& unwrap() const { return tracker_; }

 private:
  void finish_within(std::chrono::milliseconds time);

  std::shared_ptr<GeneralTracker> tracker_;
  std::shared_ptr<RecordSpillFile> spill_;  ///< with the queue's thread, which may outlive us
  std::chrono::milliseconds timeout_;
  TrackerQueue queue_;
};

}  // namespace accelerate
