#pragma once

#include <sys/types.h>

#include <vector>

namespace accelerate::launcher {

/// While it lives, processes whose parent ends become children of this one; those that are left are killed at its end.
///
/// For a rank without a process group of its own, by which what it leaves behind could be reached. Children that were
/// there before stay.
class Subreaper {
 public:
  Subreaper();
  ~Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;

 private:
  int was_subreaper_ = 0;
  std::vector<pid_t> not_ours_;
};

}  // namespace accelerate::launcher
