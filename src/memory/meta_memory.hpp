#pragma once

#include <cstdint>

#include "accelerate/utils/memory.hpp"

namespace accelerate::meta_memory {

/// The use of tensors that this thread makes from now on, until the scope ends. Costs nothing to speak of when nobody
/// counts.
class Purpose {
 public:
  explicit Purpose(MemoryUse use);
  Purpose(const Purpose&) = delete;
  Purpose& operator=(const Purpose&) = delete;
  ~Purpose();

 private:
  int before_;
};

/// For tensors that exist for their sizes only and never will have bytes.
class Uncounted {
 public:
  Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
  ~Uncounted();

 private:
  int before_;
};

/// While it lives, each storage on the meta device of this process is counted from its birth to its end as if it had
/// the bytes that it says. One at a time.
class Meter {
 public:
  Meter();
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;
  ~Meter();

  struct Reading {
    MemoryByUse now, at_peak;  ///< at_peak: when the sum was highest since the last read()
    MemoryByUse peaks;         ///< each use's own highest; `total` is at_peak's
  };
  /// And starts new peaks.
  Reading read();
};

}  // namespace accelerate::meta_memory
