#pragma once

#include <sys/types.h>

#include "launch/system/process.hpp"

namespace accelerate::launcher {

/// A small process that outlives the launcher's sudden death just long enough to kill what is registered here, and to
/// remove the launcher's temporary folders.
///
/// The kernel kills the ranks when the launcher dies (PR_SET_PDEATHSIG) but not the processes that the ranks started;
/// these are reached by their process groups. The warden sleeps in read() on a pipe from the launcher: the end of the
/// pipe without a farewell means that the launcher is gone, by SIGKILL or by an exception.
class Warden {
 public:
  /// @param capacity the most targets registered at one time.
  /// @param terminal a descriptor on which `restore` is written if the launcher dies while terminal_divided(), and
  /// whose modes are then what they are now; -1: none.
  explicit Warden(size_t capacity, int terminal = -1, const char* restore = "");
  /// Kills what is still registered. Folders stay, for they have owners.
  ~Warden();
  Warden(const Warden&) = delete;
  Warden& operator=(const Warden&) = delete;

  /// `target` is as for kill(2): a process, or minus a process group. Both may be called between fork and exec; a
  /// child that registers itself there leaves no moment in which it has started something and is not known here.
  void watch(pid_t target) const { tell(target, 1); }
  void forget(pid_t target) const { tell(target, 0); }
  void terminal_divided(bool divided) const;

 private:
  void tell(pid_t target, pid_t wanted) const;
  pid_t pid_ = -1;
  Fd pipe_;
};

}  // namespace accelerate::launcher
