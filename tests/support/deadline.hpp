#pragma once

#include <unistd.h>

namespace support {

/// Ends the program (SIGALRM) when its scope lasts longer. For work that would take an hour if it were quadratic, or
/// wait for ever if it were wrong, and takes a second at most on any machine otherwise.
class Deadline {
 public:
  explicit Deadline(unsigned seconds = 120) { ::alarm(seconds); }
  ~Deadline() { ::alarm(0); }
  Deadline(const Deadline&) = delete;
};

}  // namespace support
