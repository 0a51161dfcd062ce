#include "launch/supervise/subreaper.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>

#include "launch/system/process.hpp"

namespace accelerate::launcher {

Subreaper::Subreaper() {
  ::prctl(PR_GET_CHILD_SUBREAPER, &was_subreaper_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  not_ours_ = children_of_this_process();
}

Subreaper::~Subreaper() {
  // Killing one may hand us its own children: look again until there are none, and give up on what can't be killed.
  for (int round = 0; round < 100; ++round) {
    bool found = false;
    for (pid_t pid : children_of_this_process())
      if (std::find(not_ours_.begin(), not_ours_.end(), pid) == not_ours_.end()) {
        found = true;
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    if (!found) break;
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, was_subreaper_);
}

}  // namespace accelerate::launcher
