#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "accelerate/utils/error.hpp"
#include "comm/watchdog.hpp"
#include "utils/thread_annotations.hpp"

namespace c10d {
class Work;
}
namespace c10::ivalue {
struct Future;
}

namespace accelerate::comm {

/// The error of a future that waited for a peer that has failed. Whoever waits for it knows where that was.
struct PeerFailure : CommError {
  using CommError::CommError;
};

/// A future that either the transport or the watchdog completes, whoever is first.
struct Pending {
  /// @param device  of the tensor that completes it
  Pending(const char* operation, const at::Device& device);
  void fail(const std::exception_ptr& error);
  void complete(const at::Tensor& tensor);

  const char* const operation;
  std::atomic<bool> done{false};
  const c10::intrusive_ptr<c10::ivalue::Future> future;
};

/// This rank's activity in one group. For Progress alone, whose mutex guards it.
struct GroupActivity {
  std::string group;  ///< for messages: "group of all 4 ranks"
  int64_t next = -1;  ///< the member of the group that is asked first why a wait takes long
  int64_t sequence = 0, inside = 0;
  std::deque<std::pair<const char*, int64_t>> recent;  ///< operations begun, and histories up to them
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

/// This rank's activity in all groups of the process, and the waits that a failure must end. The groups share it, and
/// callbacks that may outlive them. Thread-safe.
class Progress {
 public:
  /// By the group's key. Stays where it is as long as this lives.
  GroupActivity& activity(const std::string& key, const std::string& group, int64_t next = -1);
  /// @param bytes  that every rank should bring, or a number for these and what else must be the same
  void begin(GroupActivity& activity, const char* operation, int64_t bytes = 0);
  void end(GroupActivity& activity);
  RankStatus status();

  /// The failure that a peer announced, or the reason why the groups are broken; empty while all is well.
  std::string failure();
  /// Ends whatever waits.
  void peer_failed(const std::string& reason);
  /// This rank has found out by itself, and says so.
  void broken(const std::string& reason);

  /// Waits for finish(done) or a failure, whichever comes first, and returns the failure.
  std::string wait_for(const std::atomic<bool>& done);
  void finish(std::atomic<bool>& done);

  /// From add() to remove() a failure elsewhere ends `work`. @param transport_failed  it has ended by itself, so
  void add(const std::shared_ptr<Pending>& work);
  void remove(const std::shared_ptr<Pending>& work, bool transport_failed);
  /// Whether an asynchronous operation has ended with a transport error.
  bool transport_failed();

  /// From add_transfer() to remove_transfer() a failure elsewhere ends the wait for it. @return false: there is one
  /// already
  bool add_transfer(c10d::Work* transfer);
  void remove_transfer(c10d::Work* transfer);

 private:
  Mutex mutex_;
  std::condition_variable changed_;  ///< something ended, or a peer failed
  std::map<std::string, GroupActivity> activities_ ACCELERATE_GUARDED_BY(mutex_);  ///< none is ever removed
  std::string failure_ ACCELERATE_GUARDED_BY(mutex_);
  bool transport_failed_ ACCELERATE_GUARDED_BY(mutex_) = false;
  std::set<std::shared_ptr<Pending>> pending_ ACCELERATE_GUARDED_BY(mutex_);
  std::set<c10d::Work*> transfers_ ACCELERATE_GUARDED_BY(mutex_);  ///< that somebody blocks on
};

/// For the length of a scope.
class InCollective {
 public:
  InCollective(Progress& progress, GroupActivity& activity, const char* operation, int64_t bytes = 0)
      : progress_(progress), activity_(activity) {
    progress_.begin(activity_, operation, bytes);
  }
  ~InCollective() { progress_.end(activity_); }
  InCollective(const InCollective&) = delete;
  InCollective& operator=(const InCollective&) = delete;

 private:
  Progress& progress_;
  GroupActivity& activity_;
};

}  // namespace accelerate::comm
