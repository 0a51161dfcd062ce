#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>

namespace accelerate::comm {

class Group;

/// Kinds of operations that the log of collectives tells apart. A transport through shared memory does what they do
/// and counts as them.
enum class Collective : uint8_t { all_reduce, all_gather, reduce_scatter, broadcast, barrier, send, recv };
const char* name_of(Collective collective);

struct CommsLogSettings {
  bool verbose = false;                              ///< a line for each on rank 0 of the job
  std::set<Collective> operations = {};              ///< only these; empty: all
  std::function<void(const std::string&)> say = {};  ///< prints a line; any thread
};

/// Counts from here on, of the whole process. Forgets what was counted before.
void start_comms_log(CommsLogSettings settings);
/// The counts stay readable.
void stop_comms_log();

/// A collective that is under way. While nobody counts it is one relaxed load.
class LoggedCollective {
 public:
  LoggedCollective() = default;
  /// @param bytes  that this rank brings
  LoggedCollective(Collective collective, int64_t bytes, const Group& group);

  explicit operator bool() const { return begin_.has_value(); }
  /// It is done. Where collectives run on a device's stream this waits for the device. Nothing the second time; one
  /// that is dropped instead has failed and does not count.
  void end();

 private:
  Collective collective_ = Collective::barrier;
  int64_t bytes_ = 0, ranks_ = 1;
  std::optional<int> device_ = {};  ///< that has to be waited for
  bool prints_ = false;
  std::optional<std::chrono::steady_clock::time_point> begin_ = {};
};

/// One that this thread stays in: what it is made of (barriers, further collectives) does not count by itself.
class LoggedScope {
 public:
  LoggedScope(Collective collective, int64_t bytes, const Group& group);
  ~LoggedScope();
  LoggedScope(const LoggedScope&) = delete;
  LoggedScope& operator=(const LoggedScope&) = delete;

 private:
  const int exceptions_;
  LoggedCollective logged_;
};

}  // namespace accelerate::comm
