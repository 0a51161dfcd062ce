#pragma once

#include <pthread.h>
#include <signal.h>

namespace accelerate::comm {

/// For a scope, writing to a connection that a peer has closed is an error of the write and not a signal that ends the
/// process; threads that are started within are so for their lives. gloo and the store's server write without
/// MSG_NOSIGNAL: in Python the signal is ignored. The process's own handling of it stays as it is.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~NoSigpipe() {
    if (sigismember(&before_, SIGPIPE)) return;
    const timespec at_once{0, 0};
    sigtimedwait(&sigpipe_, nullptr, &at_once);  // what was raised within
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t sigpipe_, before_;
};

}  // namespace accelerate::comm
