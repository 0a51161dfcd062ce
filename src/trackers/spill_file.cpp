#include "trackers/spill_file.hpp"

#include <c10/util/Exception.h>

#include "trackers/json_lines.hpp"

namespace accelerate {

void SpillFile::take(const TrackerQueue::Entry* entry, const std::string& reason) {
  MutexLock lock(mutex_);
  if (entry && !queue_ && !lost_) {
    auto file = std::make_shared<JsonLinesTracker>(
        JsonLinesTracker::Options{.project_name = options_.project_name, .path = options_.path});
    try {
      file->start();
      queue_ = std::make_unique<TrackerQueue>(
          file,
          [](const TrackerQueue::Entry*, const std::string& why) {
            TORCH_WARN_ONCE(
                "trackers: records are lost that could be written neither to their tracker nor to a local "
                "file: ",
                why);
          },
          TrackerQueue::Limits{.records = size_t{1} << 18, .bytes = size_t{256} << 20});
    } catch (const std::exception& error) {
      lost_ = true;
      TORCH_WARN("trackers: '", options_.tracker, "' has a problem (", reason,
                 "), and what it does not take is lost: ", error.what());
    }
  }
  if (entry && queue_) queue_->push(*entry);
  if (!queue_) {
    if (lost_ || std::exchange(warned_, true)) return;
    TORCH_WARN("trackers: '", options_.tracker, "': ", reason, ". The training goes on.");
    return;
  }
  if (std::exchange(warned_of_file_, true)) return;
  TORCH_WARN("trackers: '", options_.tracker, "' does not take all that is logged: ", reason,
             ". The training goes on, and such records go to ", options_.path.string(), "; `accelerate track replay ",
             options_.path.string(), " --to ", options_.tracker, "` sends them later.");
}

void SpillFile::finish(std::chrono::milliseconds time) {
  std::unique_ptr<TrackerQueue> queue;
  {
    MutexLock lock(mutex_);
    queue.swap(queue_);
  }
  if (queue) queue->finish(time);
}

}  // namespace accelerate
