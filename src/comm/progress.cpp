#include "comm/progress.hpp"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <string_view>
#include <vector>

#include "accelerate/utils/error.hpp"

namespace accelerate::comm {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Pending::Pending(const char* operation, const at::Device& device)
    : operation(operation),
      future(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::ofTensors(),
          device.is_cpu() || device.is_meta() ? std::vector<at::Device>() : std::vector<at::Device>{device})) {}

void Pending::fail(const std::exception_ptr& error) {
  if (!done.exchange(true)) future->setError(error);
}

void Pending::complete(const at::Tensor& tensor) {
  if (!done.exchange(true)) future->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor}));
}

GroupActivity& Progress::activity(const std::string& key, const std::string& group, int64_t next) {
  const MutexLock lock(mutex_);
  GroupActivity& activity = activities_[key];
  activity.group = group;
  activity.next = next;
  return activity;
}

void Progress::begin(GroupActivity& activity, const char* operation, int64_t bytes) {
  constexpr size_t kRecent = 32;  // so far may one rank get ahead of another that it must agree with
  const MutexLock lock(mutex_);
  ++activity.sequence, ++activity.inside;
  auto& recent = activity.recent;
  const auto before = recent.empty() ? 0 : static_cast<uint64_t>(recent.back().second);
  const auto name = std::hash<std::string_view>()(operation);
  recent.emplace_back(operation,
                      static_cast<int64_t>((before ^ name) * 0x9E3779B97F4A7C15U + static_cast<uint64_t>(bytes)));
  if (recent.size() > kRecent) recent.pop_front();
  activity.since = Clock::now();
}

void Progress::end(GroupActivity& activity) {
  {
    const MutexLock lock(mutex_);
    --activity.inside;
    activity.since = Clock::now();
  }
  changed_.notify_all();
}

RankStatus Progress::status() {
  const MutexLock lock(mutex_);
  RankStatus status;
  for (const auto& [key, activity] : activities_) {
    auto& group = status.groups[key] = {
        .name = activity.group,
        .sequence = activity.sequence,
        .inside = activity.inside > 0,
        .age_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - activity.since).count(),
        .next = activity.next};
    for (const auto& [operation, history] : activity.recent) group.recent.push_back({operation, history});
  }
  return status;
}

std::string Progress::failure() {
  const MutexLock lock(mutex_);
  return failure_;
}

void Progress::peer_failed(const std::string& reason) {
  std::set<std::shared_ptr<Pending>> failed;
  {
    const MutexLock lock(mutex_);
    if (failure_.empty()) failure_ = reason;
    failed.swap(pending_);
    for (c10d::Work* transfer : transfers_) transfer->abort();
  }
  changed_.notify_all();
  for (const auto& work : failed)
    work->fail(std::make_exception_ptr(PeerFailure(std::string(work->operation) + ": " + reason)));
}

void Progress::broken(const std::string& reason) {
  const MutexLock lock(mutex_);
  failure_ = reason;
}

std::string Progress::wait_for(const std::atomic<bool>& done) {
  MutexLock lock(mutex_);
  while (!done && failure_.empty()) lock.wait(changed_);
  return done ? std::string() : failure_;
}

void Progress::finish(std::atomic<bool>& done) {
  {
    const MutexLock lock(mutex_);
    done = true;
  }
  changed_.notify_all();
}

void Progress::add(const std::shared_ptr<Pending>& work) {
  const MutexLock lock(mutex_);
  pending_.insert(work);
}

void Progress::remove(const std::shared_ptr<Pending>& work, bool transport_failed) {
  const MutexLock lock(mutex_);
  pending_.erase(work);
  transport_failed_ |= transport_failed;
}

bool Progress::transport_failed() {
  const MutexLock lock(mutex_);
  return transport_failed_;
}

bool Progress::add_transfer(c10d::Work* transfer) {
  const MutexLock lock(mutex_);
  if (!failure_.empty()) return false;
  transfers_.insert(transfer);
  return true;
}

void Progress::remove_transfer(c10d::Work* transfer) {
  const MutexLock lock(mutex_);
  transfers_.erase(transfer);
}

}  // namespace accelerate::comm
