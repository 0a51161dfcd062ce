#include "comm/progress.hpp"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

#include "accelerate/utils/error.hpp"

namespace accelerate::comm {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Pending::Pending(const char* operation)
    : operation(operation), future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

void Pending::fail(const std::exception_ptr& error) {
  if (!done.exchange(true)) future->setError(error);
}

void Pending::complete(const at::Tensor& tensor) {
  if (!done.exchange(true)) future->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor}));
}

Activity& Progress::activity(const std::string& key, const std::string& group) {
  const std::lock_guard lock(mutex);
  Activity& activity = activities[key];
  activity.group = group;
  return activity;
}

void Progress::begin(Activity& activity, const char* operation) {
  const std::lock_guard lock(mutex);
  ++activity.sequence, ++activity.inside;
  activity.operation = operation;
  activity.since = Clock::now();
}

void Progress::end(Activity& activity) {
  {
    const std::lock_guard lock(mutex);
    --activity.inside;
    activity.since = Clock::now();
  }
  changed.notify_all();
}

RankStatus Progress::status() {
  const std::lock_guard lock(mutex);
  RankStatus status;
  for (const auto& [key, activity] : activities)
    status.groups[key] = {
        .name = activity.group,
        .sequence = activity.sequence,
        .operation = activity.operation,
        .inside = activity.inside > 0,
        .age_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - activity.since).count()};
  return status;
}

std::string Progress::failure() {
  const std::lock_guard lock(mutex);
  return peer_failure;
}

void Progress::peer_failed(const std::string& reason) {
  std::set<std::shared_ptr<Pending>> failed;
  {
    const std::lock_guard lock(mutex);
    if (peer_failure.empty()) peer_failure = reason;
    failed.swap(pending);
    for (c10d::Work* transfer : transfers) transfer->abort();
  }
  changed.notify_all();
  for (const auto& work : failed)
    work->fail(std::make_exception_ptr(CommError(std::string(work->operation) + ": " + reason)));
}

}  // namespace accelerate::comm
