#pragma once

namespace accelerate::profiler {

/// While it lives, operators of threads that Kineto does not see (workers of loaders, of residency, the program's own)
/// become events of the recorders of observe/trace. Kineto's state belongs to a thread and must not be shared with one
/// that goes on when it ends; these threads may.
class OtherThreads {
 public:
  OtherThreads();
  ~OtherThreads();
  OtherThreads(const OtherThreads&) = delete;
  OtherThreads& operator=(const OtherThreads&) = delete;
};

}  // namespace accelerate::profiler
