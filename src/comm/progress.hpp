#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "comm/watchdog.hpp"

namespace c10d {
class Work;
}
namespace c10::ivalue {
struct Future;
}

namespace accelerate::comm {

/// A future that either the transport or the watchdog completes, whoever is first.
struct Pending {
  explicit Pending(const char* operation);
  void fail(const std::exception_ptr& error);
  void complete(const at::Tensor& tensor);

  const char* const operation;
  std::atomic<bool> done{false};
  const c10::intrusive_ptr<c10::ivalue::Future> future;
};

/// What this rank does in one group.
struct Activity {
  std::string group;  ///< for messages: "group of all 4 ranks"
  int64_t sequence = 0;
  const char* operation = "none";
  int64_t inside = 0;
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

/// What this rank does in all groups of the process, and what a failure must end. Shared by the groups, and with
/// callbacks that may outlive them.
struct Progress {
  std::mutex mutex;                            ///< of all that follows
  std::condition_variable changed;             ///< something ended, or a peer failed
  std::map<std::string, Activity> activities;  ///< by the groups' keys; none is ever removed
  std::string peer_failure;                    ///< what a peer announced, or why the groups are broken
  std::string async_error;                     ///< an asynchronous operation's transport error
  std::set<std::shared_ptr<Pending>> pending;
  std::set<c10d::Work*> transfers;  ///< that somebody blocks on; a failure elsewhere ends the wait

  // These lock the mutex themselves.
  Activity& activity(const std::string& key, const std::string& group);
  void begin(Activity& activity, const char* operation);
  void end(Activity& activity);
  RankStatus status();
  /// Empty while all is well.
  std::string failure();
  /// Ends whatever waits.
  void peer_failed(const std::string& reason);
};

/// For the length of a scope.
class InCollective {
 public:
  InCollective(Progress& progress, Activity& activity, const char* operation)
      : progress_(progress), activity_(activity) {
    progress_.begin(activity_, operation);
  }
  ~InCollective() { progress_.end(activity_); }
  InCollective(const InCollective&) = delete;
  InCollective& operator=(const InCollective&) = delete;

 private:
  Progress& progress_;
  Activity& activity_;
};

}  // namespace accelerate::comm
