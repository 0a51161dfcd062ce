#include "trackers/spill_file.hpp"

#include <mutex>

#include "trackers/json_lines.hpp"
#include "utils/log.hpp"

namespace accelerate {

void RecordSpillFile::take(const TrackerQueue::Entry* entry, const std::string& given_reason) {
  // It stands in a sentence, and may be one.
  const std::string reason = given_reason.substr(0, given_reason.size() - given_reason.ends_with('.'));
  MutexLock lock(mutex_);
  if (entry && !queue_ && !lost_) {
    auto file = std::make_shared<JsonLinesTracker>(
        JsonLinesTracker::Options{.project_name = options_.project_name, .path = options_.path});
    try {
      file->start();
      queue_ = std::make_unique<TrackerQueue>(
          file,
          [](const TrackerQueue::Entry*, const std::string& why) {
            static std::once_flag said;
            std::call_once(said, [&] {
              logs::warn("accelerate.trackers",
                         "trackers: records are lost that could be written neither to their tracker nor to a local "
                         "file: {}",
                         why);
            });
          },
          TrackerQueue::Limits{.records = size_t{1} << 18, .bytes = size_t{256} << 20});
    } catch (const std::exception& error) {
      lost_ = true;
      logs::warn("accelerate.trackers", "trackers: '{}' has a problem ({}), and what it does not take is lost: {}",
                 options_.tracker, reason, error.what());
    }
  }
  if (entry && queue_) queue_->push(*entry);
  if (!queue_) {
    if (lost_ || std::exchange(warned_, true)) return;
    logs::warn("accelerate.trackers", "trackers: '{}': {}. The training goes on.", options_.tracker, reason);
    return;
  }
  if (std::exchange(warned_of_file_, true)) return;
  logs::warn("accelerate.trackers",
             "trackers: '{0}' does not take all that is logged: {1}. The training goes on, and such records go to {2}; "
             "`accelerate track replay {2} --to {0}` sends them later.",
             options_.tracker, reason, options_.path.string());
}

void RecordSpillFile::finish(std::chrono::milliseconds time) {
  std::unique_ptr<TrackerQueue> queue;
  {
    MutexLock lock(mutex_);
    queue.swap(queue_);
  }
  if (queue) queue->finish(time);
}

}  // namespace accelerate
