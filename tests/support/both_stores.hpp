#pragma once

#include <cstdlib>
#include <functional>
#include <string>

#include "accelerate/state.hpp"

namespace support {

/// A new beginning for a test that makes several Accelerators one after the other.
inline void reset_states() {
  accelerate::AcceleratorState::reset();
  accelerate::GradientState::reset();
}

/// Runs `body` with shards in shared memory, then with shards that are gathered through c10d. Its argument says which,
/// for messages.
inline void on_both_stores(const std::function<void(const std::string&)>& body) {
  for (const char* shared : {"1", "0"}) {
    ::setenv("ACCELERATE_SHARED_MEMORY", shared, 1);
    reset_states();
    body(std::string("shared memory ") + shared);
  }
  ::unsetenv("ACCELERATE_SHARED_MEMORY");
}

}  // namespace support
