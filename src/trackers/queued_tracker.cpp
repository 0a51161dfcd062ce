#include "trackers/queued_tracker.hpp"

#include <algorithm>

#include "trackers/tracker_timeout.hpp"
#include "utils/raise.hpp"

namespace accelerate {

QueuedTracker::QueuedTracker(std::shared_ptr<GeneralTracker> tracker, RecordSpillFile::Options spill,
                             const TrackerQueue::Limits& limits)
    : tracker_(std::move(tracker)),
      spill_(std::make_shared<RecordSpillFile>(std::move(spill))),
      timeout_(tracker_timeout()),
      queue_(
          tracker_,
          [spill = spill_](const TrackerQueue::Entry* entry, const std::string& reason) { spill->take(entry, reason); },
          limits) {}

void QueuedTracker::push(Record record, const TrackerValues& log_kwargs) {
  if (record->kind && !takes(*record->kind)) {
    constexpr std::array kKinds = {"images", "tables", "histograms"};
    raise<ConfigError>("tracker '{}': found {}, which it does not take; log them to another one", name(),
                       kKinds[static_cast<size_t>(*record->kind)]);
  }
  if (!queue_.push({std::move(record), log_kwargs}))
    raise<ConfigError>("tracker '{}': found something to log after end_training, expected it before: the run is closed",
                       name());
}

void QueuedTracker::store_init_configuration(const TrackerValues& config) { push(record_of_configuration(config), {}); }

void QueuedTracker::log(const TrackerValues& values, std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  push(record_of_values(values, step), log_kwargs);
}

void QueuedTracker::log_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step,
                               const TrackerValues& log_kwargs) {
  push(record_of_images(images, step), log_kwargs);
}

void QueuedTracker::log_table(const std::string& table_name, const std::vector<std::string>& columns,
                              const std::vector<TrackerList>& rows, std::optional<int64_t> step,
                              const TrackerValues& log_kwargs) {
  push(record_of_table(table_name, columns, rows, step), log_kwargs);
}

void QueuedTracker::log_histogram(const std::string& histogram_name, const at::Tensor& values,
                                  std::optional<int64_t> step, const TrackerValues& log_kwargs) {
  push(record_of_histogram(histogram_name, values, step), log_kwargs);
}

void QueuedTracker::flush() { queue_.flush(timeout_); }

QueuedTracker::~QueuedTracker() { finish_within(std::min(timeout_, std::chrono::milliseconds(2000))); }

void QueuedTracker::finish_within(std::chrono::milliseconds time) {
  queue_.finish(time);
  spill_->finish(time);
}

}  // namespace accelerate
